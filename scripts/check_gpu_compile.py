"""Compiles this engine's programs for an H200 on a machine without a GPU, and looks at the result.

    python -m scripts.check_gpu_compile [--model 135m 8b]

XLA's GPU pipeline needs no device and no driver, only its plugin, in a venv of its own:

    pip install jax==0.11.2
    pip install --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 \\
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime

Checked of each program: the pool is updated in place (alias bytes), temporaries hold no copy of it,
and every kernel of a step is inside a command buffer, XLA's form of a captured graph. What a real
GPU would choose by autotuning is not checked, and no time is measured.
"""

import argparse
import math
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # or the plugin looks for a driver
DUMP = tempfile.mkdtemp(prefix="jaxserve-gpu-")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP}"

import jax  # noqa: E402  # after the environment is set
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxserve.config import Config  # noqa: E402
from jaxserve.kernels.choice import Kernels  # noqa: E402
from jaxserve.model.config import MAX_EOS_IDS  # noqa: E402
from jaxserve.runner.buckets import build_scheme  # noqa: E402
from jaxserve.runner.programs import (  # noqa: E402
    ProgramKey,
    compiler_options,
    lower,
    program_keys,
)
from jaxserve.runner.spec import RunnerSpec  # noqa: E402
from scripts.gpu_report import MODELS, make_config  # noqa: E402

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

# What steps run again and again, and the function each is compiled from.
MODULES = {
    "forward": "forward_step",
    "output": "*output_step",
    "score": "score_step",
    "page_copy": "copy_pages",
    "page_out": "page_out",
    "page_in": "page_in",
}


def build_spec(
    name: str, config: Config, max_model_tokens: int
) -> tuple[RunnerSpec, tuple[ProgramKey, ...]]:
    model = make_config(name)
    scheme = build_scheme(config, max_model_tokens=max_model_tokens, min_rows=1)
    pages_per_seq = -(-max_model_tokens // config.kv.page_size)
    spec = RunnerSpec(
        model=model,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=config.kv.page_size,
        pages_per_seq=pages_per_seq,
        num_pages=1 + config.scheduler.max_seqs * pages_per_seq,
        max_seqs=config.scheduler.max_seqs,
        max_step_tokens=scheme.max_tokens,
        chunk_tile=config.buckets.chunk_tile,
        max_chunks=config.scheduler.max_chunks,
        max_logit_bias=config.limits.max_logit_bias,
        max_ban_ids=config.limits.max_stop_token_ids + MAX_EOS_IDS,
        max_logprobs=config.limits.max_logprobs,
        kernels=Kernels(),
    )
    return spec, program_keys(spec, scheme, has_host_tier=True)


def top_level_thunks(module: str) -> list[str]:
    """Returns the kinds of thunk the newest dump of a module runs outside command buffers."""
    found: list[Path] = []
    for suffix in ("_after_thunk_passes", ""):  # the second where nothing was captured
        found = found or sorted(
            Path(DUMP).glob(f"*jit_{module}.*thunk_sequence{suffix}.txt"),
            key=lambda path: path.stat().st_mtime,
        )
    if not found:
        sys.exit(f"no thunk sequence of {module} in {DUMP}: did XLA_FLAGS change?")
    return re.findall(r"^\d+: (k\w+)", found[-1].read_text(), re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["135m"])
    parser.add_argument("--max-model-tokens", type=int, default=2048)
    arguments = parser.parse_args()

    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    replicated = NamedSharding(mesh, PartitionSpec())
    faults = 0
    for name in arguments.model:
        spec, keys = build_spec(name, Config(), arguments.max_model_tokens)
        pool_bytes = 2 * math.prod(spec.kv_shape) * spec.model.num_layers
        print(f"{name}: {len(keys)} programs, pool {pool_bytes >> 20} MiB")
        for key in keys:
            if key.kind not in MODULES:
                continue
            for stale in Path(DUMP).iterdir():
                stale.unlink()
            with jax.set_mesh(mesh):
                compiled = lower(key, replicated).compile(compiler_options("gpu"))
            memory = compiled.memory_analysis()
            assert memory is not None, "XLA:GPU always has one"
            thunks = top_level_thunks(MODULES[key.kind])
            outside = [kind for kind in thunks if kind != "kCommandBuffer"]
            has_pool = key.kind in ("forward", "page_copy", "page_in")
            is_in_place = not has_pool or memory.alias_size_in_bytes >= pool_bytes
            is_small = memory.temp_size_in_bytes < pool_bytes / 2
            is_good = is_in_place and is_small and not outside
            faults += not is_good
            print(
                f"  {key.name:22} {'ok   ' if is_good else 'FAULT'} "
                f"temp {memory.temp_size_in_bytes / 2**20:7.1f} MiB, in place {is_in_place}, "
                f"outside command buffers: {', '.join(sorted(set(outside))) or 'nothing'}"
            )
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
