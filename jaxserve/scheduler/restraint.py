"""What tenants that are ahead leave to others, before those ask for it."""

from typing import Final

from jaxserve.plan import StepLimits
from jaxserve.request import Sequence
from jaxserve.scheduler.fair_shares import FairShares
from jaxserve.scheduler.running_set import RunningSet, num_kept_rows
from jaxserve.scheduler.step_builder import StepBuilder

KEPT_ROWS: Final = 4  # one row in so many is kept free
CHUNK_SHARE: Final = 2  # their prompts have one token in so many of the largest chunk


class Restraint:
    """While another tenant is present, one that is ahead starts nothing in the last free rows, so
    that nobody has to be preempted for who comes next, and its prompts have part of a step only, so
    that who comes waits for short steps.

    It never stops anybody for ever: a row is kept only while something runs, and a step takes some
    prompt of those ahead if it takes no other.
    """

    def __init__(
        self,
        running: RunningSet,
        shares: FairShares | None,
        limits: StepLimits,
        *,
        may_split: bool,
    ) -> None:
        self._running = running
        self._shares = shares
        self._num_rows = running.num_rows // KEPT_ROWS
        tile = limits.chunk_tile
        share = limits.max_chunk_tokens // CHUNK_SHARE // tile * tile
        self._max_tokens = max(share, tile) if may_split else limits.max_chunk_tokens
        self._tile = tile

    def num_rows_left(self, sequence: Sequence, step: StepBuilder) -> int:
        """Returns how many rows a waiting sequence has to leave free."""
        if sequence is step.made_room_for or not self._is_ahead(sequence):
            return 0
        most = self._running.num_rows - 1 - num_kept_rows(sequence)
        return min(self._num_rows, most)

    def limit_tokens(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> int:
        """Returns how many of a sequence's next tokens the step still takes of who is ahead."""
        if num_tokens < 2 or not self._is_ahead(sequence):
            return num_tokens
        num_left = max(0, self._max_tokens - step.num_restrained)
        return min(num_tokens, num_left) if num_left > 1 else 0

    def count(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> None:
        """A step takes some of a sequence's tokens."""
        if num_tokens > 1 and self._is_ahead(sequence):
            step.num_restrained += -(-num_tokens // self._tile) * self._tile

    def _is_ahead(self, sequence: Sequence) -> bool:
        return self._shares is not None and self._shares.is_ahead(sequence.request.tenant)
