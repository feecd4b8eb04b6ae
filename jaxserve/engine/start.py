"""Start-up: from a model's name to an engine that is compiled, filled and ready to start."""

import hashlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import jaxserve
from jaxserve.config import Config, default_cache_dir
from jaxserve.engine import limits
from jaxserve.engine.chat_template import replace_template
from jaxserve.engine.engine import Engine
from jaxserve.engine.served_model import ServedModel
from jaxserve.mechanisms import active_mechanisms, check_mechanisms
from jaxserve.metrics import Metrics
from jaxserve.request import GenerationRequest
from jaxserve.scheduler.step_time import StepTimes, kv_cost_of

if TYPE_CHECKING:  # these bring jax, which `import jaxserve.engine` must not
    from jaxserve.checkpoint.header import ModelHeader, ModelSource
    from jaxserve.runner.buckets import Reach
    from jaxserve.runner.runner import Runner

logger = logging.getLogger(__name__)

# Called with a phase ("load", "compile"), the parts of it that are done, and all of them.
Progress = Callable[[str, int, int], None]
MIB = 1 << 20


def load_engine(
    model: str,
    config: Config,
    *,
    progress: Progress | None = None,
    only_for: Callable[[ServedModel], GenerationRequest] | None = None,
    metrics: Metrics | None = None,
) -> Engine:
    """Returns an engine that is ready; `start` lets requests in.

    Weights are read while programs compile.

    Args:
      model: a built-in name, a .gguf file, or a Hugging Face folder.
      progress: called from several threads.
      only_for: the one request the engine will run, made when the model is known: only what it
        can reach is compiled, and a request that is not allowed is refused before that.
      metrics: of an endpoint that is open already; None makes new ones.

    Raises:
      CheckpointError: the model is missing, damaged or not supported.
      ConfigError: a configuration that contradicts itself or the model.
      CapacityError: the model does not fit the machine.
      RequestError: `only_for`'s request is not allowed.
    """
    from jaxserve.checkpoint.registry import find_model
    from jaxserve.runner.spec import bytes_of_page

    started_s = time.monotonic()
    check_mechanisms(config)
    source = find_model(model)
    header = replace_template(source.load_header(), config.model.chat_template)
    header_s = time.monotonic() - started_s
    weights_digest = _start_digest(header, config, is_needed=only_for is None)
    reach = None if only_for is None else _find_reach(header, config, only_for)
    metrics = metrics or Metrics()
    runner = _build_runner(
        source, header, config, metrics=metrics, progress=progress or _no_progress, reach=reach
    )
    served = _describe(
        header,
        config,
        path=str(source.path),
        max_model_tokens=runner.max_model_tokens,
        dtype=runner.spec.dtype,
        capacity_tokens=(runner.num_pages - 1) * config.kv.page_size,
        kv_dtype=runner.spec.kv_dtype,
        kv_scales=runner.spec.kv_scales,
        weights_digest=weights_digest.result(),
    )
    _tell_setup(metrics, served, runner, config)
    logger.info(
        "engine ready model=%s mechanisms=%s header_s=%.2f seconds=%.2f",
        served.name,
        _running_mechanisms(config) or "none",
        header_s,
        time.monotonic() - started_s,
    )
    return Engine(
        runner=runner,
        tokenizer=header.tokenizer,
        config=config,
        model=served,
        metrics=metrics,
        page_bytes=bytes_of_page(
            header.config, page_size=config.kv.page_size, kv_dtype=runner.spec.kv_dtype
        ),
        step_times=StepTimes(kv_cost_of(runner.spec.kernels.attention)),
    )


def _tell_setup(metrics: Metrics, served: ServedModel, runner: "Runner", config: Config) -> None:
    """Fills the metrics that say what runs: one series each."""
    import jax

    device = jax.devices()[0]
    metrics.model_name = served.name
    metrics.build.info(
        {
            "version": jaxserve.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "platform": device.platform,
            "device": device.device_kind,
        }
    )
    metrics.config.info(
        {
            "model": served.name,
            "architecture": served.architecture,
            "quantization": served.quantization,
            "dtype": served.dtype,
            "kv_dtype": runner.spec.kv_dtype,
            "attention": runner.spec.kernels.attention,
            "matmul": runner.spec.kernels.matmul,
            "sampling": runner.spec.kernels.sampling,
            "page_size": str(config.kv.page_size),
            "max_seqs": str(config.scheduler.max_seqs),
            "max_model_tokens": str(served.max_model_tokens),
            "mechanisms": _running_mechanisms(config),
        }
    )


