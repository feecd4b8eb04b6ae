"""The sequences that hold a state row and pages, in the order in which they are paid."""

import bisect
from collections.abc import Iterator

from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.decode_table import DecodeTable
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import OrderOf


class RunningSet:
    """In the policy's order. Who is in it has a row; leaving it gives row and pages up.

    Rows are kept for the choices that will be forked from who is in it.

    Attributes:
      num_rows: the most that can be in it.
      decodes: those of them that need nothing but their next token.
    """

    def __init__(self, pool: PagePool, *, num_rows: int, order: OrderOf) -> None:
        self.num_rows = num_rows
        self.decodes = DecodeTable(num_rows, page_size=pool.page_size)
        self._order = order
        self._pool = pool
        self._sequences: list[Sequence] = []
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._families: dict[int, Sequence] = {}  # those of requests with several choices

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has and none is kept for."""
        if not self._free_rows:
            return 0
        return len(self._free_rows) - sum(map(num_kept_rows, self._families.values()))

    def start(self, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()
        sequence.state = SequenceState.RUNNING
        bisect.insort(self._sequences, sequence, key=self._order)
        if len(sequence.request.sequences) > 1:
            self._families[sequence.id] = sequence

    def stop(self, sequence: Sequence) -> None:
        """Takes row and pages back; a step in flight may still use them, and keeps its pages."""
        assert sequence.row is not None
        place = bisect.bisect_left(self._sequences, self._order(sequence), key=self._order)
        assert self._sequences.pop(place) is sequence, f"sequence {sequence.id} is out of order"
        self._families.pop(sequence.id, None)
        self.decodes.leave(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row = None
        self._pool.release(reversed(sequence.pages), last_step=sequence.last_step)
        sequence.pages.clear()
        sequence.num_computed = 0

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step that a sequence is in, or was in before it was preempted, has not retired
        yet."""
        return sequence.last_step > self._pool.retired_step

    def find_ending(self) -> list[Sequence]:
        """Returns those whose rows and pages come free with the steps in flight."""
        return [sequence for sequence in self._sequences if is_ending(sequence)]

    def check(self) -> None:
        """Asserts that every row is in one place, and the pool's pages are in these tables."""
        self._pool.check([sequence.pages for sequence in self._sequences])
        rows = [sequence.row for sequence in self._sequences] + self._free_rows
        assert len(set(rows)) == len(rows), f"a row twice: {rows}"
        assert None not in rows, f"running without a row: {rows}"
        num_kept = sum(num_kept_rows(sequence) for sequence in self._sequences)
        assert len(self._free_rows) - num_kept == self.num_free_rows or not self._free_rows
        self.decodes.check(self._sequences)
        assert num_kept <= len(self._free_rows), "rows that are kept for forks were given away"
        assert self._sequences == sorted(self._sequences, key=self._order), (
            "running is out of order"
        )


def is_ending(sequence: Sequence) -> bool:
    """Whether the steps in flight bring the last that it may have; nothing is left to plan."""
    max_tokens = sequence.request.max_tokens
    if not max_tokens:
        return sequence.num_owed == 0
    return len(sequence.output) + sequence.num_in_flight >= max_tokens


def find_unforked(sequence: Sequence) -> list[Sequence]:
    """Returns the choices that will begin where this one has computed the prompt."""
    siblings = sequence.request.sequences
    if len(siblings) == 1 or sequence.output or sequence.num_in_flight:
        return []
    return [s for s in siblings if s.state is SequenceState.UNFORKED]


def num_kept_rows(sequence: Sequence) -> int:
    """Returns how many rows are kept for forks of a sequence; none where nothing is sampled."""
    if len(sequence.request.sequences) == 1:
        return 0
    return len(find_unforked(sequence)) if sequence.request.max_tokens else 0
