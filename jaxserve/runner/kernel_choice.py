"""Which kernels a runner uses: as the configuration says, or the best that this machine has."""

import dataclasses
import logging
from pathlib import Path

from jaxserve.config import Config, default_cache_dir
from jaxserve.errors import ConfigError
from jaxserve.kernels.choice import Kernels, SamplingImpl
from jaxserve.kernels.dot import find_matmul_problem
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import (
    BY_FORMULA,
    MOSAIC_CAPABILITY,
    Cuts,
    find_mosaic_problem,
)
from jaxserve.kernels.paged_attention.native import find_attention_problem
from jaxserve.model.config import ModelConfig
from jaxserve.model.packing import product_sizes
from jaxserve.runner.device import Device
from jaxserve.runner.launch_table import AttentionCall, read_launch_table
from jaxserve.runner.native_build import (
    PRODUCTS,
    NativeUnavailableError,
    attention_library,
    load_native,
)
from jaxserve.runner.spec import DtypeName, KvDtypeName

logger = logging.getLogger(__name__)


def choose_kernels(
    model: ModelConfig,
    config: Config,
    *,
    dtypes: tuple[DtypeName, KvDtypeName],
    device: Device,
    cache_dir: Path | None,
) -> Kernels:
    """Returns the kernels, and has XLA know the native ones where any is chosen.

    Args:
      dtypes: of the weights, and of the KV pool.
      cache_dir: where compiled native kernels are kept; None is the user's cache folder.

    Raises:
      ConfigError: the configuration names one that cannot be had here.
    """
    section, platform = config.runner, device.platform
    dtype, kv_dtype = dtypes
    problem = _find_native_problem(platform)
    attention_problem = problem or find_attention_problem(model.head_dim)
    matmul_problem = problem or _find_matmul_problem(model, dtype)
    attention = section.attention
    matmul = section.matmul
    # Compiling takes seconds: what cannot be used anyway is not built.
    wants_attention = attention in ("auto", "native") and not attention_problem
    wants_matmul = matmul in ("auto", "native") and not matmul_problem
    wanted = [attention_library(kv_dtype)] if wants_attention else []
    if wants_matmul:
        wanted.append(PRODUCTS)
    if wanted:
        try:
            load_native(cache_dir or default_cache_dir(), wanted)
        except NativeUnavailableError as error:
            attention_problem = attention_problem or str(error)
            matmul_problem = matmul_problem or str(error)
    if attention == "native" and attention_problem:
        raise ConfigError(_explain("attention", "native", attention_problem))
    if matmul == "native" and matmul_problem:
        raise ConfigError(_explain("matmul", "native", matmul_problem))
    if attention == "mosaic":
        mosaic_problem = _find_mosaic_device_problem(device) or find_mosaic_problem(
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
        sampling=choose_sampling(config, platform=platform),
    )
    cuts = _find_cuts(chosen.attention, model, config, dtypes=dtypes, device=device)
    chosen = dataclasses.replace(chosen, cuts=cuts)
    logger.info(
        "kernels attention=%s matmul=%s sampling=%s",
        chosen.attention, chosen.matmul, chosen.sampling,
    )  # fmt: skip
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


def choose_sampling(config: Config, *, platform: str) -> SamplingImpl:
    match config.runner.sampling:
        case "auto":
            return "passes" if platform == "gpu" else "candidates"
        case named:
            return named


def _find_cuts(
    attention: Impl,
    model: ModelConfig,
    config: Config,
    *,
    dtypes: tuple[DtypeName, KvDtypeName],
    device: Device,
) -> Cuts:
    """Returns how the launch table has a GPU kernel's work cut on this device, and says so."""
    if attention != "triton" and attention != "mosaic":
        return BY_FORMULA
    if config.runner.batch_invariant:  # no measurement may change a bit
        return BY_FORMULA
    call = AttentionCall.of(model, config, attention=attention, dtypes=dtypes)
    cuts = read_launch_table().find_cuts(call, device=device.kind)
    for kind, cut in (("decode", cuts.decode), ("chunk", cuts.chunk)):
        logger.info("kernels attention of %s is cut by %s", kind, cut or "formula")
    return cuts


def _find_native_problem(platform: str) -> str | None:
    return None if platform == "cpu" else f"native kernels are for a CPU, and this is {platform}"


def _find_mosaic_device_problem(device: Device) -> str | None:
    """Returns why this device cannot run the Mosaic kernel; a CPU simulates it."""
    capability = device.compute_capability
    if device.platform != "gpu" or (capability or "").split(".")[0] == MOSAIC_CAPABILITY:
        return None
    return (
        f"its products are Hopper's own (compute capability {MOSAIC_CAPABILITY}.x), and this "
        f"{device.kind or 'GPU'} has {capability or 'none'}"
    )


def _find_matmul_problem(model: ModelConfig, dtype: DtypeName) -> str | None:
    if dtype != "bfloat16":
        return f"the weights are {dtype}, and the native product is of bfloat16"
    for path, size in product_sizes(model).items():
        if problem := find_matmul_problem(size.num_inputs, size.num_columns):
            return f"{path}: {problem}"
    return None


def _explain(key: str, value: str, problem: str) -> str:
    return f"runner.{key} is {value}, but {problem}; set it to auto or xla"
