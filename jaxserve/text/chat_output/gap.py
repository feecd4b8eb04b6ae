"""Text between calls, up to the next marker."""

from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink

WHITESPACE: Final = " \t\r\n"
# Whitespace before a marker that is taken as layout; a longer run's beginning is content.
MAX_LAYOUT: Final = 64


class MarkerSearch:
    """Finds the first of some markers in a text that comes in pieces.

    Held back is only what could still be a marker, with the whitespace before it.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._firsts = {marker[0] for marker in markers}

    def find(self, text: str) -> tuple[int, str]:
        """Returns where the earliest marker begins, and which; (-1, "") where none is whole."""
        if self._firsts.isdisjoint(text):  # most pieces
            return -1, ""
        found = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        # of markers at one place the longest
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))

    def held_from(self, text: str) -> int:
        """Returns where the end begins that must be held back, in a text without a marker."""
        end = len(text)
        if self._firsts.isdisjoint(text):
            return end - layout_before(text, end)
        longest = max(map(len, self._markers), default=0) - 1
        cut = next(
            (
                start
                for start in range(max(end - longest, 0), end)
                if text[start] in self._firsts
                and any(marker.startswith(text[start:]) for marker in self._markers)
            ),
            end,
        )
        return cut - layout_before(text, cut)


def layout_before(text: str, end: int) -> int:
    """Returns how many characters of whitespace end there, at most MAX_LAYOUT."""
    if not end or text[end - 1] not in WHITESPACE:
        return 0
    start = max(end - MAX_LAYOUT, 0)
    return len(text[start:end]) - len(text[start:end].rstrip(WHITESPACE))


def split_whitespace(text: str) -> tuple[str, str]:
    """Returns the whitespace a text begins with, and the rest."""
    rest = text.lstrip(WHITESPACE)
    return text[: len(text) - len(rest)], rest


class Gap:
    """Gives text to the content, and stops at a marker.

    Whitespace beside a call is layout and is dropped: before a marker, and after a call where
    nothing else follows.

    Attributes:
      layout: the whitespace before the last marker that was found; where no call follows the
        marker after all, it is content too.
    """

    def __init__(self, sink: DeltaSink, markers: tuple[str, ...], *, is_after_call: bool) -> None:
        self._sink = sink
        self._search = MarkerSearch(markers)
        self._held = ""
        self._is_after_call = is_after_call
        self.layout = ""

    def push(self, text: str) -> tuple[str, str]:
        """Takes text; returns (the marker found or "", the text after it)."""
        text = self._held + text
        at, marker = self._search.find(text)
        cut = at - layout_before(text, at) if marker else self._search.held_from(text)
        self.layout = text[cut:at] if marker else ""
        self._held = "" if marker else text[cut:]
        self._give(text[:cut])
        return marker, text[at + len(marker) :] if marker else ""

    def flush(self) -> None:
        """The output is over: what was held is content, but for whitespace after a call."""
        held, self._held = self._held, ""
        if not (self._is_after_call and held.strip(WHITESPACE) == ""):
            self._give(held)

    def _give(self, text: str) -> None:
        if text:
            self._sink.add_content(text)
            self._is_after_call = False
