"""Calls as Hermes and Qwen models write them."""

import enum
from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import Gap, split_whitespace
from jaxserve.text.chat_output.json_call import JsonCall
from jaxserve.text.chat_output.reader import Spell
from jaxserve.text.chat_output.value_scanner import Status

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class _Place(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # after the opening marker
    CALL = enum.auto()
    AFTER = enum.auto()  # after a call, in its block


class HermesReader:
    """<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>

    A block may hold several calls. What is no call is content, its markers too; what follows a call
    inside its block is content without the closing marker.
    """

    def __init__(self, sink: DeltaSink, spell: Spell) -> None:
        self._sink = sink
        self._open, self._close = spell(OPEN), spell(CLOSE)
        self._place = _Place.TEXT
        self._gap = Gap(sink, (self._open,), is_after_call=False)
        self._call = JsonCall(sink)
        self._held: list[str] = []  # what stands before the call, while it may be none

    def push(self, text: str) -> None:
        while text:
            match self._place:
                case _Place.TEXT:
                    text = self._read_text(text)
                case _Place.CALL:
                    text = self._read_call(text)
                case _:
                    text = self._read_layout(text)

    def flush(self) -> None:
        """The output is over: a call that was not delivered is content."""
        match self._place:
            case _Place.TEXT:
                self._gap.flush()
            case _Place.OPENED:
                self._give_held()
            case _Place.CALL if not self._call.is_open:
                self._give_held()
                self._sink.add_content(self._call.held)

    def _read_text(self, text: str) -> str:
        marker, rest = self._gap.push(text)
        if marker == self._open:
            self._place, self._held = _Place.OPENED, [self._gap.layout, self._open]
        elif marker == self._close:
            self._gap = Gap(self._sink, (self._open,), is_after_call=True)
        return rest

    def _read_layout(self, text: str) -> str:
        layout, rest = split_whitespace(text)
        self._held.append(layout)
        if rest.startswith("{"):
            self._place, self._call = _Place.CALL, JsonCall(self._sink)
        elif rest and self._place is _Place.OPENED:
            self._give_held()
            self._go_on((self._open,))
        elif rest:
            rest = "".join([*self._held, rest])
            self._go_on((self._close, self._open), is_after_call=True)
        return rest

    def _read_call(self, text: str) -> str:
        rest = text[self._call.feed(text, 0) :]
        if self._call.status is Status.DONE:
            self._place, self._held = _Place.AFTER, []
        elif self._call.status is Status.BROKEN:
            # a block that holds a call is closed by a marker; else the marker is content as well
            is_block = self._call.is_open or self._open not in self._held
            if not self._call.is_open:
                self._give_held()
                self._sink.add_content(self._call.held)
            self._go_on((self._close, self._open) if is_block else (self._open,))
        return rest

    def _give_held(self) -> None:
        self._sink.add_content("".join(self._held))
        self._held = []

    def _go_on(self, markers: tuple[str, ...], *, is_after_call: bool = False) -> None:
        self._place = _Place.TEXT
        self._gap = Gap(self._sink, markers, is_after_call=is_after_call)
