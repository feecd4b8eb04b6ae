"""A target that is there: an engine loaded for it, or a server that answers, and what is known."""

import argparse
import asyncio
import contextlib
import os
import urllib.parse
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING

from jaxserve.cli.bench.options import IN_PROCESS
from jaxserve.cli.options import DEFAULT_MODEL, read_config
from jaxserve.cli.progress import StartProgress
from jaxserve.engine import Engine, Tokenizer
from jaxserve.engine.interpreter import settle_heap, tune_interpreter
from jaxserve.engine.machine import read_devices, read_machine
from jaxserve.errors import ConfigError
from jaxserve.measure.bench_options import Served
from jaxserve.measure.targets import Target
from jaxserve.measure.targets.in_process import InProcessTarget

if TYPE_CHECKING:  # grpc is for who asks for it
    from jaxserve.client import Tls


def run_against[T](
    options: argparse.Namespace, work: Callable[[Target, Served], Coroutine[None, None, T]]
) -> T:
    """Returns what `work` did with the target, which is given back afterwards.

    Raises:
      JaxserveError: the model cannot be loaded, or `work` raises it.
    """
    if options.target == IN_PROCESS:
        with _loaded(options) as (engine, served):
            return asyncio.run(work(InProcessTarget(engine), served))
    return asyncio.run(_run_remote(options, work))


@contextlib.contextmanager
def _loaded(options: argparse.Namespace) -> Iterator[tuple[Engine, Served]]:
    """Loads an engine as `serve` would, and stops it at the end."""
    from jaxserve.checkpoint.registry import find_model  # here: these bring jax
    from jaxserve.engine.start import load_engine

    model = options.model or DEFAULT_MODEL
    config = read_config(options).config
    tune_interpreter(config.scheduler.max_seqs)
    digest = find_model(model).load_header().identity
    with StartProgress(is_quiet=options.quiet) as progress:
        engine = load_engine(model, config, progress=progress)
    settings = config.model_dump(mode="json")
    settings["runner"].pop("cache_dir")  # where it is changes nothing
    settle_heap()
    engine.start()
    try:
        yield (
            engine,
            Served(
                bundle_digest=digest,
                hardware=_machine(),
                config=settings,
                is_fresh=True,
                is_local=True,
            ),
        )
    finally:
        engine.stop()


async def _run_remote[T](
    options: argparse.Namespace, work: Callable[[Target, Served], Coroutine[None, None, T]]
) -> T:
    tokenizer, vocab_size, digest = _read_model(options)
    address = options.target.partition("://")[2] if _is_grpc(options) else options.target
    target: Target
    if _is_grpc(options):
        from jaxserve.measure.targets.grpc_server import GrpcTarget  # here: no other needs grpc

        target = GrpcTarget(
            address,
            model=options.model_name or "",
            metrics_url=options.metrics_url,
            tls=_read_tls(options),
            key=_read_key(options.api_key_env) or "",
        )
    else:
        from jaxserve.measure.targets.openai_endpoint import OpenAITarget  # nor httpx

        target = OpenAITarget(
            address,
            model=options.model_name or "",
            api=options.api or "completions",
            extras=options.extras or "none",
            api_key=_read_key(options.api_key_env),
            metrics_url=options.metrics_url,
            vocab_size=options.vocab_size or vocab_size,
            special_ids=frozenset() if tokenizer is None else tokenizer.special_ids,
        )
    given = ("bundle_digest", "hardware", "jax_version", "cache_state")
    served = Served(
        address=address,
        bundle_digest=options.bundle_digest or digest,
        hardware=_remote_hardware(options),
        jax_version=options.jax_version or "",
        is_local=_is_loopback(options.target),
        ignores_end=_is_grpc(options) or options.extras in ("vllm", "jaxserve"),
        decode=tokenizer.decode if tokenizer and options.api == "chat" else None,
        stated=[name for name in given if getattr(options, name)]
        + (["bundle_digest"] if digest and not options.bundle_digest else []),
    )
    try:
        return await work(target, served)
    finally:
        await target.close()


def _is_grpc(options: argparse.Namespace) -> bool:
    return str(options.target).startswith(("grpc://", "grpcs://"))


def _is_loopback(target: str) -> bool:
    """Returns whether the address says that the server is on this machine."""
    host = urllib.parse.urlsplit(target).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _remote_hardware(options: argparse.Namespace) -> dict[str, object]:
    """Returns what is said of the server's machine, or, where it is this one, what is seen."""
    if options.hardware:
        return {"stated": options.hardware}
    return _host() if _is_loopback(options.target) else {}


def _read_model(options: argparse.Namespace) -> tuple[Tokenizer | None, int, str]:
    """Returns tokenizer, vocabulary size and identity of the files that the server is said to have.

    They are what somebody says: nothing here can see what it has loaded.
    """
    if options.model is None:
        return None, 0, ""
    from jaxserve.checkpoint.registry import find_model

    header = find_model(options.model).load_header()
    return header.tokenizer, header.config.vocab_size, header.identity


def _read_tls(options: argparse.Namespace) -> "Tls | None":
    """Returns how a grpcs target is to be trusted; None for plaintext."""
    if not str(options.target).startswith("grpcs://"):
        return None
    from jaxserve.client import Tls

    if options.ca_file is None:
        return Tls()
    try:
        return Tls(root_certificates=options.ca_file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--ca-file {options.ca_file}: {error.strerror}") from error


def _read_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"--api-key-env {name}: there is no such variable, or it is empty")
    return key


def _machine() -> dict[str, object]:
    """Returns what of this machine decides how fast it is; the kind of device comes with the
    metrics."""
    return {**_host(), "devices": len(read_devices())}


def _host() -> dict[str, object]:
    """Returns the same without JAX, which would take a GPU from the server that is measured."""
    machine = read_machine()
    return {name: machine[name] for name in ("cpu", "cores", "memory_bytes", "nvidia_gpus")}
