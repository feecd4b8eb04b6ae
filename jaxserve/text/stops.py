"""Finds stop strings in text that arrives in pieces."""

from typing import NamedTuple


class StopOutput(NamedTuple):
    """What one push released.

    Attributes:
      text: text that may be delivered now.
      matched: the stop string that ended the output, or None.
    """

    text: str
    matched: str | None = None


class StopMatcher:
    """Cuts a text at the first stop string, however the text is split into pieces.

    The match that is *complete* first wins, and of those complete at the same character the
    longest: with stops "ab" and "abc" the text "abc" ends at "ab", with "bc" and "abc" it ends at
    "abc". So the result never depends on text that was not needed to stop. Held back is only the
    longest suffix that is a proper prefix of some stop.

    Each stop is followed by a Knuth–Morris–Pratt automaton, so a character costs amortised
    constant time for each stop.
    """

    def __init__(self, stop_strings: tuple[str, ...], include_stop_text: bool = False) -> None:
        """`stop_strings` are not empty strings; none at all is allowed."""
        assert all(stop_strings), "an empty stop string is refused at submit"
        # Longest first: of stops complete at one character the first found is the longest.
        self._stops = sorted(set(stop_strings), key=lambda stop: (-len(stop), stop))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include_stop_text = include_stop_text
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopOutput:
        """Take the next piece; returns what is safe to deliver. After a match nothing is."""
        if self._matched is not None:
            return StopOutput("", self._matched)
        if not self._held and self._firsts.isdisjoint(text):
            return StopOutput(text)  # as nearly always
        for index, char in enumerate(text):
            complete = self._advance(char)
            if complete is not None:
                return self._cut(self._held + text[: index + 1], complete)
        return StopOutput(self._release(text))

    def push_unmatched(self, text: str) -> str:
        """Take a piece in which no stop may end, because of `min_tokens`; returns what is safe.

        A stop that begins here can still be completed by a later `push`.
        """
        for char in text:
            self._advance(char)
        return self._release(text)

    def flush(self) -> str:
        """Returns the text still held: at the end no stop can be completed any more."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; returns the longest stop that is now complete."""
        complete = None
        for i, stop in enumerate(self._stops):
            state, failure = self._states[i], self._failures[i]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                complete = complete or stop
                state = failure[state - 1]  # only goes on where the match may not count
            self._states[i] = state
        return complete

    def _release(self, text: str) -> str:
        text = self._held + text
        cut = len(text) - max(self._states, default=0)
        self._held = text[cut:]
        return text[:cut]

    def _cut(self, text: str, stop: str) -> StopOutput:
        self._held, self._matched = "", stop
        return StopOutput(text if self._include_stop_text else text[: len(text) - len(stop)], stop)


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix.

    "abab" → [0, 0, 1, 2]. Knuth, Morris, Pratt 1977, section 2.
    """
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
