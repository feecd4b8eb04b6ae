"""Whether a request can still meet its deadline, by the step-time model."""

import collections
import dataclasses
from collections.abc import Sequence as Sequences
from typing import Final, Literal, NamedTuple

from jaxserve.plan import StepLimits, StepPlan
from jaxserve.request import Request, Sequence
from jaxserve.scheduler.chunk_size import ChunkSize
from jaxserve.scheduler.running_set import RunningSet
from jaxserve.scheduler.step_time import StepTimes, StepWork, measure_work

SMOOTHING: Final = 0.05  # that one request's or step's figure counts
PROBE: Final = 16  # requests that an idle machine refuses in a row before it tries one


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Estimate:
    """When a request would have its first token and its last, seconds from now."""

    first_s: float
    last_s: float


class Miss(NamedTuple):
    """What of a request would be late, by its field, and by how many seconds."""

    field: Literal["deadline", "queue_timeout"]
    late_s: float


class Admission:
    """Foresees what becomes of a request if nobody comes before it that is not here yet.

    A step planned now runs behind those that are launched. Until a row is free steps have no prompt
    but those of who comes before; then it has its own chunks, behind theirs.

    Outputs are taken to be as long, by what they may be, as those that ended lately. All of it
    costs what there is to look at: who waits before it, and who runs.
    """

    def __init__(
        self,
        times: StepTimes,
        running: RunningSet,
        limits: StepLimits,
        *,
        chunk_size: ChunkSize | None,
    ) -> None:
        """Args:
        chunk_size: what bounds the prompt tokens of a step beside the limits; None is nothing.
        """
        self._times = times
        self._running = running
        self._limits = limits
        self._chunk_size = chunk_size
        self._used_share = 1.0  # smoothed: tokens that outputs had, by those they might have had
        self._step_s = 0.0  # smoothed
        self._launched_s: collections.deque[float] = collections.deque()  # foreseen, oldest first
        self._began_s = 0.0  # when the oldest of them began
        self._num_refused = 0  # in a row, while nothing ran
        self._probe: Request | None = None  # the last that was let in though it would be late

    def note_plan(self, plan: StepPlan, now_s: float) -> None:
        """A step is launched."""
        tile = self._limits.chunk_tile
        tiles = sum(-(-chunk.num_tokens // tile) for chunk in plan.longer)
        if not self._launched_s:
            self._began_s = now_s
        self._launched_s.append(
            self._predict(plan.num_rows, tiles * tile, measure_work(plan)) or 0.0
        )

    def note_result(self, now_s: float | None) -> None:
        """The oldest step's result was read; None where nobody looked at the clock."""
        self._launched_s.popleft()
        self._began_s = self._began_s if now_s is None else now_s

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self._step_s += SMOOTHING * (seconds - self._step_s) if self._step_s else seconds

    def note_end(self, sequence: Sequence) -> None:
        """An output has ended by itself."""
        max_tokens = sequence.request.max_tokens
        if max_tokens:
            share = len(sequence.output) / max_tokens
            self._used_share += SMOOTHING * (share - self._used_share)

    def find_miss(self, request: Request, ahead: Sequences[Sequence], now_s: float) -> Miss | None:
        """Returns what of a request would be late, and the most where both are; None where nothing
        would, or where it is let in to see whether that is still so.

        Args:
          ahead: who waits and comes before it.
        """
        found = self.estimate(request, ahead, now_s)
        if found is None:
            return None
        misses: list[Miss] = []
        if request.queue_deadline_s is not None:
            misses.append(Miss("queue_timeout", now_s + found.first_s - request.queue_deadline_s))
        if request.deadline_s is not None:
            misses.append(Miss("deadline", now_s + found.last_s - request.deadline_s))
        worst = max(misses, key=lambda miss: miss.late_s, default=None)
        if worst is None or worst.late_s <= 0.0 or self._is_probe(request, ahead):
            return None
        return worst

    def estimate(
        self, request: Request, ahead: Sequences[Sequence], now_s: float
    ) -> Estimate | None:
        """Returns what becomes of a request that waits; None while nothing is known of steps."""
        running, tile = self._running, self._limits.chunk_tile
        num_rows = min(running.num_rows, len(running) + len(ahead) + 1)
        longest = max((s.num_tokens for s in running), default=0)
        longest = max(longest, len(request.prompt))
        work = StepWork(longest, longest * num_rows)
        size = self._find_chunk_size()
        owed = sum(_round(s.num_owed, tile) for s in (*running, *ahead) if s.num_owed > 1)
        owed += _round(len(request.prompt), tile)
        decode_s = self._predict(num_rows, 0, work)
        chunk_s = self._predict(num_rows, min(owed, size), work)
        if decode_s is None or chunk_s is None:
            return None
        num_chunk_steps = -(-owed // size)
        num_own = -(-len(request.prompt) // size)
        num_steps = max(self._count_steps(ahead) + num_own, num_chunk_steps)
        first_s = self._left_s(now_s) + num_steps * decode_s
        first_s += num_chunk_steps * max(0.0, chunk_s - decode_s)
        num_more = max(1.0, request.max_tokens * self._used_share) - 1
        step_s = max(decode_s, self._step_s if num_rows > 1 else 0.0)
        return Estimate(first_s=first_s, last_s=first_s + num_more * step_s)

    def _left_s(self, now_s: float) -> float:
        """Returns how long the steps that are launched still take."""
        if not self._launched_s:
            return 0.0
        return max(sum(self._launched_s) - (now_s - self._began_s), 0.0)

    def _count_steps(self, ahead: Sequences[Sequence]) -> float:
        """Returns the steps until a row is free behind those ahead: the first rows to come free
        are theirs; beyond those that run now, all rows are taken to be busy until then."""
        num_wanted = len(ahead) + 1 - self._running.num_free_rows
        if num_wanted <= 0:
            return 0.0
        left = sorted(map(self._num_left, self._running))
        # a row comes free with the result of its last step, that is behind those launched before
        if num_wanted <= len(left):
            return left[num_wanted - 1] + len(self._launched_s)
        num_more = num_wanted - len(left)
        rest = sum(left) + sum(map(self._num_left, ahead[:num_more]))
        return rest / self._running.num_rows + len(self._launched_s)

    def _num_left(self, sequence: Sequence) -> float:
        """Returns the tokens of a sequence that are in no step yet."""
        num_done = len(sequence.output) + sequence.num_in_flight
        return max(0.0, sequence.request.max_tokens * self._used_share - num_done)

    def _find_chunk_size(self) -> int:
        """Returns the prompt tokens of a step."""
        if self._chunk_size is None:
            return self._limits.max_chunk_tokens
        return self._chunk_size.find(self._running)

    def _predict(self, num_rows: int, chunk_tokens: int, work: StepWork) -> float | None:
        bucket = self._times.find_bucket(num_rows, chunk_tokens)
        return None if bucket is None else self._times.predict(bucket, work)

    def _is_probe(self, request: Request, ahead: Sequences[Sequence]) -> bool:
        """Whether a request is let in though it would be late: a machine that does nothing learns
        nothing, and might refuse everybody for ever for once having been slow."""
        if self._running or self._launched_s or ahead:
            self._num_refused = 0
        elif request is not self._probe:
            self._num_refused += 1
            if self._num_refused == PROBE:
                self._num_refused, self._probe = 0, request
        return request is self._probe


def _round(num_tokens: int, tile: int) -> int:
    return -(-num_tokens // tile) * tile
