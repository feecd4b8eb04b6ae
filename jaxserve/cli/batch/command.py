"""`jaxserve batch`: its options, its files, and how it ends."""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from jaxserve.cli import exit_codes
from jaxserve.cli.batch.job import StandardOutput, read_lines, run_lines
from jaxserve.cli.batch.lines import LineReader, RawLines
from jaxserve.cli.batch.output import Job, OutputFile, find_output
from jaxserve.cli.batch.progress import BatchProgress, Counts, format_time
from jaxserve.cli.options import add_model_options, read_config
from jaxserve.cli.progress import StartProgress
from jaxserve.config import Config
from jaxserve.errors import BatchError
from jaxserve.llm import LLM, as_own_reader

STREAM: Final = "-"
SAMPLE_BYTES: Final = 1 << 20
EPILOG = """\
examples:
  jaxserve batch -i prompts.jsonl -o answers.jsonl
  jaxserve batch -i in.jsonl -o out.jsonl path/to/model.gguf --dtype float32
  make-prompts | jaxserve batch -i - -o - | jq -r .response.body.choices[0].text

A line of the input is one of
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}}
  {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
  {"id": "b", "messages": [{"role": "user", "content": "Hi"}]}
The first is OpenAI's batch format (also with /v1/completions); the others are
such a body as it is, with or without an id. As there, max_tokens is 16 for a
prompt unless set, and the rest of the context for messages. Nothing that a body
sets is ignored: an unknown or unsupported field makes the line an error.

The output has one line for each line of the input that is not blank, in the
same order:
  {"id", "custom_id", "error",
   "response": {"status_code", "request_id", "body"}}
A line that failed has an error with its number; the others go on. In the shell:
  jq -c 'select(.error) | .error' answers.jsonl

OUT grows as OUT.partial and gets its name when it is complete. After an
interruption of any kind the same command goes on where it stopped; finished
lines are kept, not computed again. A request without a seed gets one made of
--seed and its id, so that its tokens do not depend on interruptions.

Exit codes: 0 all lines are good; 3 complete, but some lines are errors;
130 interrupted; others as `jaxserve --help` lists them.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests, line by line",
        description="Answer every line of a JSONL file; an interrupted run is resumed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-i", "--input", required=True, metavar="IN", help="a JSONL file in UTF-8; - is stdin"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT",
        help="the file to write; - is stdout. Neither stdin nor stdout can be resumed",
    )  # fmt: skip
    add_model_options(parser, log_level="warning")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S",
        help="seeds the requests that have no seed of their own (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true",
        help="replace an OUT that is complete, and give up an OUT.partial of another input; one of "
        "this input is resumed (delete it to start over)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers all lines; returns the exit code."""
    config = read_config(options).config
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminate_as_interrupt())
        batch = stack.enter_context(_open(options, config))
        if batch.output is not None and batch.output.is_complete:
            _say(options, batch, "was complete already")
            return _code(batch.counts)
        outcome = "failed"
        try:
            _answer(options, config, batch)
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "stopped"
            return exit_codes.INTERRUPTED
        finally:
            _say(options, batch, outcome)
        return _code(batch.counts)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Batch:
    """The files of a run, and how far it is.

    Attributes:
      output: None is stdout.
      job: None where the input cannot be read twice.
    """

    file: BinaryIO
    output: OutputFile | None
    job: Job | None
    num_all: int | None
    counts: Counts
    elapsed_s: float = 0.0


@contextlib.contextmanager
def _open(options: argparse.Namespace, config: Config) -> Iterator[_Batch]:
    """Opens both files, before anything is loaded, and sees what is done already."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_input(options.input))
        job, num_all = _read_through(file, options.seed, config)
        output = None
        if options.output != STREAM:
            path = find_output(options.output)
            _check_apart(file, path)
            output = OutputFile(path, overwrite=options.overwrite)
            stack.callback(output.close)
            output.open(job or Job(input_sha256="", seed=options.seed))
        counts = Counts()
        if output is not None and output.done:
            counts.num_lines = counts.num_earlier = len(output.done)
            counts.num_failed = sum(line.has_failed for line in output.done)
        yield _Batch(file=file, output=output, job=job, num_all=num_all, counts=counts)


@contextlib.contextmanager
def _open_input(name: str) -> Iterator[BinaryIO]:
    if name == STREAM:
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115  # only opening it may fail here
    except OSError as error:
        raise BatchError(f"the input {name} cannot be read: {error.strerror}") from error
    with file:
        yield file


def _read_through(file: BinaryIO, seed: int, config: Config) -> tuple[Job | None, int | None]:
    """Returns the job and the number of lines, and rewinds; None and None for a pipe."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None, None
    start = file.tell()
    raws = RawLines(file, max_bytes=config.limits.max_message_bytes)
    num_all = sum(1 for _ in raws)
    file.seek(start)
    return Job(input_sha256=raws.digest.hexdigest(), seed=seed), num_all


