"""Who of those that wait starts before its turn, because more of its prompt is in the cache."""

from typing import Final

from jaxserve.metrics import Metrics
from jaxserve.request import Sequence
from jaxserve.scheduler.prefix_reuse import PrefixReuse
from jaxserve.scheduler.waiting_queue import WaitingQueue

WINDOW: Final = 16  # that wait and are looked at


class PrefixOrder:
    """Of the first few that wait and are of one class (and tenant, where tenants count), whoever
    has most of its tokens in the cache comes first; of equals the first in the policy's order.

    Nobody is overtaken more often than the bound: behind one that was, nobody is looked at. Who has
    run already, and gave its pages up, is not overtaken at all.
    """

    def __init__(
        self, waiting: WaitingQueue, reuse: PrefixReuse, *, max_overtakes: int, metrics: Metrics
    ) -> None:
        self._waiting = waiting
        self._reuse = reuse
        self._max_overtakes = max_overtakes
        self._metrics = metrics

    def find_first(self) -> Sequence | None:
        """Returns the sequence to start next."""
        window = self._find_window()
        if len(window) < 2:
            return window[0] if window else None
        return max(window, key=lambda s: (self._reuse.find(s).num_tokens, -window.index(s)))

    def note_start(self, sequence: Sequence) -> None:
        """A sequence is about to start: counts whom it overtakes."""
        window = self._find_window()
        if sequence not in window:
            return
        overtaken = window[: window.index(sequence)]
        for other in overtaken:
            other.num_overtaken += 1
        if overtaken:
            self._metrics.reordered_starts.inc()

    def _find_window(self) -> list[Sequence]:
        """Returns those that may be next, in the policy's order."""
        found: list[Sequence] = []
        for sequence in self._waiting.find_front(WINDOW):
            if found and sequence.request.priority != found[0].request.priority:
                break
            found.append(sequence)
            if sequence.num_preemptions or sequence.num_overtaken >= self._max_overtakes:
                break
        return found