def _running_mechanisms(config: Config) -> str:
    """Returns the names of those that are on and have the device they need."""
    import jax

    kinds = (None, jax.default_backend())
    return ",".join(row.name for row in active_mechanisms(config) if row.platform in kinds)


def _build_runner(
    source: "ModelSource",
    header: "ModelHeader",
    config: Config,
    *,
    metrics: Metrics,
    progress: Progress,
    reach: "Reach | None",
) -> "Runner":
    from jaxserve.runner.runner import Runner

    shown: set[int] = set()

    def show_load(num_done_bytes: int, num_all_bytes: int) -> None:
        num_done = num_done_bytes // MIB
        if num_done not in shown:
            shown.add(num_done)
            progress("load", num_done, num_all_bytes // MIB)

    return Runner(
        lambda dtype: source.load_params(dtype, show_load),
        header.config,
        config,
        metrics=metrics,
        cache_dir=config.runner.cache_dir or default_cache_dir(),
        progress=lambda done, total, name, seconds: progress("compile", done, total),
        reach=reach,
    )


def _find_reach(
    header: "ModelHeader", config: Config, only_for: Callable[[ServedModel], GenerationRequest]
) -> "Reach":
    """Returns what the one request can ask of the runner; the pool's limit is not known yet."""
    from jaxserve.runner.buckets import Reach
    from jaxserve.runner.state import find_variant

    model = _describe(
        header, config, max_model_tokens=config.model.max_model_tokens or header.config.max_position
    )
    request = limits.resolve(
        only_for(model),
        model=model,
        tokenizer=header.tokenizer,
        limits=config.limits,
        now_s=0.0,
    )
    # The scheduler wants one step to take at least a tile, and without chunking any prompt.
    prompt_len = max(2, len(request.prompt))
    return Reach(
        prompt_len=prompt_len if config.scheduler.chunked_prefill else model.max_model_tokens,
        max_tokens=max(2, request.max_tokens),
        variant=find_variant(
            request.sampling,
            0,
            is_masked=request.is_masked,
            has_logprobs=request.sampling.logprobs is not None,
        ),
        num_choices=request.sampling.num_choices,
        has_scoring=request.sampling.prompt_logprobs is not None,
    )


def _describe(
    header: "ModelHeader",
    config: Config,
    *,
    max_model_tokens: int,
    path: str = "",
    dtype: str = "",
    capacity_tokens: int = 0,
    kv_dtype: str = "",
    kv_scales: str = "",
    weights_digest: str = "",
) -> ServedModel:
    return ServedModel(
        name=header.name,
        max_model_tokens=max_model_tokens,
        vocab_size=header.config.vocab_size,
        eos_ids=header.eos_ids,
        bos_id=header.tokenizer.bos_id,
        path=path,
        architecture=header.architecture,
        dtype=dtype,
        quantization=header.quantization,
        has_chat_template=header.tokenizer.chat_template is not None,
        sampling_defaults=header.defaults.as_params() | config.sampling.as_params(),
        capacity_tokens=capacity_tokens,
        # what else the weights are run with changes K/V as much as they do
        weights_digest=_sha256(f"{weights_digest}\0{header.config!r}\0{dtype}"),
        positions=_sha256(repr([(layer.rope, layer.window) for layer in header.config.layers])),
        changing_ropes=find_changing_ropes(layer.rope for layer in header.config.layers),
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
    )


class Rope(Protocol):
    """What is asked of a layer's RoPE here."""

    @property
    def kind(self) -> str: ...

    @property
    def original_max_position(self) -> int | None: ...


def find_changing_ropes(ropes: Iterable[Rope | None]) -> tuple[tuple[str, int], ...]:
    """Returns kind and original length of each of the layers' RoPEs that changes with a prompt's
    length."""
    changing = {
        (rope.kind, rope.original_max_position)
        for rope in ropes
        if rope is not None
        and rope.kind in ("dynamic", "longrope")
        and rope.original_max_position is not None
    }
    return tuple(sorted(changing))


def _start_digest(header: "ModelHeader", config: Config, *, is_needed: bool) -> Future[str]:
    """Reads all weights once more for their digest, while they are loaded and programs compile: two
    models that differ in one number must not share K/V. One request alone shares nothing."""
    future: Future[str] = Future()
    if not is_needed or not config.prefix_cache.enabled:
        future.set_result("")
        return future

    def work() -> None:
        try:
            future.set_result(header.digest)
        except OSError as error:  # whoever loads the weights says it better, and first
            future.set_exception(error)

    threading.Thread(target=work, name="jaxserve-digest", daemon=True).start()
    return future


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _no_progress(phase: str, num_done: int, num_all: int) -> None:
    return None
