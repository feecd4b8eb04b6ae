"""Those that decode and need nothing but their next token, planned all at once."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from jaxserve.plan import NO_DECODES, Decodes
from jaxserve.request import Sequence

NOBODY: Final = 0  # in `_until_B`


class DecodeTable:
    """By state row: a running sequence's next position, and the one at which something else is due
    to it: a page, or its last token. Until then its tokens are planned without a look at anything
    else of it.

    ``B`` is the number of rows, ``N`` of those whose next token is planned. All that is planned of
    who is here is planned here; otherwise it must leave.
    """

    def __init__(self, num_rows: int, *, page_size: int) -> None:
        self._page_size = page_size
        self._sequences_B = np.full(num_rows, None, object)
        self._starts_B = np.zeros(num_rows, np.int32)
        self._until_B = np.full(num_rows, NOBODY, np.int32)
        self._page_ends_B = np.zeros(num_rows, np.int32)
        self._prompt_lens_B = np.zeros(num_rows, np.int32)
        self._is_masked_B = np.zeros(num_rows, bool)

    def enter(self, sequence: Sequence) -> None:
        """One that is followed was planned a token that it decodes alone: it is here from the next
        one on, as far as its pages and its `max_tokens` go.

        Not after a preemption: at each of its tokens pages may be due to come back.
        """
        row, prompt_len = sequence.row, len(sequence.request.prompt)
        assert row is not None
        page_end = len(sequence.pages) * self._page_size
        until = min(page_end, prompt_len + sequence.request.max_tokens - 2)
        if sequence.num_preemptions or sequence.num_computed >= until:
            return
        self._sequences_B[row] = sequence
        self._starts_B[row] = sequence.num_computed
        self._until_B[row] = until
        self._page_ends_B[row] = page_end
        self._prompt_lens_B[row] = prompt_len
        self._is_masked_B[row] = sequence.request.is_masked

    def leave(self, row: int) -> None:
        """Twice is as once."""
        self._sequences_B[row] = None
        self._until_B[row] = NOBODY

    def clear(self) -> None:
        """Has all leave."""
        self._sequences_B[:] = None
        self._until_B[:] = NOBODY

    def find_ready(self) -> np.ndarray:
        """Returns the rows to which nothing is due but their next token, ``rows_N``."""
        return np.flatnonzero(self._starts_B < self._until_B).astype(np.int32)

    def take(self, rows_N: np.ndarray, step_id: int) -> Decodes:
        """Plans the next token of each, and moves them on."""
        if not len(rows_N):
            return NO_DECODES
        sequences: list[Sequence] = self._sequences_B[rows_N].tolist()
        for sequence in sequences:
            sequence.num_computed += 1
            sequence.num_in_flight += 1
            sequence.last_step = step_id
        starts_N = self._starts_B[rows_N]
        self._starts_B[rows_N] += 1
        return Decodes(
            sequence_ids=[sequence.id for sequence in sequences],
            rows_N=rows_N,
            starts_N=starts_N,
            prompt_lens_N=self._prompt_lens_B[rows_N],
            is_masked_N=self._is_masked_B[rows_N],
        )

    def sequences_of(self, decodes: Decodes) -> list[Sequence]:
        """Returns the sequences of what was just taken."""
        sequences: list[Sequence] = self._sequences_B[decodes.rows_N].tolist()
        return sequences

    def num_full(self, decodes: Decodes) -> int:
        """Returns how many of what was just taken fill the last page they have."""
        is_full_N = decodes.starts_N + 1 == self._page_ends_B[decodes.rows_N]
        return int(np.count_nonzero(is_full_N))

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts that who is here runs, and is as far as it is said to be."""
        by_row = {sequence.row: sequence for sequence in running}
        held = {row for row, other in enumerate(self._sequences_B.tolist()) if other is not None}
        assert by_row.keys() >= held, f"of rows {held} not all run"
        for row in self.find_ready().tolist():
            sequence = by_row[row]
            assert self._sequences_B[row] is sequence, f"row {row} is another's: {sequence}"
            assert sequence.num_computed == self._starts_B[row], f"{sequence} is elsewhere"
            assert sequence.num_owed == 1, f"{sequence} does not decode"
