"""The sizes of a runner: pool, context and buckets, found in that order."""

import dataclasses
import math
from collections.abc import Callable

import jax

from jaxserve.config import Config
from jaxserve.errors import CapacityError
from jaxserve.host_pages import MAX_SWAP_IN, MAX_SWAP_OUT
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention.launch import (
    MAX_BYTE_POOL,
    find_pool_problem,
    find_split_len,
)
from jaxserve.model.config import MAX_EOS_IDS, ModelConfig
from jaxserve.model.masks import num_words
from jaxserve.model.params import num_param_bytes
from jaxserve.runner.buckets import BucketScheme, build_scheme
from jaxserve.runner.lowering import ProgramKey
from jaxserve.runner.memory import (
    check_pool_bytes,
    choose_max_model_tokens,
    choose_num_host_pages,
    choose_num_pages,
    free_device_bytes,
    read_memory_bytes,
)
from jaxserve.runner.programs import Programs, program_keys
from jaxserve.runner.spec import DtypeName, KvDtypeName, RunnerSpec, bytes_of_page
from jaxserve.runner.steps import init_arrays

# Compiles programs, to be measured.
Compile = Callable[[tuple[ProgramKey, ...]], None]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RunnerSizes:
    """What start-up worked out.

    Attributes:
      num_host_pages: pages of host memory that the pool's may go to.
    """

    spec: RunnerSpec
    scheme: BucketScheme
    max_model_tokens: int
    num_host_pages: int


def size_runner(
    model: ModelConfig,
    config: Config,
    *,
    dtypes: tuple[DtypeName, KvDtypeName],
    kernels: Kernels,
    programs: Programs,
    compile_keys: Compile,
) -> RunnerSizes:
    """Returns the sizes. Programs are compiled only where the pool's depends on what they need.

    Args:
      dtypes: of the weights and of the pool.
      kernels: as `choose_kernels` has them.
      compile_keys: puts programs into `programs`.

    Raises:
      CapacityError: parameters, programs or one full-length sequence do not fit, or a layer's pool
        is of a size that the attention cannot read.
      ConfigError: sizes that contradict each other or the model.
    """
    page_bytes = bytes_of_page(model, page_size=config.kv.page_size, kv_dtype=dtypes[1])

    def find_free_bytes() -> int:
        stats = jax.devices()[0].memory_stats()
        needed = 0
        if stats:
            needed = _needed_bytes(
                model, config, dtypes, kernels=kernels, programs=programs, compile_keys=compile_keys
            )
        return free_device_bytes(stats, needed_bytes=needed)

    num_pages = choose_num_pages(config, page_bytes=page_bytes, free_bytes=find_free_bytes)
    memory_bytes = read_memory_bytes(jax.devices()[0].memory_stats())
    check_pool_bytes(num_pages * page_bytes, memory_bytes=memory_bytes)
    max_model_tokens = choose_max_model_tokens(
        config, model_limit=model.max_position, num_pages=num_pages, page_bytes=page_bytes
    )
    num_host_pages = choose_num_host_pages(config.host_tier, page_bytes=page_bytes)
    sizes = _build_sizes(model, config, dtypes, num_pages, max_model_tokens, kernels=kernels)
    _check_layer(sizes.spec)
    return dataclasses.replace(sizes, num_host_pages=num_host_pages)


def _check_layer(spec: RunnerSpec) -> None:
    """Refuses a pool that the chosen attention would read wrongly.

    Raises:
      CapacityError: says of how many bytes it would be right.
    """
    if not spec.kernels.attention.startswith("triton"):
        return
    layer = jax.ShapeDtypeStruct(spec.kv_shape, spec.kv_dtype)
    if problem := find_pool_problem(layer):
        most = (MAX_BYTE_POOL - 1) // math.prod(spec.kv_shape[1:]) * spec.page_bytes
        raise CapacityError(
            f"{problem}; set kv.pool_bytes to at most {most}, or runner.attention to xla"
        )


def _build_sizes(
    model: ModelConfig,
    config: Config,
    dtypes: tuple[DtypeName, KvDtypeName],
    num_pages: int,
    max_model_tokens: int,
    *,
    kernels: Kernels,
) -> RunnerSizes:
    platform, is_invariant = jax.default_backend(), config.runner.batch_invariant
    pages_per_seq = -(-max_model_tokens // config.kv.page_size)
    if is_invariant:
        split_len = find_split_len(pages_per_seq * config.kv.page_size)
        kernels = dataclasses.replace(kernels, split_len=split_len)
    scheme = build_scheme(
        config,
        max_model_tokens=max_model_tokens,
        min_rows=_find_min_rows(model, kernels),
    )
    spec = RunnerSpec(
        model=model,
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        page_size=config.kv.page_size,
        pages_per_seq=pages_per_seq,
        num_pages=num_pages,
        max_seqs=config.scheduler.max_seqs,
        max_step_tokens=scheme.max_tokens,
        chunk_tile=config.buckets.chunk_tile,
        max_chunks=config.scheduler.max_chunks,
        max_logit_bias=config.limits.max_logit_bias,
        max_ban_ids=config.limits.max_stop_token_ids + MAX_EOS_IDS,
        max_logprobs=config.limits.max_logprobs,
        kernels=kernels,
        batch_invariant=is_invariant,
        command_buffers=platform == "gpu" and config.runner.command_buffers == "auto",
    )
    return RunnerSizes(
        spec=spec, scheme=scheme, max_model_tokens=max_model_tokens, num_host_pages=0
    )


def _find_min_rows(model: ModelConfig, kernels: Kernels) -> int:
    """Returns 2 where XLA multiplies: one row in bfloat16 takes it ten times as long on a CPU, and
    half as many kernels again on a GPU (scripts/check_gpu_compile)."""
    has_experts = any(layer.mlp == "experts" for layer in model.layers)  # those are XLA's
    return 2 if kernels.matmul == "xla" or has_experts else 1


def _needed_bytes(
    model: ModelConfig,
    config: Config,
    dtypes: tuple[DtypeName, KvDtypeName],
    *,
    kernels: Kernels,
    programs: Programs,
    compile_keys: Compile,
) -> int:
    """Returns what parameters, state and the hungriest program take beside the pool, measured on
    the largest programs over a pool of one sequence."""
    max_model_tokens = config.model.max_model_tokens or model.max_position
    num_pages = 1 + -(-max_model_tokens // config.kv.page_size)
    sizes = _build_sizes(model, config, dtypes, num_pages, max_model_tokens, kernels=kernels)
    keys = program_keys(sizes.spec, sizes.scheme)
    kinds = ("forward", "output", "score")
    largest = tuple(next(key for key in keys if key.kind == kind) for kind in kinds)
    compile_keys(largest)
    program_bytes = max(_extra_bytes(programs[key]) for key in largest)
    _, state, hidden_TD = jax.eval_shape(lambda: init_arrays(spec=sizes.spec))
    leaves = jax.tree.leaves((state, hidden_TD))
    held: int = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    full_rows = (bucket.rows for bucket in sizes.scheme.outputs if bucket.variant == "full")
    held += 4 * num_words(model.padded_vocab_size) * sum(full_rows)  # their masks of ones
    if config.host_tier.enabled:  # those on their way out of two steps, and in with one
        held += (2 * MAX_SWAP_OUT + MAX_SWAP_IN) * sizes.spec.page_bytes
    return num_param_bytes(model, dtypes[0]) + held + program_bytes


def _extra_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes a program needs beside its arguments."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    new_output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts: tuple[int, ...] = (
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        new_output,
    )
    return sum(parts)
