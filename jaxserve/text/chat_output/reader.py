"""What every reader of tool calls does, and the one that finds none."""

from typing import Protocol

from jaxserve.text.chat_output.deltas import DeltaSink


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
