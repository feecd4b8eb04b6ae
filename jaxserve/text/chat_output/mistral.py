"""Calls as Mistral models write them, older and newer ones."""

import enum
import re
from typing import Final, Literal

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import WHITESPACE, Gap, split_whitespace
from jaxserve.text.chat_output.json_call import JsonCall
from jaxserve.text.chat_output.reader import Spell
from jaxserve.text.chat_output.value_scanner import Status, ValueScanner

OPEN: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
MAX_HEAD: Final = 512  # characters between the marker and the arguments
_NAME_CHAR: Final = re.compile(r"[\w.\-]", re.ASCII)


class _Place(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # after the marker
    ITEM = enum.auto()  # before a call in a list
    CALL = enum.auto()
    NEXT = enum.auto()  # after a call in a list
    NAME = enum.auto()  # in the name of a call, or after it
    ARGUMENTS = enum.auto()


class MistralReader:
    """[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], or newer [TOOL_CALLS]f[ARGS]{"x": 1}

    The newer form comes with [CALL_ID]… before [ARGS], and without both.
    """

    def __init__(self, sink: DeltaSink, spell: Spell) -> None:
        self._sink = sink
        self._spell = spell
        self._place = _Place.TEXT
        self._gap = Gap(sink, (spell(OPEN),), is_after_call=False)
        self._call = JsonCall(sink)
        self._is_list = False
        self._scanner = ValueScanner()
        self._held: list[str] = []  # what stands before the call, while it may be none
        self._head = _Head(spell)

    def push(self, text: str) -> None:
        while text:
            match self._place:
                case _Place.TEXT:
                    marker, text = self._gap.push(text)
                    if marker:
                        self._place, self._held = _Place.OPENED, [self._gap.layout, marker]
                case _Place.CALL:
                    text = self._read_call(text)
                case _Place.NAME:
                    text = self._read_name(text)
                case _Place.ARGUMENTS:
                    text = self._read_arguments(text)
                case _:
                    text = self._read_layout(text)

    def flush(self) -> None:
        """The output is over: a call that was not delivered is content."""
        match self._place:
            case _Place.TEXT:
                self._gap.flush()
            case _Place.OPENED | _Place.ITEM:
                self._give_up()
            case _Place.CALL if not self._call.is_open:
                self._give_up(self._call.held)
            case _Place.NAME:
                self._give_up(self._head.held)

    def _read_layout(self, text: str) -> str:
        """Reads up to the next call; returns what it did not take."""
        layout, rest = split_whitespace(text)
        self._held.append(layout)
        if not rest:
            return rest
        match self._place, rest[0]:
            case _Place.OPENED, "[":
                self._place, self._is_list = _Place.ITEM, True
            case _Place.NEXT, ",":
                self._place = _Place.ITEM
            case _Place.NEXT, "]":
                self._go_on(is_after_call=True)
                return rest[1:]
            case ((_Place.OPENED | _Place.ITEM), "{"):
                self._is_list = self._place is _Place.ITEM
                self._place, self._call = _Place.CALL, JsonCall(self._sink)
                return rest
            case _Place.OPENED, char if _NAME_CHAR.match(char):
                self._place, self._head = _Place.NAME, _Head(self._spell)
                return rest
            case _Place.NEXT, _:
                rest = "".join([*self._held, rest])
                self._go_on(is_after_call=True)
                return rest
            case _:
                self._give_up()
                return rest
        self._held.append(rest[0])
        return rest[1:]

    def _read_call(self, text: str) -> str:
        rest = text[self._call.feed(text, 0) :]
        if self._call.status is Status.DONE:
            self._held = []
            if self._is_list:
                self._place = _Place.NEXT
            else:
                self._go_on(is_after_call=True)
        elif self._call.status is Status.BROKEN:
            self._give_up(self._call.held)
        return rest

    def _read_name(self, text: str) -> str:
        for at, char in enumerate(text):
            if char == "{" and self._head.is_whole:
                self._sink.open_call(self._head.name)
                self._place, self._scanner = _Place.ARGUMENTS, ValueScanner()
                return text[at:]
            if not self._head.take(char):
                self._give_up(self._head.held)
                return text[at:]
        return ""

    def _read_arguments(self, text: str) -> str:
        end = self._scanner.feed(text, 0)
        self._sink.add_arguments(text[:end])
        if self._scanner.status is not Status.READING:
            self._go_on(is_after_call=self._scanner.status is Status.DONE)
        return text[end:]

    def _give_up(self, text: str = "") -> None:
        self._sink.add_content("".join([*self._held, text]))
        self._go_on()

    def _go_on(self, *, is_after_call: bool = False) -> None:
        self._place, self._held = _Place.TEXT, []
        self._gap = Gap(self._sink, (self._spell(OPEN),), is_after_call=is_after_call)


class _Head:
    """What stands between the marker and the arguments in the newer form, character by character.

    A name, an id after its marker, the marker of arguments, whitespace: each but the name may lack.

    Attributes:
      name: of the function, as far as it was read.
      held: all that was read.
    """

    def __init__(self, spell: Spell) -> None:
        self.name = ""
        self.held = ""
        self._call_id, self._args = spell(CALL_ID), spell(ARGS)
        self._stage: Literal["name", "id", "marker", "space"] = "name"
        self._marker = ""
        self._markers: tuple[str, ...] = (self._call_id, self._args)

    def take(self, char: str) -> bool:
        """Reads a character; False, and it is not read, where it cannot stand here."""
        fits = self._fits(char)
        if fits:
            self.held += char
        return fits

    def _fits(self, char: str) -> bool:
        if self._stage == "marker":
            return self._fits_marker(char)
        if self._stage != "space" and any(marker[0] == char for marker in self._markers):
            self._stage, self._marker = "marker", char
            return True
        if char in WHITESPACE:
            self._stage = "space"
            return len(self.held) < MAX_HEAD
        if self._stage == "space" or not _NAME_CHAR.match(char):
            return False
        if self._stage == "name":
            self.name += char
        return len(self.held) < MAX_HEAD

    def _fits_marker(self, char: str) -> bool:
        self._marker += char
        fits = any(marker.startswith(self._marker) for marker in self._markers)
        if fits and self._marker == self._call_id:
            self._stage, self._markers = "id", (self._args,)
        elif fits and self._marker == self._args:
            self._stage = "space"
        return fits

    @property
    def is_whole(self) -> bool:
        """Whether the arguments may begin."""
        return self._stage != "marker"
