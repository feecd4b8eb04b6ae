"""The log on stderr: every line of the standard library's loggers as facts, in text or JSON.

A message such as `finished request_id=%r reason=%s` is taken apart by its format, which is ours,
and never by what it says once filled in: a value cannot pass for a fact, a line or a colour.
"""

import datetime
import json
import logging
import re
import sys
from typing import Final, Literal, TextIO, override

import structlog
from structlog.types import EventDict, WrappedLogger

Format = Literal["text", "json"]

_CONVERSION: Final = re.compile(r"%[-#0 +]*\d*(?:\.(\d+))?([a-zA-Z])")
_FACT: Final = re.compile(rf"(\w+)={_CONVERSION.pattern}")
_PLAIN: Final = re.compile(r"[\w.:/@+,\[\]-]+", re.ASCII)  # needs no quotes
_OWN_KEYS: Final = ("timestamp", "level", "logger", "event", "exception", "stack")


def set_up_logging(level: str, log_format: Format) -> None:
    """Sends the log to stderr: ours from `level` on, of other libraries the warnings.

    A second call changes the level and the format.
    """
    root = logging.getLogger()
    handler = next((h for h in root.handlers if isinstance(h, StderrHandler)), None)
    if handler is None:
        handler = StderrHandler()
        root.addHandler(handler)
    handler.setFormatter(build_formatter(log_format))
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())


def build_formatter(log_format: Format) -> structlog.stdlib.ProcessorFormatter:
    """Returns the formatter of a handler."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_take_facts, structlog.contextvars.merge_contextvars],
        processors=[
            _add_origin,
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _render_text if log_format == "text" else _render_json,
        ],
        pass_foreign_args=True,
    )


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    @override
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute there
        return sys.stderr


def _take_facts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Moves what the format calls `key=%s` out of the message."""
    arguments, text = event.pop("positional_args"), event["_record"].msg
    if not isinstance(text, str) or not isinstance(arguments, tuple):
        return event
    bare = text.replace("%%", "")
    found = list(_FACT.finditer(bare))
    if not len(found) == len(arguments) == len(list(_CONVERSION.finditer(bare))):
        return event
    event["event"] = " ".join(_FACT.sub("", text).replace("%%", "%").split()).replace(" ;", ";")
    for match, value in zip(found, arguments, strict=True):
        event[match[1]] = _plain_value(value, digits=match[2], kind=match[3])
    return event


def _plain_value(value: object, *, digits: str | None, kind: str) -> object:
    """Returns what JSON has a word for, as precise as the format says; other things as text."""
    match value:
        case float() if kind == "d":
            return int(value)
        case float() if digits is not None:
            return round(value, int(digits))
        case None | bool() | int() | float() | str():
            return value
        case BaseException():
            return repr(value)
        case _:
            return str(value)


def _add_origin(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record = event["_record"]
    created = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    origin = {
        "timestamp": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname,
        "logger": record.name,
    }
    return {**origin, **{key: value for key, value in event.items() if key not in origin}}


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    return json.dumps(event, default=str)  # ASCII: nothing of a value reaches the terminal as it is


def _render_text(_: WrappedLogger, __: str, event: EventDict) -> str:
    words = [event["timestamp"], event["level"], event["logger"], _printable(event["event"])]
    words += [f"{key}={_quoted(event[key])}" for key in event if key not in _OWN_KEYS]
    line = " ".join(word for word in words if word)
    for trace in (event.get("exception"), event.get("stack")):
        for part in (trace or "").splitlines():
            line += f"\n    {_printable(part)}"  # set in: it cannot pass for a line of the log
    return line


def _quoted(value: object) -> str:
    match value:
        case None:
            return "-"
        case str() if not _PLAIN.fullmatch(value):
            return json.dumps(value)  # ASCII, with line ends and escapes spelled out
        case bool():
            return str(value).lower()
        case int() | float() | str():
            return str(value)
    return json.dumps(str(value))


def _printable(text: str) -> str:
    """Spells out what a terminal would obey: line ends, escapes, marks of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
