"""How many prompt tokens a step may take beside rows that decode, for a target between tokens."""

from typing import Final

from jaxserve.plan import StepLimits
from jaxserve.scheduler.running_set import RunningSet, is_ending
from jaxserve.scheduler.step_time import StepTimes, StepWork

SHARE_WITHIN: Final = 0.9  # of steps: a request is judged by its slow ones


class ChunkSize:
    """The largest with which nine of ten steps, by the step-time model, are within the target: of
    the maximum, its half, and so on.

    Never less than a tile, so that prompts go on whatever the target. A size whose program was
    never run counts as the next larger one that was, until it has run itself.
    """

    def __init__(self, target_s: float, times: StepTimes, limits: StepLimits) -> None:
        self._target_s = target_s
        self._times = times
        self._tile = limits.chunk_tile
        self._max_tokens = limits.max_chunk_tokens

    def find(self, running: RunningSet) -> int:
        """Returns the prompt tokens that a step may take, rounded up to tiles."""
        num_rows = longest = total = 0
        for sequence in running:
            if is_ending(sequence):
                continue
            num_tokens = sequence.num_tokens
            num_rows += sequence.num_owed == 1
            total += num_tokens
            longest = max(longest, num_tokens)
        if not num_rows:  # nobody waits for a next token
            return self._max_tokens
        work = StepWork(longest, total)
        size = self._max_tokens
        while size > self._tile and not self._is_within(num_rows, size, work):
            size = max(self._tile, size // 2 // self._tile * self._tile)
        return size

    def _is_within(self, num_rows: int, chunk_tokens: int, work: StepWork) -> bool:
        bucket = self._times.find_bucket(num_rows, chunk_tokens)
        seconds = None if bucket is None else self._times.predict(bucket, work)
        if bucket is None or seconds is None:
            return True
        return seconds * self._times.ratio_at(bucket, SHARE_WITHIN) <= self._target_s
