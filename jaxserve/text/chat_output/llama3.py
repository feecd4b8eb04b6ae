"""Calls as Llama 3 models write them."""

import enum
from collections.abc import Collection
from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import WHITESPACE, Gap, split_whitespace
from jaxserve.text.chat_output.json_call import JsonCall
from jaxserve.text.chat_output.reader import Spell
from jaxserve.text.chat_output.value_scanner import Status

TAG: Final = "<|python_tag|>"


class _Place(enum.Enum):
    START = enum.auto()  # or after a call: another may begin here without a marker
    TEXT = enum.auto()
    OPENED = enum.auto()  # after the marker
    CALL = enum.auto()


class Llama3Reader:
    """{"name": "f", "parameters": {"x": 1}} at the start of an output, or after <|python_tag|>.

    Several are separated by ";" or whitespace. Without the marker only a call of a function that
    was offered counts: an answer may be a JSON object too.
    """

    def __init__(self, sink: DeltaSink, spell: Spell, *, names: Collection[str]) -> None:
        self._sink = sink
        self._tag = spell(TAG)
        self._names = names
        self._place = _Place.START
        self._gap = Gap(sink, (self._tag,), is_after_call=False)
        self._call = JsonCall(sink)
        self._held: list[str] = []  # what stands before the call, while it may be none

    def push(self, text: str) -> None:
        while text:
            match self._place:
                case _Place.START:
                    text = self._read_start(text)
                case _Place.TEXT:
                    marker, text = self._gap.push(text)
                    if marker:
                        self._place, self._held = _Place.OPENED, [self._gap.layout, marker]
                case _Place.OPENED:
                    text = self._read_opened(text)
                case _Place.CALL:
                    text = self._read_call(text)

    def flush(self) -> None:
        """The output is over: a call that was not delivered is content."""
        match self._place:
            case _Place.TEXT:
                self._gap.flush()
            case _Place.CALL if not self._call.is_open:
                self._sink.add_content("".join([*self._held, self._call.held]))
            case _Place.OPENED:
                self._sink.add_content("".join(self._held))
            case _Place.START if not self._sink.num_calls:
                self._sink.add_content("".join(self._held))

    def _read_start(self, text: str) -> str:
        layout = WHITESPACE + ";" if self._sink.num_calls else WHITESPACE
        rest = text.lstrip(layout)
        self._held.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._place = _Place.CALL
            self._call = JsonCall(self._sink, names=self._names, is_marked=False)
        elif rest:
            rest = "".join([*self._held, rest])
            self._go_on(is_after_call=self._sink.num_calls > 0)
        return rest

    def _read_opened(self, text: str) -> str:
        layout, rest = split_whitespace(text)
        self._held.append(layout)
        if rest.startswith("{"):
            self._place, self._call = _Place.CALL, JsonCall(self._sink)
        elif rest:
            self._sink.add_content("".join(self._held))
            self._go_on()
        return rest

    def _read_call(self, text: str) -> str:
        rest = text[self._call.feed(text, 0) :]
        if self._call.status is Status.DONE:
            self._place, self._held = _Place.START, []
        elif self._call.status is Status.BROKEN:
            if not self._call.is_open:
                self._sink.add_content("".join([*self._held, self._call.held]))
            self._go_on()
        return rest

    def _go_on(self, *, is_after_call: bool = False) -> None:
        self._place, self._held = _Place.TEXT, []
        self._gap = Gap(self._sink, (self._tag,), is_after_call=is_after_call)
