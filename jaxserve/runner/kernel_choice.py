"""Which kernels a runner uses: as the configuration says, or the best that this machine has."""

import logging
from pathlib import Path

from jaxserve.config import Config, default_cache_dir
from jaxserve.errors import ConfigError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.dot import find_matmul_problem
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import find_mosaic_problem
from jaxserve.kernels.paged_attention.native import find_attention_problem
from jaxserve.model.config import ModelConfig
from jaxserve.model.packing import product_sizes
from jaxserve.runner.native_build import NativeUnavailableError, load_native
from jaxserve.runner.spec import DtypeName, KvDtypeName

logger = logging.getLogger(__name__)


def choose_kernels(
    model: ModelConfig,
    config: Config,
    *,
    dtypes: tuple[DtypeName, KvDtypeName],
    platform: str,
    cache_dir: Path | None,
) -> Kernels:
    """Returns the kernels, and has XLA know the native ones where any is chosen.

    Args:
      dtypes: of the weights, and of the KV pool.
      cache_dir: where compiled native kernels are kept; None is the user's cache folder.

    Raises:
      ConfigError: the configuration names one that cannot be had here.
    """
    section = config.runner
    dtype, kv_dtype = dtypes
    problem = _find_native_problem(platform)
    attention_problem = problem or find_attention_problem(model.head_dim, kv_dtype=kv_dtype)
    matmul_problem = problem or _find_matmul_problem(model, dtype)
    attention = section.attention
    matmul = section.matmul
    # Compiling takes seconds: what cannot be used anyway is not built.
    wants_attention = attention in ("auto", "native") and not attention_problem
    wants_matmul = matmul in ("auto", "native") and not matmul_problem
    if wants_attention or wants_matmul:
        try:
            load_native(cache_dir or default_cache_dir())
        except NativeUnavailableError as error:
            attention_problem = attention_problem or str(error)
            matmul_problem = matmul_problem or str(error)
    if attention == "native" and attention_problem:
        raise ConfigError(_explain("attention", "native", attention_problem))
    if matmul == "native" and matmul_problem:
        raise ConfigError(_explain("matmul", "native", matmul_problem))
    if attention == "mosaic":
        mosaic_problem = find_mosaic_problem(
            q_dtype=dtype,
            kv_dtype=kv_dtype,
            head_dim=model.head_dim,
            page_size=config.kv.page_size,
        )
        if mosaic_problem:
            raise ConfigError(_explain("attention", "mosaic", mosaic_problem))
    chosen = Kernels(
        attention=choose_attention(config, has_native=not attention_problem, platform=platform),
        matmul=("xla" if matmul_problem else "native") if matmul == "auto" else matmul,
    )
    logger.info("kernels attention=%s matmul=%s", chosen.attention, chosen.matmul)
    for name, kind, reason in (
        ("attention", attention, attention_problem),
        ("matmul", matmul, matmul_problem),
    ):
        if platform == "cpu" and kind == "auto" and reason:
            logger.info("kernels %s is xla reason=%s", name, reason)
    return chosen


def choose_attention(config: Config, *, has_native: bool, platform: str) -> Impl:
    """Returns the implementation to run; what is written for a GPU is interpreted elsewhere."""
    match config.runner.attention:
        case "auto":
            return "native" if has_native else "xla"  # nothing else is measured on a GPU yet
        case "triton" if platform != "gpu":
            return "triton_interpret"
        case "mosaic" if platform != "gpu":
            return "mosaic_interpret"
        case named:
            return named


def _find_native_problem(platform: str) -> str | None:
    return None if platform == "cpu" else f"native kernels are for a CPU, and this is {platform}"


def _find_matmul_problem(model: ModelConfig, dtype: DtypeName) -> str | None:
    if dtype != "bfloat16":
        return f"the weights are {dtype}, and the native product is of bfloat16"
    for path, size in product_sizes(model).items():
        if problem := find_matmul_problem(size.num_inputs, size.num_columns):
            return f"{path}: {problem}"
    return None


def _explain(key: str, value: str, problem: str) -> str:
    return f"runner.{key} is {value}, but {problem}; set it to auto or xla"
