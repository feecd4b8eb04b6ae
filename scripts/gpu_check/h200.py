"""Compiling for an H200 where there is none, and what the compiler's own dump says of the result.

Importing this sets jax up for it; do so before jax is imported anywhere else.
"""

import atexit
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # or the plugin looks for a driver
DUMP = Path(tempfile.mkdtemp(prefix="jaxserve-gpu-"))
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
)

os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMP)  # its kernels are custom calls, which XLA dumps not

import jax  # noqa: E402  # after the environment is set
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from scripts.gpu_check.dump import Compiled, assemble  # noqa: E402

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


def compile_for(
    lower: Callable[[], jax.stages.Lowered], mesh: Mesh, options: dict[str, str | bool | int]
) -> Compiled:
    """Returns the compiled program, with what the dump tells of it."""
    shutil.rmtree(DUMP)
    DUMP.mkdir()
    started_s = _processor_s()
    with jax.set_mesh(mesh):
        lowered = lower()
        lowered_s = _processor_s()
        compiled = lowered.compile(options)
    compiled_s = _processor_s()
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA:GPU always has one"
    donated = (leaf for leaf in jax.tree.leaves(lowered.args_info) if leaf.donated)
    return Compiled(
        thunk_sequence=_read_thunk_sequence(),
        mosaic_launches={
            path.name: path.read_text() for path in DUMP.glob("*.after_layout_inference.txt")
        },
        kernels=assemble(DUMP),
        hlo=compiled.as_text() or "",
        lower_s=lowered_s - started_s,
        compile_s=compiled_s - lowered_s,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        donated_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in donated),
    )


def _processor_s() -> float:
    return sum(os.times()[:4])  # with that of the assemblers it waited for


def _read_thunk_sequence() -> str:
    for suffix in ("_after_thunk_passes", ""):  # the second where nothing was captured
        found = list(DUMP.glob(f"*thunk_sequence{suffix}.txt"))
        if len(found) == 1:
            return found[0].read_text()
    sys.exit(f"no thunk sequence, or several, in {DUMP}: did XLA_FLAGS change?")
