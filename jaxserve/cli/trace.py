"""`jaxserve trace`: where the time of some requests went, as a file for Perfetto and as a page."""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jaxserve.cli import exit_codes
from jaxserve.cli.options import (
    DEFAULT_MODEL,
    add_model_options,
    add_sampling_options,
    read_config,
    read_sampling,
)
from jaxserve.cli.progress import StartProgress
from jaxserve.config import Config
from jaxserve.engine import Engine, gather
from jaxserve.engine.interpreter import settle_heap, tune_interpreter
from jaxserve.errors import ConfigError
from jaxserve.request import ChatMessage, ChatPrompt, GenerationRequest

if TYPE_CHECKING:
    from jaxserve.measure.load import Load

logger = logging.getLogger(__name__)

EPILOG: Final = """\
examples:
  jaxserve trace --chat --prompt "Name three rivers." --max-tokens 40
  jaxserve trace model.gguf --prompt "Once" --prompt "It was" --out out.json
  jaxserve trace --workload burst.jsonl
  jaxserve serve --trace-file serve.json
  jaxserve trace --trace-file serve.json

Writes trace.json (open it at https://ui.perfetto.dev) and trace.html, which
needs nothing else: a lane for each phase of the engine's thread, for the
device, for each state row and for the requests. Prompts and outputs are in
neither; request ids are.
"""
TRACED_STEPS: Final = 10_000  # kept unless measure.trace_steps says otherwise


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "trace",
        help="show where the time of requests went",
        description="Run requests and trace their steps, or show what a server traced.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, log_level="warning")
    source = parser.add_argument_group("what to show (exactly one)")
    which = source.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="run it; may be repeated: all are sent at once",
    )
    which.add_argument(
        "--workload", type=Path, metavar="FILE", help="replay it (`jaxserve workload`)"
    )
    which.add_argument(
        "--trace-file", type=Path, metavar="FILE", help="what `jaxserve serve` wrote"
    )
    parser.add_argument(
        "--chat", action="store_true", help="prompts are a user's message: use the chat template"
    )
    add_sampling_options(parser.add_argument_group("sampling and end"))
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the trace (default: trace.json); the page is beside it, ending in .html",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the trace and the page; returns the exit code."""
    from jaxserve.measure.trace import build_trace, read_trace, write_trace
    from jaxserve.measure.trace_page import write_page

    if options.trace_file is not None:
        if options.out is not None or options.model != DEFAULT_MODEL:
            raise ConfigError("--trace-file runs nothing; leave MODEL and --out out")
        trace, path = read_trace(options.trace_file), options.trace_file
    else:
        path = options.out or Path("trace.json")
        check_path(path)
        engine = _run_requests(options)
        assert engine.trace is not None, "it was asked for"
        trace = build_trace(engine.trace, model=engine.model.name)
        write_trace(trace, path)
        print(_summary(engine))
    page = path.with_suffix(".html")
    write_page(trace, page)
    print(page if options.trace_file else f"{path} {page}")
    return exit_codes.OK


def check_path(path: Path) -> None:
    """Raises ConfigError where no trace could be written, before anything runs for it."""
    if path.suffix == ".html":
        raise ConfigError(f"{path} would be the page's name; give the trace's, such as trace.json")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} is a folder, or is in none that exists; give a file's name")


def with_trace(config: Config) -> Config:
    """Returns the configuration with steps kept; so many as it says, if it does.

    Raises:
      ConfigError: it switches the phases off.
    """
    if config.measure.trace_steps:
        return config
    if not config.measure.phases:
        raise ConfigError("measure.phases is false, but a trace is made of them; set it to true")
    measure = config.measure.model_copy(update={"trace_steps": TRACED_STEPS})
    return config.model_copy(update={"measure": measure})


