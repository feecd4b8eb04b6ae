"""Takes the model's reasoning out of its output."""

import enum
from collections.abc import Callable, Mapping
from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import MAX_LAYOUT, WHITESPACE, MarkerSearch, layout_before

# Where reasoning begins and ends, by the parser's name.
REASONING_MARKERS: Final[Mapping[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


class _State(enum.Enum):
    START = enum.auto()  # the opening marker may come
    BEGUN = enum.auto()  # after it; whitespace here is layout
    INSIDE = enum.auto()
    ENDED = enum.auto()  # whitespace after the closing marker is layout
    OVER = enum.auto()


class ReasoningReader:
    """Splits an output into reasoning, which stands first, and the rest.

    Whitespace beside the markers is layout. Reasoning that never ends is reasoning to the end.
    """

    def __init__(
        self,
        sink: DeltaSink,
        rest: Callable[[str], None],
        *,
        markers: tuple[str, str],
        is_open: bool,
    ) -> None:
        """Args:
        rest: takes the text after the reasoning.
        is_open: the prompt ends with the opening marker; a second one is layout.
        """
        self._sink = sink
        self._rest = rest
        self._open, self._close = markers
        self._search = MarkerSearch((self._close,))
        self._is_open = is_open
        self._state = _State.START
        self._held = ""

    def push(self, text: str) -> None:
        if self._state is _State.START:
            text = self._read_start(text)
        if self._state is _State.BEGUN:
            text = text.lstrip(WHITESPACE)
            if text:
                self._state = _State.INSIDE
        if self._state is _State.INSIDE:
            text = self._read_inside(text)
        if self._state is _State.ENDED:
            text = text.lstrip(WHITESPACE)
            if text:
                self._state = _State.OVER
        if self._state is _State.OVER and text:
            self._rest(text)

    def flush(self) -> None:
        """The output is over: what was held stays what it seemed to be."""
        held, self._held = self._held, ""
        if self._is_open or self._state is _State.INSIDE:
            self._sink.add_reasoning(held if self._state is _State.INSIDE else held.lstrip())
        elif held:
            self._rest(held)

    def _read_start(self, text: str) -> str:
        """Returns what follows the start, once that is decided."""
        text, self._held = self._held + text, ""
        bare = text.lstrip(WHITESPACE)
        is_layout = len(text) - len(bare) <= MAX_LAYOUT
        if bare.startswith(self._open) and is_layout:
            self._state = _State.BEGUN
            return bare[len(self._open) :]
        if self._open.startswith(bare) and is_layout:
            self._held = text
            return ""
        self._state = _State.BEGUN if self._is_open else _State.OVER
        return text

    def _read_inside(self, text: str) -> str:
        text, self._held = self._held + text, ""
        at, marker = self._search.find(text)
        if marker:
            self._sink.add_reasoning(text[: at - layout_before(text, at)])
            self._state = _State.ENDED
            return text[at + len(marker) :]
        cut = self._search.held_from(text)
        self._sink.add_reasoning(text[:cut])
        self._held = text[cut:]
        return ""
