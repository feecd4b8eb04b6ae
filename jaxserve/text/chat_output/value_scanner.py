"""Finds where a JSON value ends, in text that comes in pieces."""

import enum
import re
from typing import Final

from jaxserve.text.detokenizer import SPECIAL_MARK

# A special token's mark ends every run: no call goes on after it.
STRING_RUN: Final = re.compile(rf'[^"\\{SPECIAL_MARK}]+')
_OUTSIDE_RUN: Final = re.compile(rf'[^"{{}}\[\]<{SPECIAL_MARK}]+')


class Status(enum.Enum):
    READING = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()  # the next character belongs to no call


class ValueScanner:
    """Finds the end of a JSON object or list: brackets are counted, strings are skipped.

    A special token breaks it, and so does "<" outside of a string: there it is never JSON, and it
    may begin a marker.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.status = Status.READING

    def feed(self, text: str, at: int) -> int:
        """Reads from `at`; returns where it stopped, which is the end unless it has a status."""
        while at < len(text) and self.status is Status.READING:
            if self._is_escaped and text[at] != SPECIAL_MARK:
                self._is_escaped = False
                at += 1
                continue
            if run := (STRING_RUN if self._is_string else _OUTSIDE_RUN).match(text, at):
                at = run.end()
                continue
            at += self._take(text[at])
        return at

    def _take(self, char: str) -> int:
        match char:
            case "\\" if self._is_string:
                self._is_escaped = True
            case '"':
                self._is_string = not self._is_string
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 0:
                    self.status = Status.DONE
            case _:
                self.status = Status.BROKEN
                return 0
        return 1
