"""Compiling for an H200 where there is none, and what the compiler's own dump says of the result.

Importing this sets jax up for it; do so before jax is imported anywhere else.
"""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # or the plugin looks for a driver
DUMP = Path(tempfile.mkdtemp(prefix="jaxserve-gpu-"))
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
)
os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMP)  # its kernels are custom calls, which XLA dumps not

import jax  # noqa: E402  # after the environment is set
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

# NVIDIA's data sheet, and what CUDA reports; without driver_version XLA captures no loops.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" name: "NVIDIA H200"
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 pcie_bandwidth: 32000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def make_mesh() -> Mesh:
    """Returns one H200 that is not there."""
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    )
    return Mesh(np.array(topology.devices), ("x",))


def place_on(mesh: Mesh) -> NamedSharding:
    """Returns where every argument lies."""
    return NamedSharding(mesh, PartitionSpec())


def clear_dump() -> None:
    for stale in DUMP.iterdir():
        stale.unlink()


def compile_for(
    mesh: Mesh, function: jax.stages.Wrapped, *arguments: jax.ShapeDtypeStruct
) -> jax.stages.Compiled:
    """Returns the compiled program; the dump then holds it alone."""
    clear_dump()
    placed = (
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=place_on(mesh))
        for argument in arguments
    )
    with jax.set_mesh(mesh):
        return function.lower(*placed).compile()


def thunk_sequence(module: str) -> str:
    """Returns the newest dump of what a module runs, as XLA writes it."""
    found: list[Path] = []
    for suffix in ("_after_thunk_passes", ""):  # the second where nothing was captured
        found = found or sorted(
            DUMP.glob(f"*jit_{module}.*thunk_sequence{suffix}.txt"),
            key=lambda path: path.stat().st_mtime,
        )
    if not found:
        sys.exit(f"no thunk sequence of {module} in {DUMP}: did XLA_FLAGS change?")
    return found[-1].read_text()


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


def read_resources(module: str, kernel: str) -> Resources:
    """Returns what the dumped module's kernel takes, by its launch and by ptxas."""
    launch = _find_launch(module, kernel)
    listings = [path for path in DUMP.glob("*.ptx") if f".entry {kernel}" in path.read_text()]
    if launch is None or len(listings) != 1:
        sys.exit(f"{len(listings)} listings of {kernel} in {DUMP}: did the dump's form change?")
    told = subprocess.run(
        [_find_ptxas(), "-v", "-arch", "sm_90a", "-O3", listings[0], "-o", os.devnull],
        check=True, capture_output=True, text=True,
    ).stderr  # fmt: skip
    stores, loads = (
        sum(map(int, re.findall(rf"(\d+) bytes spill {kind}", told)))
        for kind in ("stores", "loads")
    )
    return Resources(
        num_threads=launch[0],
        num_registers=max(map(int, re.findall(r"Used (\d+) registers", told))),
        spill_bytes=stores + loads,
        shared_bytes=launch[1],
    )


def _find_launch(module: str, kernel: str) -> tuple[int, int] | None:
    """Returns a kernel's threads and bytes of shared memory: of XLA's own, or of Mosaic's."""
    found = re.search(
        rf"{kernel} grid: \[.*?\] threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+)",
        thunk_sequence(module),
    )
    if found is None:
        texts = [path.read_text() for path in DUMP.glob(f"{kernel}_*after_layout_inference.txt")]
        found = re.search(
            r"threads\(.*?\) in \(\S+ = %c(\d+)\w*, .*dynamic_shared_memory_size %c(\d+)_",
            "".join(texts),
        )
    return (int(found[1]), int(found[2])) if found else None


def _find_ptxas() -> Path:
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [path for folder in folders or () for path in Path(folder).glob("cu*/bin/ptxas")]
    if not found:
        sys.exit("no ptxas: pip install --no-deps nvidia-cuda-nvcc")
    return found[0]
