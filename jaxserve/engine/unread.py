"""Output that its reader has not taken yet: of one choice, and of all streams together."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Final, Protocol

from jaxserve.engine.events import ChoiceFinished
from jaxserve.plan import TokenLogprobs

TOKEN_BYTES: Final = 8  # of an unread token id, for the account
ENTRY_BYTES: Final = 64  # of a log-probability: an id, a number, and their places in a list


def logprobs_bytes(logprobs: Sequence[TokenLogprobs]) -> int:
    """Returns what unread log-probabilities count for."""
    return sum(ENTRY_BYTES * (1 + len(entry.top_ids)) for entry in logprobs)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Unread:
    """What one choice has for its reader. Guarded by the stream's lock, once it is handed over.

    Attributes:
      token_ids, logprobs, ready_s: in step; no logprobs where none are asked for.
      undecoded: those of the token ids whose text is the reader's to make.
      has_ended: nothing comes any more.
      end: of a choice that is not the last.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    ready_s: list[float] = dataclasses.field(default_factory=list)
    undecoded: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    has_ended: bool = False
    end: ChoiceFinished | None = None

    def add(self, more: "Unread") -> None:
        """Takes in what came behind it; no end is in either."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.ready_s += more.ready_s
        self.undecoded += more.undecoded
        self.texts += more.texts
        self.num_bytes += more.num_bytes


class Holder(Protocol):
    """Whose unread output is counted: a stream."""

    @property
    def num_unread_bytes(self) -> int: ...


class UnreadTotal[H: Holder]:
    """Bounds the unread bytes of all streams. The engine thread alone uses it.

    It is counted from above: what was unread at the last look, and all that was put since. Only
    when that is too much the streams are asked. One that nobody holds any more counts no longer,
    for its output has gone with it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._at_most = 0
        self._holders: weakref.WeakSet[H] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def watch(self, holder: H) -> None:
        """Counts a stream from now on."""
        self._holders.add(holder)

    def note(self, num_bytes: int) -> None:
        """So much was put."""
        self._at_most += num_bytes

    def find_largest(self) -> H | None:
        """Returns who has the most unread, where all have too much together; else None."""
        if self._at_most <= self._max_bytes:
            return None
        sizes = [(holder.num_unread_bytes, holder) for holder in self._holders]
        self._at_most = sum(size for size, _ in sizes)
        if self._at_most <= self._max_bytes:
            return None
        return max(sizes, key=lambda entry: entry[0])[1]
