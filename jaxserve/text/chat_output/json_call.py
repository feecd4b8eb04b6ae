"""Reads one tool call that is a JSON object with a name and arguments, character by character."""

import enum
import json
import re
from collections.abc import Collection
from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import WHITESPACE
from jaxserve.text.chat_output.value_scanner import STRING_RUN, Status, ValueScanner
from jaxserve.text.detokenizer import SPECIAL_MARK

# What is held of a call before its name is known; more is no call.
MAX_HELD: Final = 1 << 16
MAX_NAME: Final = 256
_NAME_KEYS: Final = frozenset({"name"})
_ARGUMENTS_KEYS: Final = frozenset({"arguments", "parameters"})
# Beside them in calls that nothing marks.
_OTHER_KEYS: Final = frozenset({"type", "id"})
_SCALAR_RUN: Final = re.compile(r"[-+.\w]+")


class _Place(enum.Enum):
    OPENING = enum.auto()  # before "{"
    KEY = enum.auto()  # before a key
    KEY_OR_END = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()  # before a value
    IN_STRING = enum.auto()
    IN_SCALAR = enum.auto()
    IN_OBJECT = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonCall:
    """A call such as {"name": "f", "arguments": {"x": 1}}.

    Once the name and the first brace of the arguments are there the call is delivered, and its
    arguments follow as they come. Until then all is held: what turns out to be no call is text.

    Attributes:
      is_open: something of it was delivered.
    """

    def __init__(
        self, sink: DeltaSink, *, names: Collection[str] | None = None, is_marked: bool = True
    ) -> None:
        """Args:
        names: the only functions that count; None takes any.
        is_marked: something before it says that a call comes. If not, any key that a call has no
          use for, and missing arguments, tell that it is none.
        """
        self._sink = sink
        self._names = names
        self._is_marked = is_marked
        self.status = Status.READING
        self._place = _Place.OPENING
        self._held: list[str] = []
        self._num_held = 0
        self._key = ""
        self._pieces: list[str] = []  # of the string or scalar being read
        self._is_escaped = False
        self._scanner = ValueScanner()
        self._name = ""
        self._arguments: list[str] | None = None  # they wait for the name
        self.is_open = False

    @property
    def held(self) -> str:
        """What was read, as long as nothing of it was delivered."""
        return "" if self.is_open else "".join(self._held)

    def feed(self, text: str, at: int) -> int:
        """Reads from `at`; returns where it stopped, which is the end unless it has a status."""
        start = at
        window = text[: start + MAX_HELD - self._num_held]
        while at < len(window) and self.status is Status.READING and not self.is_open:
            at = self._step(window, at)
        if not self.is_open:
            self._held.append(text[start:at])
            self._num_held += at - start
            if self.status is Status.READING and self._num_held == MAX_HELD:
                self.status = Status.BROKEN
            return at
        while at < len(text) and self.status is Status.READING:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """Reads a character, or a run of them, at the place it is at; returns where it goes on."""
        char = text[at]
        if self._place in _READS_RUNS:
            return self._read_run(text, at)
        if char in WHITESPACE:
            return at + 1
        match self._place, char:
            case _Place.OPENING, "{":
                self._place = _Place.KEY_OR_END
            case ((_Place.KEY | _Place.KEY_OR_END), '"'):
                self._place = _Place.IN_KEY
            case _Place.COLON, ":":
                self._place = _Place.VALUE
            case _Place.COMMA_OR_END, ",":
                self._place = _Place.KEY
            case ((_Place.COMMA_OR_END | _Place.KEY_OR_END), "}"):
                self._finish()
            case _Place.VALUE, _:
                return self._begin_value(char, at)
            case _:
                self.status = Status.BROKEN
                return at
        return at + 1

    def _begin_value(self, char: str, at: int) -> int:
        """Looks at a value's first character; returns where the value is read from."""
        if char == '"':
            self._place = _Place.IN_STRING
            return at + 1
        if self._key in _NAME_KEYS or (self._key in _ARGUMENTS_KEYS and char not in "{n"):
            self.status = Status.BROKEN
        elif char in "{[":
            self._place, self._scanner = _Place.IN_OBJECT, ValueScanner()
            if self._key in _ARGUMENTS_KEYS:
                self._arguments = []
                self._open_if_known()
        elif _SCALAR_RUN.match(char):
            self._place = _Place.IN_SCALAR
        else:
            self.status = Status.BROKEN
        return at

    def _read_run(self, text: str, at: int) -> int:
        match self._place:
            case _Place.IN_OBJECT:
                return self._read_object(text, at)
            case _Place.IN_SCALAR:
                run = _SCALAR_RUN.match(text, at)
                if run is None:
                    self._end_scalar("".join(self._pieces))
                    self._pieces = []
                    return at
                self._pieces.append(run[0])
                return run.end()
        return self._read_string(text, at)

    def _read_object(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._key in _ARGUMENTS_KEYS:
            self._add_arguments(text[at:end])
        if self._scanner.status is Status.DONE:
            self._place = _Place.COMMA_OR_END
        self.status = Status.BROKEN if self._scanner.status is Status.BROKEN else self.status
        return end

    def _read_string(self, text: str, at: int) -> int:
        if text[at] == SPECIAL_MARK:
            self.status = Status.BROKEN
            return at
        if self._is_escaped:
            self._is_escaped = False
            self._pieces.append(text[at])
            return at + 1
        if run := STRING_RUN.match(text, at):
            self._pieces.append(run[0])
            return run.end()
        if text[at] == "\\":
            self._is_escaped = True
            self._pieces.append("\\")
            return at + 1
        raw, self._pieces = "".join(self._pieces), []
        try:
            string = json.loads(f'"{raw}"')
        except ValueError:
            self.status = Status.BROKEN
            return at
        self._end_string(string)
        return at + 1

    def _end_string(self, string: str) -> None:
        if self._place is _Place.IN_KEY:
            self._end_key(string)
            return
        self._place = _Place.COMMA_OR_END
        if self._key in _NAME_KEYS:
            is_known = self._names is None or string in self._names
            if not (0 < len(string) <= MAX_NAME and is_known):
                self.status = Status.BROKEN
                return
            self._name = string
            self._open_if_known()
        elif self._key in _ARGUMENTS_KEYS:  # an object that was written as a text
            if not is_object(string):
                self.status = Status.BROKEN
                return
            self._arguments = []
            self._open_if_known()
            self._add_arguments(string)

    def _end_key(self, key: str) -> None:
        self._key, self._place = key, _Place.COLON
        is_repeated = (key in _NAME_KEYS and self._name != "") or (
            key in _ARGUMENTS_KEYS and self._arguments is not None
        )
        is_strange = key not in _NAME_KEYS | _ARGUMENTS_KEYS | _OTHER_KEYS
        if is_repeated or (is_strange and not self._is_marked):
            self.status = Status.BROKEN

    def _end_scalar(self, text: str) -> None:
        self._place = _Place.COMMA_OR_END
        if self._key in _ARGUMENTS_KEYS:
            if text != "null":
                self.status = Status.BROKEN
                return
            self._arguments = []
            self._open_if_known()
            self._add_arguments("{}")

    def _open_if_known(self) -> None:
        if self._name and self._arguments is not None and not self.is_open:
            self.is_open = True
            self._sink.open_call(self._name)
            self._sink.add_arguments("".join(self._arguments))
            self._held, self._arguments = [], []

    def _add_arguments(self, text: str) -> None:
        if self.is_open:
            self._sink.add_arguments(text)
        elif self._arguments is not None:
            self._arguments.append(text)

    def _finish(self) -> None:
        if not self.is_open and self._name and self._is_marked:
            self._arguments = ["{}"]  # a function without arguments
            self._open_if_known()
        self.status = Status.DONE if self.is_open else Status.BROKEN


_READS_RUNS: Final = frozenset(
    {_Place.IN_KEY, _Place.IN_STRING, _Place.IN_SCALAR, _Place.IN_OBJECT}
)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