def _check_apart(file: BinaryIO, path: Path) -> None:
    for target in (path, path.with_name(f"{path.name}.partial")):
        if target.exists() and os.path.samestat(os.fstat(file.fileno()), target.stat()):
            raise BatchError(f"the input is {target} itself; write to another file")


def _answer(options: argparse.Namespace, config: Config, batch: _Batch) -> None:
    """Answers the lines that are not done, and completes the output."""
    if batch.counts.num_lines != batch.num_all:  # all: it was killed just before the end
        from jaxserve.engine.start import load_engine  # here: it needs nothing of jax before

        with StartProgress(is_quiet=options.quiet) as progress:
            engine = load_engine(options.model, as_own_reader(config), progress=progress)
        engine.start()
        with LLM.around(engine) as llm:
            _answer_with(llm, options, batch)
    if batch.output is not None:
        batch.output.finish()


def _answer_with(llm: LLM, options: argparse.Namespace, batch: _Batch) -> None:
    output, limits = batch.output, llm.engine.config.limits
    if output is not None:
        output.set_model(_describe(llm))
    done = output.done if output is not None else []
    batch.counts = Counts(
        num_lines=len(done),
        num_earlier=len(done),
        num_failed=sum(line.has_failed for line in done),
    )
    raws = RawLines(batch.file, max_bytes=limits.max_message_bytes)
    reader = LineReader(
        engine=llm.engine,
        model_name=options.model,
        run_seed=options.seed,
        max_bytes=limits.max_message_bytes,
        max_id_bytes=limits.max_request_id_bytes,
    )
    sink = output or StandardOutput()
    show = BatchProgress(batch.counts, num_all=batch.num_all, is_quiet=options.quiet)
    with show as progress:
        try:
            lines = read_lines(raws, reader, done)
            run_lines(lines, llm, sink, counts=batch.counts, on_line=progress.show)
        finally:
            batch.elapsed_s = progress.elapsed_s
    if batch.job is not None and raws.digest.hexdigest() != batch.job.input_sha256:
        raise BatchError(f"the input {options.input} has changed while it was read; run it again")


def _describe(llm: LLM) -> dict[str, object]:
    """Returns what of the model decides an output; compared when a batch is resumed."""
    model, kv_dtype = llm.model, llm.engine.config.kv.dtype
    return {
        "name": model.name,
        "dtype": model.dtype,
        "kv_dtype": model.dtype if kv_dtype == "auto" else kv_dtype,
        "quantization": model.quantization,
        "max_model_tokens": model.max_model_tokens,
        "weights": _sample(Path(model.path)) if model.path else "",
    }


def _sample(path: Path) -> str:
    """Returns a digest of a model's files: sizes, and both ends of each. All of it would take long.

    A model that was trained on has other ends, and a copy has the same.
    """
    digest = hashlib.sha256()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            continue
        with file.open("rb") as content:
            num_bytes = content.seek(0, os.SEEK_END)
            digest.update(f"{num_bytes}\0".encode())
            for start in (0, max(0, num_bytes - SAMPLE_BYTES)):
                content.seek(start)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _code(counts: Counts) -> int:
    return exit_codes.SOME_FAILED if counts.num_failed else exit_codes.OK


def _say(options: argparse.Namespace, batch: _Batch, how: str) -> None:
    """Writes the last line on stderr: what came of it, and how to go on."""
    if options.quiet:
        return
    counts = batch.counts
    of_all = "" if batch.num_all is None else f" of {batch.num_all}"
    failed = f", {counts.num_failed} of them failed" if counts.num_failed else ""
    what = f"{counts.num_lines}{of_all} lines{failed}"
    if how in ("stopped", "failed"):
        if batch.output is None or batch.job is None:
            where = "what comes from or goes to a stream cannot be resumed"
        elif not counts.num_lines:
            where = "there is nothing to go on from"
        else:
            where = f"run it again to go on from {batch.output.partial}"
        print(f"{how} after {what}; {where}", file=sys.stderr)
        return
    speed = f" · {counts.num_tokens} tokens in {format_time(batch.elapsed_s)}"
    if counts.num_tokens and batch.elapsed_s:
        speed += f" ({counts.num_tokens / batch.elapsed_s:.0f} tokens/s)"
    where = "stdout" if batch.output is None else str(batch.output.path)
    print(f"{how}: {what}{speed if how == 'done' else ''} · {where}", file=sys.stderr)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Has SIGTERM end the batch as ctrl-C does: with what is done kept, and said."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
