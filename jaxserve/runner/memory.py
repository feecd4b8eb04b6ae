"""What fits the machine: dtypes, pages of the pool, the longest sequence."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jaxserve.config import GIB, Config, HostTierSection
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.runner.host_memory import read_host_memory_bytes
from jaxserve.runner.spec import DtypeName, KvDtypeName

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 1 * GIB  # a CPU backend has no memory statistics
# Of what is left beside parameters and programs; the rest is for fragments of the allocator.
POOL_FRACTION = 0.95
_FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def read_cpu_flags() -> frozenset[str]:
    """Returns the CPU's feature flags as the kernel spells them; empty where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def choose_dtypes(
    config: Config, *, platform: str, cpu_flags: frozenset[str]
) -> tuple[DtypeName, KvDtypeName]:
    """Returns the dtype of weights and activations, and that of the pool.

    auto: bfloat16 on an accelerator and on CPUs that multiply it in hardware; the pool follows
    the weights.
    """
    is_fast = platform != "cpu" or bool(cpu_flags & _FAST_BFLOAT16_FLAGS)
    auto: DtypeName = "bfloat16" if is_fast else "float32"
    dtype: DtypeName = auto if config.model.dtype == "auto" else config.model.dtype
    return dtype, dtype if config.kv.dtype == "auto" else config.kv.dtype


def choose_num_pages(config: Config, *, page_bytes: int, free_bytes: Callable[[], int]) -> int:
    """Returns the pages of the pool: `kv.num_pages`, else `kv.pool_bytes`, else what is free.

    Args:
      free_bytes: asked only for the last.

    Raises:
      CapacityError: not even one page beside the padding page.
    """
    if config.kv.num_pages is not None:
        return config.kv.num_pages
    pool_bytes = config.kv.pool_bytes if config.kv.pool_bytes is not None else free_bytes()
    num_pages = pool_bytes // page_bytes
    if num_pages < 2:
        raise CapacityError(
            f"the KV pool has {pool_bytes} bytes, but two pages of {config.kv.page_size} tokens "
            f"(one is padding) need {2 * page_bytes}; raise kv.pool_bytes, lower kv.page_size, or "
            "free memory of the device"
        )
    return num_pages


def choose_num_host_pages(section: HostTierSection, *, page_bytes: int) -> int:
    """Returns the pages of host memory, 0 where the tier is off.

    Raises:
      CapacityError: not even one page, or more than the machine has.
    """
    if not section.enabled:
        return 0
    num_pages = section.max_bytes // page_bytes
    if not num_pages:
        raise CapacityError(
            f"host_tier.max_bytes is {section.max_bytes}, but a KV page has {page_bytes} bytes; "
            "raise it, or set host_tier.enabled = false"
        )
    memory_bytes = read_host_memory_bytes()
    if section.max_bytes > memory_bytes:
        raise CapacityError(
            f"host_tier.max_bytes is {section.max_bytes}, but the machine has {memory_bytes} bytes "
            "in all; lower it"
        )
    return num_pages


def check_pool_bytes(pool_bytes: int, *, memory_bytes: int) -> None:
    """Refuse a pool that the memory cannot hold, before anything is compiled for it.

    Raises:
      CapacityError: names both sizes.
    """
    if pool_bytes > memory_bytes:
        raise CapacityError(
            f"the KV pool would take {pool_bytes} bytes, but there are {memory_bytes} in all; "
            "lower kv.num_pages or kv.pool_bytes"
        )


def read_memory_bytes(stats: Mapping[str, int] | None) -> int:
    """Returns the device's memory, or what the process may use of the machine's where the device
    has no statistics."""
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return read_host_memory_bytes()


@contextlib.contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Turns the device's refusal to allocate into a CapacityError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CapacityError(
            f"parameters, pool and state do not fit the memory: {str(error).splitlines()[0]}; "
            "lower kv.pool_bytes, scheduler.max_seqs or limits.max_logit_bias"
        ) from error


def free_device_bytes(stats: Mapping[str, int] | None, *, needed_bytes: int) -> int:
    """Returns the bytes a pool may take of a device.

    Args:
      stats: the device's memory statistics; None where it has none.
      needed_bytes: what parameters, state and the largest program need beside it.

    Raises:
      CapacityError: they alone do not fit.
    """
    if not stats or "bytes_limit" not in stats:
        return CPU_POOL_BYTES
    limit = stats["bytes_limit"]
    if needed_bytes >= limit:
        raise CapacityError(
            f"parameters and programs need {needed_bytes} bytes, but the device offers {limit}; "
            "use a smaller model or dtype, or lower buckets.chunk_tokens and scheduler.max_seqs"
        )
    return int((limit - needed_bytes) * POOL_FRACTION)


def choose_max_model_tokens(
    config: Config, *, model_limit: int, num_pages: int, page_bytes: int
) -> int:
    """Returns the longest prompt + output: as configured, else min(model, pool).

    Args:
      model_limit: positions the model was trained for.

    Raises:
      ConfigError: more than the model can.
      CapacityError: one such sequence does not fit the pool.
    """
    page_size = config.kv.page_size
    capacity = (num_pages - 1) * page_size
    wanted = config.model.max_model_tokens
    if wanted is not None and wanted > model_limit:
        raise ConfigError(
            f"model.max_model_tokens is {wanted}, but this model has {model_limit} positions; "
            "lower it or leave it unset"
        )
    if (wanted is not None and wanted > capacity) or capacity < 2:
        least = wanted or 2
        num_bytes = (-(-least // page_size) + 1) * page_bytes
        raise CapacityError(
            f"one sequence of model.max_model_tokens = {least} does not fit the KV pool, which "
            f"holds {capacity} tokens ({num_pages} pages of {page_size}, one of them padding); "
            f"lower model.max_model_tokens or give the pool {num_bytes} bytes (kv.pool_bytes)"
        )
    chosen = wanted if wanted is not None else min(model_limit, capacity)
    logger.info(
        "kv pool pages=%d page_size=%d bytes=%d capacity_tokens=%d max_model_tokens=%d",
        num_pages, page_size, num_pages * page_bytes, capacity, chosen,
    )  # fmt: skip
    return chosen
