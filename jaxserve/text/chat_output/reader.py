"""What every reader of tool calls does, and the one that finds none."""

from collections.abc import Callable
from typing import Protocol

from jaxserve.text.chat_output.deltas import DeltaSink

# How a marker stands in the text: with a mark before it where it is a special token.
Spell = Callable[[str], str]


class ToolReader(Protocol):
    """Splits an output into content and calls, however its text is cut into pieces."""

    def push(self, text: str) -> None: ...

    def flush(self) -> None: ...


class PlainReader:
    """Where no calls are read: all is content."""

    def __init__(self, sink: DeltaSink) -> None:
        self._sink = sink

    def push(self, text: str) -> None:
        self._sink.add_content(text)

    def flush(self) -> None:
        return None
