"""`jaxserve chat`: a conversation in the terminal, or one line a turn from a pipe."""

import argparse
import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.options import (
    add_model_options,
    add_sampling_options,
    read_config,
    read_sampling,
)
from jaxserve.cli.progress import StartProgress
from jaxserve.cli.terminal import write_text
from jaxserve.engine import Delta, Engine, Finished
from jaxserve.engine.limits import check_sampling
from jaxserve.errors import ContextLengthError, NoChatTemplateError, RequestError
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from jaxserve.server.openai.fields import did_you_mean

EPILOG = """\
examples:
  jaxserve chat
  jaxserve chat path/to/model.gguf --system "Answer in one sentence."
  jaxserve chat --temperature 0.8 --seed 7 --max-tokens 200
  printf 'Name a river.\\nWhere does it end?\\n' | jaxserve chat --quiet

Each line is a turn of yours. Commands: /reset forgets the conversation,
/system TEXT sets the instructions, /help, /exit. A line that shall begin with a
slash begins with two.

ctrl-C stops the answer and not the program; what was said so far stays in the
conversation. ctrl-D ends. Nothing is forgotten in silence: when the context is
full, the turn is refused, and /reset starts anew. With --seed, turn N is seeded
with S + N - 1. Answers go to stdout, all else to stderr; from a pipe a turn
that was refused makes the exit code 1.
"""
HELP: Final = """\
/reset        forget the conversation; the instructions stay
/system TEXT  set the instructions; without TEXT, take them back
/help         this
/exit         end, as ctrl-D does
//TEXT        a line that begins with a slash
ctrl-C        stop an answer; it stays in the conversation as far as it came
"""
COMMANDS: Final = ("/reset", "/system", "/help", "/exit")
PROMPT: Final = "> "


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. From a pipe, each line is a turn.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, log_level="warning")
    parser.add_argument("--system", metavar="TEXT", default="", help="the instructions")
    add_sampling_options(parser.add_argument_group("sampling and end"))
    parser.add_argument("--quiet", action="store_true", help="no progress and no hints on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Loads, talks until the end of the input; returns the exit code."""
    from jaxserve.engine.start import load_engine  # here: it needs nothing of jax before

    config = read_config(options).config
    with StartProgress(is_quiet=options.quiet) as progress:
        engine = load_engine(options.model, config, progress=progress)
    if not engine.model.has_chat_template:
        raise NoChatTemplateError(
            f"{engine.model.name} has no chat template, so it cannot chat; use `jaxserve generate`"
        )
    sampling = read_sampling(options, engine.model)
    check_sampling(sampling, model=engine.model, limits=config.limits)  # not at every turn
    engine.start()
    try:
        chat = Chat(engine, sampling, system=options.system)
        return talk(chat, is_quiet=options.quiet)
    finally:
        engine.stop()


@dataclasses.dataclass(slots=True, frozen=True)
class Answer:
    """What came of a turn.

    Attributes:
      reason: None where ctrl-C stopped it.
    """

    text: str
    reason: FinishReason | None


class Chat:
    """A conversation. A turn is in it with its answer, or not at all.

    Attributes:
      turns: the user's and the model's, in turn.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, *, system: str = "") -> None:
        self.turns: list[ChatMessage] = []
        self.system = system
        self._engine = engine
        self._sampling = sampling

    def ask(self, text: str, write: Callable[[str], None]) -> Answer:
        """Takes a turn; the answer is written as it comes. ctrl-C ends it, and it stays.

        Raises:
          ContextLengthError: the conversation has become too long.
          RequestError: the turn is not allowed, or failed.
        """
        user = ChatMessage(role="user", content=text)
        head = [ChatMessage(role="system", content=self.system)] if self.system else []
        said = ""
        reason: FinishReason | None = None
        try:
            request = GenerationRequest(
                prompt=ChatPrompt(messages=(*head, *self.turns, user)),
                sampling=self._next_sampling(),
            )
            with self._engine.submit(request) as stream:
                for event in stream:
                    if isinstance(event, Delta):
                        said += event.text
                        write(event.text)
                    elif isinstance(event, Finished):
                        reason = event.reason
        except KeyboardInterrupt:
            reason = None
        except RequestError:
            if said:
                write("\n")
            raise
        if said or reason is not None:  # else there is nothing to go on from
            self.turns = [*self.turns, user, ChatMessage(role="assistant", content=said)]
        return Answer(said, reason)

    def reset(self) -> None:
        self.turns = []

    def _next_sampling(self) -> SamplingParams:
        """Returns the sampling of the next turn: one seed for all would repeat the same noise."""
        seed = self._sampling.seed
        if seed is None:
            return self._sampling
        return dataclasses.replace(self._sampling, seed=(seed + len(self.turns) // 2) % (1 << 64))


def talk(chat: Chat, *, is_quiet: bool) -> int:
    """Reads lines until there are no more; returns the exit code."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _set_up_readline()
        if not is_quiet:
            _hint("ctrl-C stops an answer, ctrl-D ends, /help has the commands")
    else:
        _prepare_pipe()
    has_failed = False
    while True:
        try:
            line = _read_line(is_terminal=is_terminal)
            if line is None or not _take(chat, line):
                break
        except KeyboardInterrupt:  # while a line is typed: it is dropped
            if not is_terminal:
                raise
            _hint("\n(ctrl-D or /exit ends)")
        except RequestError as error:
            has_failed = True
            _hint(_explain(error))
    return exit_codes.REFUSED if has_failed and not is_terminal else exit_codes.OK


def _take(chat: Chat, line: str) -> bool:
    """Does what a line says; False where that is to end."""
    text = line.strip()
    if not text:
        return True
    if text.startswith("/") and not text.startswith("//"):
        return _obey(chat, text)
    answer = chat.ask(text.removeprefix("/") if text.startswith("//") else text, write_text)
    if not answer.text.endswith("\n"):
        write_text("\n")
    if answer.reason is None:
        if not sys.stdin.isatty():
            raise KeyboardInterrupt  # nobody is there to go on
        _hint("[stopped]" if answer.text else "[stopped; the turn is not in the conversation]")
    elif answer.reason is FinishReason.CONTEXT_LENGTH:
        _hint("[the context is full, so the answer ends here; /reset starts anew]")
    elif answer.reason is FinishReason.MAX_TOKENS:
        _hint("[cut at --max-tokens]")
    return True


def _obey(chat: Chat, text: str) -> bool:
    command, _, rest = text.partition(" ")
    if rest.strip() and command in ("/exit", "/reset", "/help"):
        _hint(f"{command} takes no text; nothing was done")
        return True
    match command:
        case "/exit":
            return False
        case "/reset":
            chat.reset()
            _hint("[the conversation is forgotten]")
        case "/system":
            chat.system = rest.strip()
            _hint("[the instructions are set]" if chat.system else "[no instructions any more]")
        case "/help":
            _hint(HELP.rstrip())
        case _:
            near = did_you_mean(command, COMMANDS).replace("; leave it out", "; /help lists them")
            _hint(f"{command[:40]} is not a command{near} (a text may begin with //)")
    return True


def _explain(error: RequestError) -> str:
    if isinstance(error, ContextLengthError):
        return f"the conversation does not fit the context any more: {error}. /reset starts anew"
    return f"the turn was refused: {error}"


def _read_line(*, is_terminal: bool) -> str | None:
    """Returns the next line without its end; None where there are no more."""
    if not is_terminal:
        line = sys.stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None
    try:
        if sys.stdout.isatty():
            return input(PROMPT)
        print(PROMPT, end="", file=sys.stderr, flush=True)  # stdout is for answers
        return input()
    except EOFError:
        print(file=sys.stderr)
        return None


def _prepare_pipe() -> None:
    """Has a pipe be read as UTF-8 whatever the locale; what is not is refused turn by turn."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")


def _set_up_readline() -> None:
    """Has arrows and ctrl-R work while a line is typed. Nothing is kept in a file."""
    with contextlib.suppress(ImportError):  # Python may be built without it
        import readline

        readline.set_auto_history(True)


def _hint(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
