"""How many pages, and rows, it takes to go on, to start, and to keep what was promised."""

from collections.abc import Iterable
from typing import Literal

from jaxserve.request import Sequence
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.running_set import RunningSet, num_kept_rows


class PageNeeds:
    """Counts; takes nothing and changes nothing.

    Attributes:
      reserves_all: whether who starts takes all pages that it may ever write.
    """

    def __init__(
        self, pool: PagePool, running: RunningSet, *, reserve: Literal["on_demand", "max_length"]
    ) -> None:
        self._pool = pool
        self._running = running
        self.reserves_all = reserve == "max_length"

    def num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages to take before a running sequence's next tokens are written."""
        if self._pool.num_repeated_tokens and self.writes_shared(sequence):
            return 1  # only a choice just forked does, and its next token fits into that page
        return self._num_lacking(sequence, sequence.num_computed + num_tokens)

    def _num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self._pool.pages_for(num_tokens) - len(sequence.pages))

    def writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token belongs into a part-filled page that other choices read."""
        index, place = divmod(sequence.num_computed, self._pool.page_size)
        return place > 0 and self._pool.is_shared(sequence.pages[index])

    def num_promised(self, sequence: Sequence) -> int:
        """Pages that a running sequence and its forks will take for what they owe already."""
        num_own = self._num_lacking(sequence, sequence.num_tokens)
        if len(sequence.request.sequences) == 1:
            return num_own
        return num_own + self.writes_shared(sequence) + self._num_fork_pages(sequence)

    def _num_fork_pages(self, sequence: Sequence) -> int:
        """Pages that the choices to be forked will take: a copy of the prompt's last, if it is not
        full, or all that each may ever write behind the full ones."""
        num_forks = num_kept_rows(sequence)
        if not num_forks:
            return 0
        prompt_len, max_tokens = len(sequence.request.prompt), sequence.request.max_tokens
        num_full = prompt_len // self._pool.page_size
        if self.reserves_all:
            return num_forks * (self.num_to_hold(sequence) - num_full)
        return num_forks * (max_tokens > 1 and self._pool.pages_for(prompt_len) > num_full)

    def num_to_hold(self, sequence: Sequence) -> int:
        """Pages of a waiting sequence: for all it owes, or for all it may ever write."""
        num_tokens = sequence.num_tokens
        if self.reserves_all:
            request = sequence.request
            num_tokens = max(num_tokens, len(request.prompt) + request.max_tokens - 1)
        return self._pool.pages_for(num_tokens)

    def num_to_admit(self, sequence: Sequence) -> int:
        """Free pages it takes to start: its own, and after a preemption room for others to grow.

        A page for each runner and each time it happened: so it happens to nobody without end.
        """
        num_own = self.num_to_hold(sequence) + self._num_fork_pages(sequence)
        num_own = min(num_own, self._pool.num_usable)  # forks may have to wait for each other
        return num_own + sequence.num_preemptions * len(self._running)

    def num_coming(self, preempted: Iterable[Sequence] = ()) -> int:
        """Pages that are free, or will be once all in flight has retired.

        Args:
          preempted: who would be, for them.
        """
        leaving = [s.pages for s in (*self._running.find_ending(), *preempted)]
        return self._pool.num_free + self._pool.num_pending + self._pool.num_freed_by(leaving)

    def num_coming_rows(self, preempted: Iterable[Sequence] = ()) -> int:
        """Rows, likewise."""
        num_rows = self._running.num_free_rows + len(self._running.find_ending())
        return num_rows + sum(1 + num_kept_rows(sequence) for sequence in preempted)
