"""What a compiled program is held to, and the faults that are found."""

import dataclasses
import enum
from collections.abc import Iterator

from jaxserve.runner.capture import MIN_GRAPH_LEN
from scripts.gpu_check.dump import (
    COMMAND_BUFFER,
    Compiled,
    Coverage,
    Resources,
    count_copies,
    count_sorts,
)


class Kind(enum.Enum):
    """Of a fault: what went wrong."""

    SPILLS = "spilled registers"
    OCCUPANCY = "too few fit on a processor"
    TEMPORARIES = "temporaries"
    NOT_IN_PLACE = "not in place"
    POOL_COPY = "a copy of the pool"
    NOT_ONE_GRAPH = "not one captured graph"
    GRAPHS_MISREAD = "graphs are read wrongly"
    LOOPS = "loops"
    SORTS = "sorts"
    MANY_KERNELS = "too many distinct kernels"
    MANY_LAUNCHES = "too many launches"
    MANY_PROGRAMS = "too many programs a step"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What a program may take.

    Attributes:
      kernels: distinct ones. Each is tuned and loaded on its own, so layers have to share theirs.
      launches: kernels of one run; None where layers and rows make many. No program sorts.
      loops, conditions: as many as its code has, each inside the graph.
      pool_shapes: of the arrays of a layer's pool, which are never copied; none where a program has
        no pool.
    """

    temp_bytes: int
    kernels: int
    launches: int | None
    loops: int
    conditions: int
    pool_shapes: tuple[tuple[int, ...], ...]


def find_faults(compiled: Compiled, coverage: Coverage, limits: Limits) -> Iterator[Fault]:
    """Yields all that a program does and should not."""
    for name, kernel in compiled.kernels.items():
        if kernel.spill_bytes:
            yield Fault(kind=Kind.SPILLS, text=f"{kernel.spill_bytes} bytes in {name}")
    missing = coverage.kernels.keys() - compiled.kernels.keys()
    if missing:
        yield Fault(kind=Kind.SPILLS, text=f"no listing of {', '.join(sorted(missing))}")
    if compiled.temp_bytes > limits.temp_bytes:
        text = f"{compiled.temp_bytes} bytes, of at most {limits.temp_bytes}"
        yield Fault(kind=Kind.TEMPORARIES, text=text)
    if compiled.alias_bytes != compiled.donated_bytes:
        text = f"{compiled.alias_bytes} bytes are, of {compiled.donated_bytes}"
        yield Fault(kind=Kind.NOT_IN_PLACE, text=text)
    if copies := sum(count_copies(compiled.hlo, shape) for shape in limits.pool_shapes):
        yield Fault(kind=Kind.POOL_COPY, text=f"{copies} layers of it")
    # A few kernels are launched as they are: XLA makes no graph of so few.
    are_few = len(coverage.top_level) == coverage.num_launches < MIN_GRAPH_LEN
    if coverage.top_level != (COMMAND_BUFFER,) and not (are_few and not coverage.num_graphs):
        text = f"{coverage.num_graphs} graphs, outside {', '.join(coverage.outside) or 'nothing'}"
        yield Fault(kind=Kind.NOT_ONE_GRAPH, text=text)
    if (coverage.loops, coverage.conditions) != (limits.loops, limits.conditions):
        text = (
            f"{coverage.loops} loops and {coverage.conditions} conditions, where its code has "
            f"{limits.loops} and {limits.conditions}"
        )
        yield Fault(kind=Kind.LOOPS, text=text)
    if sorts := count_sorts(compiled.hlo):
        yield Fault(kind=Kind.SORTS, text=f"{sorts}, where no program needs one")
    if limits.launches is not None and coverage.num_launches > limits.launches:
        text = f"{coverage.num_launches}, of at most {limits.launches}"
        yield Fault(kind=Kind.MANY_LAUNCHES, text=text)
    if len(coverage.kernels) > limits.kernels:
        text = f"{len(coverage.kernels)}, of at most {limits.kernels}"
        yield Fault(kind=Kind.MANY_KERNELS, text=text)


def find_kernel_faults(resources: Resources, *, planned_resident: int) -> Iterator[Fault]:
    """Yields what is wrong with one kernel."""
    if resources.spill_bytes:
        yield Fault(kind=Kind.SPILLS, text=f"{resources.spill_bytes} bytes")
    if resources.num_resident < planned_resident:
        text = f"{resources.num_resident}, of {planned_resident} planned: {resources}"
        yield Fault(kind=Kind.OCCUPANCY, text=text)
