"""`jaxserve generate`: one prompt, its text on stdout as it comes."""

import argparse
import codecs
import dataclasses
import json
import sys
import time
from pathlib import Path

from jaxserve.cli import exit_codes
from jaxserve.cli.options import (
    add_model_options,
    add_sampling_options,
    read_config,
    read_sampling,
)
from jaxserve.cli.progress import StartProgress
from jaxserve.cli.terminal import write_text
from jaxserve.engine import Delta, Finished, ServedModel, Stream
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import ChatMessage, ChatPrompt, GenerationRequest

EPILOG = """\
examples:
  jaxserve generate --chat --prompt "Name three rivers."
  jaxserve generate --chat --prompt "Tell a story." --temperature 0.8 --seed 7
  jaxserve generate path/to/model.gguf --prompt-file p.txt --json | jq .text
  echo "Once upon a time" | jaxserve generate --prompt-file - --max-tokens 50
  jaxserve generate --token-ids "1 4093 198" --max-tokens 8

The text goes to stdout, all else to stderr. What is not set is the model's
own default; a model without one is decoded greedily. Only the shapes this
request can reach are compiled, and they are kept for the next time.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "generate",
        help="write what the model says to one prompt",
        description="Stream what the model says to one prompt.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, log_level="warning")
    prompt = parser.add_argument_group("prompt (exactly one)").add_mutually_exclusive_group(
        required=True
    )
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file; - is stdin")
    prompt.add_argument(
        "--token-ids",
        type=_token_ids,
        metavar="IDS",
        help="of the model's vocabulary, such as '1 2 3'",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: use the chat template"
    )
    add_sampling_options(parser.add_argument_group("sampling and end"))
    parser.add_argument(
        "--json", action="store_true", help="print one line with all of it instead of streaming"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    parser.set_defaults(run=run)


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of ids, such as '1 2 3'"
        ) from error


def run(options: argparse.Namespace) -> int:
    """Loads, generates, writes; returns the exit code."""
    from jaxserve.engine.start import load_engine  # here: it needs nothing of jax before

    config = read_config(options).config
    prompt = _read_prompt(options)
    started_s = time.monotonic()
    with StartProgress(is_quiet=options.quiet) as progress:
        engine = load_engine(
            options.model,
            config,
            progress=progress,
            only_for=lambda model: _build_request(options, prompt, model),
        )
    load_s = time.monotonic() - started_s
    engine.start()
    try:
        with engine.submit(_build_request(options, prompt, engine.model)) as stream:
            result = _read(stream, echo=not options.json)
    finally:
        engine.stop()
    if options.json:
        is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
        print(json.dumps(result.as_json(load_s=load_s), ensure_ascii=not is_utf8), flush=True)
    elif not options.quiet:
        print(result.summary(), file=sys.stderr)
    return exit_codes.OK


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """All that came of the request."""

    text: str
    token_ids: list[int]
    finished: Finished

    def as_json(self, *, load_s: float) -> dict[str, object]:
        """Returns the one object of `--json`; its keys are API."""
        timings = {"load_s": load_s, **dataclasses.asdict(self.finished.timings)}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finished.reason.value,
            "usage": dataclasses.asdict(self.finished.usage),
            "timings": {name: round(seconds, 6) for name, seconds in timings.items()},
        }

    def summary(self) -> str:
        """Returns the line for a person: tokens, speed, and why it ended."""
        usage, timings = self.finished.usage, self.finished.timings
        speed = ""
        if usage.completion_tokens > 1 and timings.decode_s > 0:
            speed = f" · {(usage.completion_tokens - 1) / timings.decode_s:.1f} tokens/s"
        return (
            f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens · first after "
            f"{timings.time_to_first_token_s:.2f} s{speed} · {self.finished.reason.value}]"
        )


def _read(stream: Stream, *, echo: bool) -> Result:
    text, finished = "", None
    token_ids: list[int] = []
    for event in stream:
        if isinstance(event, Delta):
            text += event.text
            token_ids += event.token_ids
            if echo:
                write_text(event.text)
        elif isinstance(event, Finished):
            finished = event
    if echo and not text.endswith("\n"):
        write_text("\n")
    assert finished is not None, "a stream ends with Finished, or raises"
    return Result(text=text, token_ids=token_ids, finished=finished)


def _read_prompt(options: argparse.Namespace) -> str | tuple[int, ...]:
    if options.token_ids is not None:
        if options.chat:
            raise ConfigError(
                "--chat needs a prompt of text, but --token-ids was given; leave one out"
            )
        return tuple(options.token_ids)
    if options.prompt is not None:
        return str(options.prompt)
    try:
        if options.prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")  # a BOM is no part of the prompt
        return Path(options.prompt_file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequestError(
            f"--prompt-file {options.prompt_file}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--prompt-file {options.prompt_file} is not UTF-8 at byte {error.start}; convert it"
        ) from error


def _build_request(
    options: argparse.Namespace, prompt: str | tuple[int, ...], model: ServedModel
) -> GenerationRequest:
    """Returns the request: what was asked, then the model's defaults, then greedy."""
    sampling = read_sampling(options, model)
    if options.chat:
        assert isinstance(prompt, str)
        messages = (ChatMessage(role="user", content=prompt),)
        return GenerationRequest(prompt=ChatPrompt(messages=messages), sampling=sampling)
    return GenerationRequest(prompt=prompt, sampling=sampling)
