"""Compiles this engine's programs for an H200 on a machine without a GPU, and looks at the result.

    python -m scripts.check_gpu_compile [--model 135m 8b] [--attention xla triton mosaic]

XLA's GPU pipeline needs no device and no driver, only its plugin, in a venv of its own:

    pip install jax==0.11.2
    pip install --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 \\
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime

Checked of each program: the pool is updated in place (alias bytes), temporaries hold no copy of it,
all it does is inside one command buffer, XLA's form of a captured graph, and what the metrics say
of that (jaxserve/runner/capture.py) is what XLA's own dump says. What a real GPU would
choose by autotuning is not checked, and no time is measured. Kernels: scripts/check_gpu_kernels.py.
"""

import argparse
import math
import re
import sys
import time

from scripts import h200  # first: it sets jax up

import jax  # isort: skip

from jaxserve.config import Config
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.model.config import MAX_EOS_IDS
from jaxserve.runner.buckets import build_scheme
from jaxserve.runner.capture import read_capture
from jaxserve.runner.programs import (
    ProgramKey,
    compiler_options,
    lower,
    program_keys,
)
from jaxserve.runner.spec import RunnerSpec
from scripts.gpu_report import MODELS, make_config

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
    name: str, config: Config, *, max_model_tokens: int, attention: Impl
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
        kernels=Kernels(attention=attention),
        batch_invariant=False,
        command_buffers=True,
    )
    return spec, program_keys(spec, scheme, has_host_tier=True)


def top_level_thunks(module: str) -> list[str]:
    """Returns the kinds of thunk a module runs: a command buffer is one, whatever is in it."""
    return re.findall(r"^\d+: (k\w+)", h200.thunk_sequence(module), re.MULTILINE)


def check_program(key: ProgramKey, mesh: jax.sharding.Mesh, pool_bytes: int) -> bool:
    """Compiles a program, prints a line about it and returns whether all is well."""
    h200.clear_dump()
    started_s = time.monotonic()
    with jax.set_mesh(mesh):
        compiled = lower(key, h200.place_on(mesh)).compile(compiler_options(key.spec, "gpu"))
    seconds = time.monotonic() - started_s
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA:GPU always has one"
    thunks = top_level_thunks(MODULES[key.kind])
    capture = read_capture(compiled.as_text() or "")
    is_read = capture.num_graphs == thunks.count("kCommandBuffer")
    outside = [kind for kind in thunks if kind != "kCommandBuffer"]
    has_pool = key.kind in ("forward", "page_copy", "page_in")
    is_in_place = not has_pool or memory.alias_size_in_bytes >= pool_bytes
    is_small = memory.temp_size_in_bytes < pool_bytes / 2
    # a graph of one kernel gains nothing
    is_captured = thunks in (["kCommandBuffer"], ["kKernel"])
    is_good = is_in_place and is_small and is_captured and is_read
    print(
        f"  {key.name:22} {'ok   ' if is_good else 'FAULT'} "
        f"temp {memory.temp_size_in_bytes / 2**20:7.1f} MiB, in place {is_in_place}, "
        f"{thunks.count('kCommandBuffer')} command buffers"
        f"{'' if is_read else f' (read as {capture.num_graphs})'}, "
        f"outside: {', '.join(sorted(set(outside))) or 'nothing'}, {seconds:.1f} s",
        flush=True,
    )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["135m"])
    parser.add_argument(
        "--attention", nargs="+", choices=["xla", "triton", "mosaic"], default=["xla"]
    )
    parser.add_argument("--kind", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--max-model-tokens", type=int, default=2048)
    arguments = parser.parse_args()

    mesh = h200.make_mesh()
    faults = 0
    for name in arguments.model:
        for attention in arguments.attention:
            spec, keys = build_spec(
                name,
                Config(),
                max_model_tokens=arguments.max_model_tokens,
                attention=attention,
            )
            pool_bytes = 2 * math.prod(spec.kv_shape) * spec.model.num_layers
            print(f"{name}, {attention}: {len(keys)} programs, pool {pool_bytes >> 20} MiB")
            for key in keys:
                if key.kind in arguments.kind:
                    faults += not check_program(key, mesh, pool_bytes)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
