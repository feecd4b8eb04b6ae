"""The conversation of `jaxserve chat`: turns, commands, and ctrl-C in a real terminal."""

import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxserve.engine.start
from jaxserve.cli.main import main
from jaxserve.engine import Engine
from tests.engines import build_engine
from tests.fakes import CHAT_TEMPLATE, EOS_ID, say

Run = Callable[..., tuple[int, str, str]]


def ids(text: str) -> tuple[int, ...]:
    """The prompt that CHAT_TEMPLATE makes of `role: text|role: text`, for the answer's script."""
    turns = text.split("|")
    return tuple(token for turn in turns for token in (*turn.encode(), EOS_ID)) + tuple(
        b"assistant: "
    )


ANSWERS = {
    ids("user: hi"): [*b"hey", EOS_ID],
    ids("user: hi|assistant: hey|user: and?"): [*b"so", EOS_ID],
    ids("user: and?"): [*b"new", EOS_ID],
    ids("system: be|user: hi"): [*b"brief", EOS_ID],
    ids("user: /x"): [*b"path", EOS_ID],
    None: [*b"?", EOS_ID],
}


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `jaxserve chat` with lines from a pipe; returns exit code, stdout and stderr."""

    def run(lines: str, *words: str, template: str | None = CHAT_TEMPLATE) -> tuple[int, str, str]:
        def load_engine(*_: object, **__: object) -> Engine:
            return build_engine(
                script=say(ANSWERS), chat_template=template, num_pages=40, max_model_tokens=80
            )[0]

        monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode(errors="surrogateescape")))
        )
        code = main(["chat", "--quiet", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_each_line_is_a_turn_and_the_answers_alone_are_on_stdout(chat: Run) -> None:
    assert chat("\ufeffhi\r\n\n  \nand?") == (0, "hey\nso\n", "")


def test_reset_forgets_and_system_instructs(chat: Run) -> None:
    code, out, err = chat("hi\n/reset\nand?\n/reset\n/system be\nhi\n/reset\n/system\nhi\n")
    assert (code, out) == (0, "hey\nnew\nbrief\nhey\n")
    assert err.splitlines()[0] == "[the conversation is forgotten]"
    assert chat("hi\n", "--system", "be")[1] == "brief\n"


def test_commands_are_never_sent_to_the_model(chat: Run) -> None:
    code, out, err = chat("/help\n/restet\n/reset now\n/what\n/exit\nhi\n")
    assert (code, out) == (0, "")
    assert "/system TEXT" in err
    assert "/restet is not a command; did you mean /reset?" in err
    assert "/reset takes no text; nothing was done" in err
    assert "/what is not a command; /help lists them" in err
    assert chat("//x\n")[1] == "path\n"


def test_a_full_context_is_said_and_a_reset_helps(chat: Run) -> None:
    long = "x" * 90
    code, out, err = chat(f"hi\n{long}\nand?\n/reset\nhi\n")
    assert (code, out) == (1, "hey\nso\nhey\n"), "the turn that was refused is not in it"
    assert "does not fit the context any more" in err
    assert "/reset starts anew" in err
    assert long not in err


def test_an_answer_that_fills_the_context_or_the_limit_says_so(chat: Run) -> None:
    ANSWERS[ids("user: go")] = [*b"on" * 100]
    try:
        assert "[the context is full" in chat("go\n")[2]
        assert "[cut at --max-tokens]" in chat("go\n", "--max-tokens", "4")[2]
    finally:
        del ANSWERS[ids("user: go")]


def test_a_line_that_is_not_utf8_is_refused_alone(chat: Run) -> None:
    code, out, err = chat("\udcff\nhi\n")
    assert (code, out) == (1, "hey\n")
    assert "the turn was refused: messages holds a lone surrogate" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--temperature", "nan"), "temperature is nan"), (("--stop", ""), "an empty string")],
)
def test_a_flag_that_will_not_do_is_told_before_the_first_turn(
    words: tuple[str, str], said: str, chat: Run
) -> None:
    code, out, err = chat("", *words)
    assert (code, out) == (1, "")
    assert said in err


def test_a_model_without_a_template_cannot_chat(chat: Run) -> None:
    code, out, err = chat("hi\n", template=None)
    assert (code, out) == (1, "")
    assert "bytes has no chat template, so it cannot chat; use `jaxserve generate`" in err


TERMINAL = """\
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # a session's first terminal is its controlling one
import jaxserve.engine.start
from jaxserve.cli.main import main
from tests.engines import build_engine
from tests.fakes import CHAT_TEMPLATE, EOS_ID
def script(prompt, index):
    text = bytes(token for token in prompt if token < 256)
    if b"endless" in text.rpartition(b"user: ")[2]:
        return 97
    said = b"%d turns" % text.count(b"user: ")
    return said[index] if index < len(said) else EOS_ID
def load_engine(*_, **__):
    return build_engine(script=script, chat_template=CHAT_TEMPLATE, num_pages=200000,
                        max_model_tokens=400000)[0]
jaxserve.engine.start.load_engine = load_engine
sys.argv = ["jaxserve", "chat", "--quiet"]
sys.exit(main())
"""


class Terminal:
    """A process in a terminal of its own, which is read until something appears."""

    def __init__(self) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL],
            cwd=Path(__file__).parents[2],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, text: str, *, nudge: str = "") -> None:
        """Reads; where nothing comes, types the nudge again.

        Python may miss a ctrl-C in the moment before it waits for a key.
        """
        while text not in self.seen:
            if nudge and not select.select([self._fd], [], [], 1.0)[0]:
                self.type(nudge)
                continue
            self.seen += os.read(self._fd, 65536).decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:  # the other side is closed
            pass
        os.close(self._fd)
        return self.process.wait()


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    terminal = Terminal()
    try:
        terminal.read_until("> ")
        terminal.type("endless\n")
        terminal.read_until("aaaa")
        terminal.type("\x03")
        terminal.read_until("[stopped]")
        terminal.read_until("> ")
        terminal.type("half a line\x03")
        terminal.read_until("(ctrl-D or /exit ends)", nudge="\x03")
        terminal.read_until("> ")
        terminal.type("and now\n")
        terminal.read_until("2 turns")  # the stopped answer stays, the dropped line does not
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()
