"""How much of a GPU program is replayed as CUDA graphs: read from its optimized HLO.

XLA turns what a program launches into graphs ("command buffers") when it loads it, compiled or from
the cache, and no interface tells the result. What it may take is decided operation by operation, so
the same rule is applied here to the text of the program. scripts/check_gpu_compile holds that rule
against XLA's own dump, program by program.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

# XLA's own default, and the two that let the attention's loop into the captured graph. Without them
# the host reads each trip count and waits for the device: on an H200 a decode step of 8B shape took
# 17 ms of which the host waited all; with them 8.7 ms and 2.7 ms (scripts/gpu_report.py).
COMMAND_KINDS: Final = (
    "FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "WHILE",
    "CONDITIONAL",
)  # fmt: skip

MIN_GRAPH_LEN: Final = 5  # operations; XLA launches fewer one by one (xla_gpu_graph_min_graph_size)

_NO_LAUNCH: Final = frozenset(
    (
        "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all",
        "add-dependency", "optimization-barrier",
    )
)  # fmt: skip
_KERNELS: Final = frozenset(("fusion", "copy", "sort"))
# Custom calls of this engine's programs; what is not here counts as not captured.
_TARGETS: Final[Mapping[str, str]] = {
    "__cublas$gemm": "CUBLAS",
    "__cublas$lt$matmul": "CUBLASLT",
    "__gpu$xla.gpu.triton": "FUSION",  # Pallas on Triton: a kernel like any other
    "mosaic_gpu_v2": "CUSTOM_CALL",
}
_COMPUTATION: Final = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION: Final = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(")
_TARGET: Final = re.compile(r'custom_call_target="([^"]*)"')
_CALLED: Final = re.compile(
    r"(?:condition|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES: Final = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Capture:
    """What a program does each time it runs.

    Attributes:
      num_graphs: graphs that it replays.
      num_operations: kernels, copies and library calls in it; those of a loop's body count once.
      num_outside: of those the ones in no graph, which the host launches one by one.
    """

    num_graphs: int
    num_operations: int
    num_outside: int

    @property
    def is_whole(self) -> bool:
        """Whether the host has one thing to launch."""
        return self.num_graphs + self.num_outside <= 1


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class _Operation:
    """One operation that is launched, with those inside it."""

    num_operations: int
    is_capturable: bool


def read_capture(hlo: str, *, kinds: Collection[str] = COMMAND_KINDS) -> Capture:
    """Returns what XLA makes of a program.

    Args:
      hlo: the text of the optimized module, of a GPU.
      kinds: what `xla_gpu_enable_command_buffer` has.
    """
    reader = _Reader(hlo, kinds)
    num_graphs = num_outside = num_operations = run_len = 0
    for operation in [*reader.launched(reader.entry), None]:  # None ends the last run
        if operation is not None and operation.is_capturable:
            run_len += operation.num_operations
            continue
        if run_len >= MIN_GRAPH_LEN:
            num_graphs += 1
        else:
            num_outside += run_len
        num_operations += run_len
        run_len = 0
        if operation is not None:
            num_outside += operation.num_operations
            num_operations += operation.num_operations
    return Capture(num_graphs=num_graphs, num_operations=num_operations, num_outside=num_outside)


class _Reader:
    """The computations of a module, by name."""

    def __init__(self, hlo: str, kinds: Collection[str]) -> None:
        self._kinds = kinds
        self._lines: dict[str, list[str]] = {}
        self.entry = ""
        lines: list[str] = []
        for line in hlo.splitlines():
            if found := _COMPUTATION.match(line):
                lines = self._lines.setdefault(found[2], [])
                self.entry = found[2] if found[1] else self.entry
            elif line.startswith(" "):
                lines.append(line)

    def launched(self, computation: str) -> Iterator[_Operation]:
        """Yields what a computation launches, in order (`command_buffer_conversion_pass.cc`)."""
        if computation not in self._lines:  # a text of another form: what it launches is not known
            yield _Operation(num_operations=1, is_capturable=False)
            return
        for line in self._lines[computation]:
            found = _OPERATION.match(line)
            if found is None or found[1] in _NO_LAUNCH:
                continue
            name = found[1]
            if name == "call":
                for called in _called(line):
                    yield from self.launched(called)
            elif name in ("while", "conditional"):
                yield self._control_flow(line, "WHILE" if name == "while" else "CONDITIONAL")
            else:
                kind = "FUSION" if name in _KERNELS else _kind_of_custom_call(line)
                yield _Operation(num_operations=1, is_capturable=kind in self._kinds)

    def _control_flow(self, line: str, kind: str) -> _Operation:
        """Returns a loop or a choice: XLA captures it with all that is in it, or not at all."""
        inside = [operation for name in _called(line) for operation in self.launched(name)]
        return _Operation(
            num_operations=1 + sum(operation.num_operations for operation in inside),
            is_capturable=kind in self._kinds and all(op.is_capturable for op in inside),
        )


def _called(line: str) -> list[str]:
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += [name.strip().removeprefix("%") for name in branches.split(",")]
    return names


def _kind_of_custom_call(line: str) -> str | None:
    found = _TARGET.search(line)
    return _TARGETS.get(found[1]) if found else None