@contextlib.contextmanager
def tracing(config: Config, path: Path | None) -> Iterator[tuple[Config, Callable[[Engine], None]]]:
    """Yields the configuration to load with, and what the engine is handed to; writes its trace
    to `path` at the end. None traces nothing.

    Raises:
      ConfigError: no trace could be written there.
    """
    engines: list[Engine] = []
    if path is not None:
        check_path(path)
        config = with_trace(config)
    try:
        yield config, engines.append
    finally:
        if path is not None:
            for engine in engines:
                _write(engine, path)


def _write(engine: Engine, path: Path) -> None:
    from jaxserve.measure.trace import build_trace, write_trace

    assert engine.trace is not None, "its configuration asks for it"
    trace = build_trace(engine.trace, model=engine.model.name)
    try:
        write_trace(trace, path)
    except OSError as error:
        logger.error("the trace is not written: %s", error)
        return
    facts = trace["otherData"]
    logger.info(
        "trace written steps=%d requests=%d path=%s", facts["steps"], facts["requests"], path
    )


def _run_requests(options: argparse.Namespace) -> Engine:
    """Returns the engine, stopped: all that was asked has ended."""
    from jaxserve.engine.start import load_engine  # here: it needs nothing of jax before
    from jaxserve.measure.load import load_file

    config = with_trace(read_config(options).config)
    load = None
    if options.workload is not None:
        _refuse_prompt_options(options)
        load = load_file(options.workload)  # before the model: it may be wrong
    tune_interpreter(config.scheduler.max_seqs)
    with StartProgress(is_quiet=options.quiet) as progress:
        engine = load_engine(options.model, config, progress=progress)
    settle_heap()
    engine.start()
    try:
        if load is None:
            _send_prompts(options, engine)
        else:
            asyncio.run(_replay(load, engine, options))
    finally:
        engine.stop()
    return engine


def _send_prompts(options: argparse.Namespace, engine: Engine) -> None:
    sampling = read_sampling(options, engine.model)
    # read as they come, each by a thread of its own: else delivery would be the others' time
    with ThreadPoolExecutor(len(options.prompt), thread_name_prefix="jaxserve-read") as pool:
        streams = [
            engine.submit(
                GenerationRequest(prompt=_as_prompt(text, options.chat), sampling=sampling)
            )
            for text in options.prompt
        ]
        list(pool.map(gather, streams))


def _refuse_prompt_options(options: argparse.Namespace) -> None:
    """A workload says what it wants itself, but for the sampling."""
    for name in ("chat", "max_tokens", "stop", "ignore_eos"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is for --prompt; with --workload leave it out")


async def _replay(load: "Load", engine: Engine, options: argparse.Namespace) -> None:
    from jaxserve.measure.load import AskMaker
    from jaxserve.measure.replay import Replay
    from jaxserve.measure.targets.in_process import InProcessTarget

    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(options, name) for name in names}
    target = InProcessTarget(engine)
    maker = AskMaker(
        header=load.header,
        facts=await target.describe(),
        sampling={name: value for name, value in sampling.items() if value is not None},
    )
    with load.open_entries() as entries:
        await Replay(
            target=target,
            asks=(maker.make(entry, "trace") for entry in entries),
            on_record=lambda record: None,
            concurrency=load.header.concurrency,
        ).run()


def _as_prompt(text: str, is_chat: bool) -> str | ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=text),)) if is_chat else text


def _summary(engine: Engine) -> str:
    from jaxserve.measure.phases import StepCosts

    costs = StepCosts.of(engine.metrics)
    shares = ", ".join(f"{phase} {share:.1%}" for phase, share in costs.host_shares.items())
    num_requests = round(engine.metrics.value("requests_submitted_total"))
    return (
        f"{num_requests} requests, {costs.num_steps} steps, {costs.busy_s:.3f} s\n"
        f"engine thread: {shares}\n"
        f"device: busy {costs.device_s:.3f} s, host gap {costs.host_gap_share or 0.0:.1%}"
    )
