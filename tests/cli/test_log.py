"""The log: facts apart from words, in text and JSON, and nothing in it that a client wrote."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest
import structlog

from jaxserve.cli.log import StderrHandler, build_formatter, set_up_logging

FORGED = (
    "x\n2026-01-01T00:00:00.000Z INFO jaxserve.engine finished request_id=y\r\x1b[2J\x9b1m\u2028"
)


class Lines:
    """A logger of its own whose lines can be read."""

    def __init__(self, log_format: str) -> None:
        assert log_format in ("text", "json")
        self._stream = io.StringIO()
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(build_formatter(log_format))  # type: ignore[arg-type]  # one of two
        self.logger = logging.Logger("jaxserve.test", logging.DEBUG)
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def object(self) -> dict[str, object]:
        (line,) = self.text.splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def text() -> Lines:
    return Lines("text")


@pytest.fixture
def objects() -> Lines:
    return Lines("json")


def test_a_line_of_text_is_time_level_logger_words_and_facts(text: Lines) -> None:
    text.logger.info("kv pool ready pages=%d share=%.2f name=%s of=%r", 3, 0.12345, "a b", None)
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO jaxserve\.test kv pool ready "
        r'pages=3 share=0\.12 name="a b" of=-\n'
    )
    assert re.fullmatch(pattern, text.text)


def test_facts_are_fields_of_their_own_type_in_json(objects: Lines) -> None:
    objects.logger.warning(
        "finished n=%d level_s=%.1f running=%d id=%r none=%s", 3, 2.06, 6.0, "é", None
    )
    line = objects.object
    assert list(line) == [
        "timestamp", "level", "logger", "event", "n", "level_s", "running", "id", "none",
    ]  # fmt: skip
    assert (line["level"], line["logger"], line["event"]) == (
        "WARNING",
        "jaxserve.test",
        "finished",
    )
    assert (line["n"], line["level_s"], line["running"]) == (3, 2.1, 6)
    assert (line["id"], line["none"]) == ("é", None)


def test_words_between_the_facts_stay_words(objects: Lines) -> None:
    objects.logger.info("cache unusable folder=%s error=%r; compiling 100%%", "/c", OSError("full"))
    line = objects.object
    assert line["event"] == "cache unusable; compiling 100%"
    assert (line["folder"], line["error"]) == ("/c", "OSError('full')")


@pytest.mark.parametrize(
    ("message", "arguments", "event"),
    [
        ("the file %s is %d bytes", ("a", 3), "the file a is 3 bytes"),
        ("at=%s the file %s", ("noon", "a"), "at=noon the file a"),
        ("no arguments a=1 100%", (), "no arguments a=1 100%"),
        ("by name %(a)s", ({"a": 1},), "by name 1"),
    ],
)
def test_other_messages_are_as_they_were_meant(
    objects: Lines, message: str, arguments: tuple[object, ...], event: str
) -> None:
    objects.logger.info(message, *arguments)
    assert objects.object["event"] == event


@pytest.mark.parametrize("value", [FORGED, "\ud800", 'a" b="c', "a=b", "", "‮"])
def test_a_value_cannot_pass_for_a_line_or_a_fact(text: Lines, value: str) -> None:
    text.logger.info("finished request_id=%r reason=%s", value, "eos")
    (line,) = text.text.splitlines()
    assert line.isascii()
    assert line.isprintable()
    start, quoted, end = re.fullmatch(r"(.*) request_id=(\".*\") (.*)", line).groups()  # type: ignore[union-attr]
    assert (start.split()[1:], end) == (["INFO", "jaxserve.test", "finished"], "reason=eos")
    assert json.loads(quoted) == value


def test_nor_can_it_in_a_message_without_facts_or_in_an_error(text: Lines) -> None:
    text.logger.info("no such file: %s", FORGED)
    try:
        raise KeyError(FORGED) from ValueError(FORGED)
    except KeyError:
        text.logger.exception("a call failed request_id=%r", FORGED)
    lines = text.text.split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    own = [line for line in lines if not line.startswith("    ")]
    assert [line.split()[1] for line in own] == ["INFO", "ERROR"]
    assert lines.count("    Traceback (most recent call last):") == 1


def test_a_json_line_stays_a_line_whatever_is_in_it(objects: Lines) -> None:
    try:
        raise KeyError(FORGED)
    except KeyError:
        objects.logger.exception("a call failed request_id=%r", FORGED)
    line = objects.object
    assert line["request_id"] == FORGED
    assert str(line["exception"]).startswith("Traceback")
    assert objects.text.isascii()


def test_the_request_id_of_the_context_is_in_every_line(objects: Lines) -> None:
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        objects.logger.info("tokenized")
    assert objects.object["request_id"] == "r-1"


@pytest.fixture
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("jaxserve")
    before = (root.level, list(root.handlers), ours.level)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])


@pytest.mark.usefixtures("_restored")
def test_setting_up_twice_changes_the_format_and_adds_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("info", "text")
    set_up_logging("debug", "json")
    assert sum(isinstance(h, StderrHandler) for h in logging.getLogger().handlers) == 1
    logging.getLogger("jaxserve.x").debug("here n=%d", 1)
    logging.getLogger("another").info("not here")
    logging.getLogger("another").warning("but here")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["n"]) == ("here", 1)
    assert second["event"] == "but here"


@pytest.mark.usefixtures("_restored")
def test_lines_go_to_stderr_wherever_that_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_logging("info", "text")
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    logging.getLogger("jaxserve.x").info("hello")
    assert other.getvalue().endswith("INFO jaxserve.x hello\n")
