"""What XLA's dump says of a program compiled for a GPU: what it runs, and what its kernels take.

Imports neither jax nor the plugin: it reads text.
"""

import collections
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

COMMAND_BUFFER = "kCommandBuffer"  # XLA's name of a captured graph
# `    005: kCustomKernel [prev=004 (1) | sink] gemm_fusion_dot_2 grid: [192, 1, 1] threads: ...`;
# a loop or a condition names its parts in lines of their own, with what they run indented below.
_THUNK = re.compile(r"^( *)\d+: (k\w+)(?: +\[.*?\] *(?:(\S+) grid: )?)?", re.MULTILINE)
_SORT = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? (?:(?:sort|topk)\(|custom-call\(.*\"(?:__cub\$|\S*TopK))",
    re.MULTILINE,
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Coverage:
    """What one run of a program does, and how much of it one captured graph holds.

    Attributes:
      top_level: kinds of what the host launches one by one: a graph is one, whatever is in it.
      kernels: of each distinct kernel, how many places of the program run it.
      loops, conditions: while loops and branches, wherever they are.
    """

    top_level: tuple[str, ...]
    kernels: dict[str, int]
    loops: int
    conditions: int

    @property
    def num_graphs(self) -> int:
        return self.top_level.count(COMMAND_BUFFER)

    @property
    def outside(self) -> tuple[str, ...]:
        """Kinds of what no graph holds, each once."""
        return tuple(sorted(set(self.top_level) - {COMMAND_BUFFER}))

    @property
    def num_launches(self) -> int:
        return sum(self.kernels.values())


def read_coverage(thunk_sequence: str) -> Coverage:
    """Returns what a dumped thunk sequence tells.

    Raises:
      ValueError: nothing in it has the form of a thunk.
    """
    thunks = _THUNK.findall(thunk_sequence)
    if not thunks:
        raise ValueError("no thunk in the dump's thunk sequence: did its form change?")
    kinds = collections.Counter(kind for _, kind, _ in thunks)
    return Coverage(
        top_level=tuple(kind for indent, kind, _ in thunks if not indent),
        kernels=dict(collections.Counter(name for _, _, name in thunks if name)),
        loops=kinds["kWhile"],
        conditions=kinds["kConditional"],
    )


def count_copies(hlo: str, shape: tuple[int, ...]) -> int:
    """Returns how often an optimized program copies an array of that shape, inside fusions too."""
    dims = ",".join(map(str, shape))
    return len(re.findall(rf"= \w+\[{dims}\]\S* copy\(", hlo))


def count_sorts(hlo: str) -> int:
    """Returns how often an optimized program sorts, by itself or in a library."""
    return len(_SORT.findall(hlo))


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Resources:
    """What one program of a kernel takes of a processor, and so how many fit beside each other."""

    num_threads: int
    num_registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def num_resident(self) -> int:
        """Programs on one processor at a time (CUDA's occupancy rules for 9.0)."""
        # Registers are given out 8 a thread, 256 a warp; 1 KiB of shared memory is the system's.
        by_registers = 65536 // (-(-self.num_registers // 8) * 8 * self.num_threads)
        by_shared = 233472 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, 2048 // self.num_threads, 32)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Assembled:
    """What ptxas says of a kernel."""

    num_registers: int
    spill_bytes: int


def read_assembly(ptxas_output: str) -> dict[str, Assembled]:
    """Returns what `ptxas -v` told of each kernel."""
    found = {}
    for part in ptxas_output.split("Compiling entry function '")[1:]:
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
        registers = re.search(r"Used (\d+) registers", part)
        if registers is None or len(spilled) != 2:
            raise ValueError(f"ptxas told neither registers nor spills of {part[:40]!r}")
        found[part.split("'")[0]] = Assembled(
            num_registers=int(registers[1]), spill_bytes=sum(map(int, spilled))
        )
    return found


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Compiled:
    """A compiled program, and what the dump tells of it.

    Attributes:
      thunk_sequence: what it runs, as XLA writes it.
      mosaic_launches: Mosaic's own text of each of its kernels, by a name that begins as the
        kernel's does.
      kernels: what ptxas says of each distinct one.
      hlo: the optimized program.
      lower_s, compile_s: processor time.
      donated_bytes: of the arguments that it may write over.
      alias_bytes: of those that it does write over.
    """

    thunk_sequence: str
    mosaic_launches: dict[str, str]
    kernels: dict[str, Assembled]
    hlo: str
    lower_s: float
    compile_s: float
    temp_bytes: int
    alias_bytes: int
    donated_bytes: int


def assemble(folder: Path) -> dict[str, Assembled]:
    """Returns what ptxas says of every kernel whose listing the folder holds."""
    together: list[Path] = []
    alone: list[Path] = []
    for path in sorted(folder.glob("*.ptx")):
        # Constants have the same name in several listings, source files (Mosaic's) the same number:
        # those cannot be assembled together.
        is_alone = re.search(r"^\S*\s*\.(?:global|const|file)\s", path.read_text(), re.MULTILINE)
        (alone if is_alone else together).append(path)
    groups = [[path] for path in alone] + ([together] if together else [])
    found: dict[str, Assembled] = {}
    for group in groups:
        told = subprocess.run(
            [_find_ptxas(), "-v", "-arch", "sm_90a", "-O3", *group, "-o", os.devnull],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found |= read_assembly(told.stderr + told.stdout)
    return found


def read_launch(compiled: Compiled, kernel: str) -> tuple[int, int]:
    """Returns a kernel's threads and the bytes of shared memory that one of its programs takes: by
    XLA's launch, or by Mosaic's own."""
    launch = re.search(
        rf" {kernel} grid: \[.*?\] threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+)",
        compiled.thunk_sequence,
    ) or re.search(
        r"threads\(.*?\) in \(\S+ = %c(\d+)\w*, .*dynamic_shared_memory_size %c(\d+)_",
        "".join(t for name, t in compiled.mosaic_launches.items() if name.startswith(f"{kernel}_")),
    )
    if launch is None:
        raise ValueError(f"no launch of {kernel} in the dump: did its form change?")
    return int(launch[1]), int(launch[2])


def _find_ptxas() -> Path:
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [path for folder in folders or () for path in Path(folder).glob("cu*/bin/ptxas")]
    if not found:
        sys.exit("no ptxas: run scripts/check_gpu_compile, which installs it")
    return found[0]
