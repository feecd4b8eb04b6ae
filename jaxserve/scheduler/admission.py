"""Whether a request can still meet its deadline, by the step-time model."""

import dataclasses
from collections.abc import Sequence as Sequences
from typing import Final

from jaxserve.plan import StepLimits
from jaxserve.request import Request, Sequence
from jaxserve.scheduler.running_set import RunningSet, is_ending
from jaxserve.scheduler.step_time import StepTimes, StepWork

SMOOTHING: Final = 0.05  # that one request's or step's figure counts


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Estimate:
    """When a request would start, have its first token and its last, seconds from now."""

    start_s: float
    first_s: float
    last_s: float


class Admission:
    """Foresees what becomes of a request if nobody comes before it that is not here yet.

    Outputs are taken to be as long, by what they may be, as those that ended lately. All of it
    costs what there is to look at: who waits before it, and who runs.
    """

    def __init__(self, times: StepTimes, running: RunningSet, limits: StepLimits) -> None:
        self._times = times
        self._running = running
        self._limits = limits
        self._used_share = 1.0  # smoothed: tokens that outputs had, by those they might have had
        self._step_s = 0.0  # smoothed

    def note_step(self, seconds: float) -> None:
        self._step_s += SMOOTHING * (seconds - self._step_s) if self._step_s else seconds

    def note_end(self, sequence: Sequence) -> None:
        """An output has ended by itself."""
        max_tokens = sequence.request.max_tokens
        if max_tokens:
            share = len(sequence.output) / max_tokens
            self._used_share += SMOOTHING * (share - self._used_share)

    def estimate(self, request: Request, ahead: Sequences[Sequence]) -> Estimate | None:
        """Returns what becomes of a request that waits; None while nothing is known of steps.

        Args:
          ahead: who waits and comes before it.
        """
        num_rows = min(self._running.num_rows, len(self._running) + len(ahead) + 1)
        chunk_tokens = self._limits.max_chunk_tokens
        longest = max((s.num_tokens for s in self._running), default=len(request.prompt))
        decode_s = self._predict(num_rows, 0, longest)
        chunk_s = self._predict(num_rows, chunk_tokens, longest)
        if decode_s is None or chunk_s is None:
            return None
        decode_s = max(decode_s, self._step_s if num_rows > 1 else 0.0)
        chunk_s = max(chunk_s, decode_s)
        owed = sum(s.num_owed for s in (*self._running, *ahead) if s.num_owed > 1)
        num_chunk_steps = owed / chunk_tokens
        start_s = self._count_steps(ahead) * decode_s + num_chunk_steps * (chunk_s - decode_s)
        # its first chunk runs behind the step that is launched already
        num_own_steps = 1 + -(-len(request.prompt) // chunk_tokens)
        first_s = start_s + num_own_steps * chunk_s
        num_tokens = max(1.0, request.max_tokens * self._used_share)
        return Estimate(
            start_s=start_s, first_s=first_s, last_s=first_s + (num_tokens - 1) * decode_s
        )

    def late_by_s(self, request: Request, ahead: Sequences[Sequence], now_s: float) -> float:
        """Returns by how much a request would miss what is due of it; 0 where it would not."""
        found = self.estimate(request, ahead)
        if found is None:
            return 0.0
        late_s = 0.0
        if request.queue_deadline_s is not None:
            late_s = now_s + found.first_s - request.queue_deadline_s
        if request.deadline_s is not None:
            late_s = max(late_s, now_s + found.last_s - request.deadline_s)
        return max(late_s, 0.0)

    def _count_steps(self, ahead: Sequences[Sequence]) -> float:
        """Returns the steps until a row is free behind those ahead: the first rows to come free
        are theirs; beyond those that run now, all rows are taken to be busy until then."""
        num_wanted = len(ahead) + 1 - self._running.num_free_rows
        if num_wanted <= 0:
            return 0.0
        left = sorted(map(self._num_left, self._running))
        if num_wanted <= len(left):
            return left[num_wanted - 1]
        num_more = num_wanted - len(left)
        rest = sum(left) + sum(map(self._num_left, ahead[:num_more]))
        return rest / self._running.num_rows

    def _num_left(self, sequence: Sequence) -> float:
        """Returns tokens that a sequence will still have."""
        if is_ending(sequence):
            return 1.0
        num_done = len(sequence.output) + sequence.num_in_flight
        return max(1.0, sequence.request.max_tokens * self._used_share - num_done)

    def _predict(self, num_rows: int, chunk_tokens: int, longest: int) -> float | None:
        bucket = self._times.find_bucket(num_rows, chunk_tokens)
        if bucket is None:
            return None
        return self._times.predict(bucket, StepWork(longest, longest * num_rows))
