"""Requests from the queue to their end: what a step is to do, and what came of it."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidRequestError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan, StepResult
from jaxserve.request import Request, Sequence, SequenceState
from jaxserve.scheduler.admission import Admission, Miss
from jaxserve.scheduler.deadlines import Deadlines, is_ended
from jaxserve.scheduler.live_set import LiveSet
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.planner import Planner
from jaxserve.scheduler.running_set import find_unforked
from jaxserve.scheduler.settlement import Settlement, Update
from jaxserve.scheduler.step_time import StepTimes, measure_work


def _weigh_alike(tenant: str) -> float:
    return 1.0


class Scheduler:
    """Pays owed tokens: a sequence owes what it has but has not computed, and a step pays some.

    There is no prefill and no decode in here: a prompt owes many tokens, a decoding sequence one,
    a preempted one all of its prompt and output again (the idea is vLLM v1's). A token sampled by a
    step in flight is a placeholder: it counts, though only the device knows its value.

    The clock is an argument, and there are no threads: all but `check_fits` and the counts belong
    to one thread.
    """

    def __init__(
        self,
        *,
        config: SchedulerSection,
        reserve: Literal["on_demand", "max_length"],
        pool: PagePool,
        limits: StepLimits,
        max_model_tokens: int,
        overlap_depth: int,
        metrics: Metrics,
        page_bytes: int = 0,
        step_times: StepTimes | None = None,
        weight_of: Callable[[str], float] = _weigh_alike,
    ) -> None:
        """Args:
          overlap_depth: launched steps that may wait for their commit; 1 is no overlap.
          page_bytes: size of a page over all layers, for the gauges.
          step_times: what is known of them already.
          weight_of: a tenant's share by that of others; asked again each time.

        Raises:
          ConfigError: a step is too small for a prompt.
        """
        self.step_times = StepTimes() if step_times is None else step_times
        self._planner = Planner(
            config=config,
            reserve=reserve,
            pool=pool,
            limits=limits,
            max_model_tokens=max_model_tokens,
            metrics=metrics,
            weight_of=weight_of,
            step_times=self.step_times,
        )
        self._waiting = self._planner.waiting
        self._running = self._planner.running
        self._reuse = self._planner.reuse
        self._pool = pool
        self._reserves_all = reserve == "max_length"
        self._max_model_tokens = max_model_tokens
        self._overlap_depth = overlap_depth
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._admission = (
            Admission(self.step_times, self._running, limits, chunk_size=self._planner.chunk_size)
            if config.policy == "edf"
            else None
        )
        self._new: list[Request] = []  # with edf: whose deadlines nobody has looked at
        self._planned_s: dict[int, float] = {}  # of steps in flight
        self._read_s = -math.inf  # when the last result was
        self._deadlines = Deadlines()
        self._live = LiveSet()
        self._settlement = Settlement(
            self._live, pool=pool, reuse=self._reuse, admission=self._admission, metrics=metrics
        )
        metrics.kv_capacity_tokens.set(pool.capacity_tokens)

    @property
    def num_waiting(self) -> int:
        """Requests none of whose choices runs."""
        return self._live.num_requests - self.num_running

    @property
    def num_running(self) -> int:
        """Requests one of whose choices runs."""
        return len({sequence.request for sequence in self._running})

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue, those of preempted choices too."""
        return self._waiting.num_prompt_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def check_fits(self, prompt_len: int, max_tokens: int, num_choices: int = 1) -> None:
        """Refuses what could never run. Any thread may call it.

        All of prompt and output is counted, though the last token's K/V is never written: exactly
        full is allowed, and what is advertised as capacity is what fits.

        Raises:
          InvalidRequestError: prompt and output are longer than the context or the pool, or the
            choices are more than can run together.
        """
        total = prompt_len + max_tokens
        capacity = self._pool.capacity_tokens
        limit = min(self._max_model_tokens, capacity)
        if total > limit:
            what = "this model's context" if limit == self._max_model_tokens else "the KV pool"
            raise InvalidRequestError(
                f"prompt ({prompt_len}) + max_tokens ({max_tokens}) is {total} tokens, but {what} "
                f"holds {limit}; shorten the prompt or lower max_tokens",
                field="max_tokens" if prompt_len < limit else "prompt",
            )
        if num_choices > self._running.num_rows:
            raise InvalidRequestError(
                f"n is {num_choices}, but {self._running.num_rows} sequences run at once; lower n "
                "to that",
                field="sampling.n",
            )
        num_full = prompt_len // self._pool.page_size
        num_pages = num_full + num_choices * (self._pool.pages_for(total) - num_full)
        if self._reserves_all and num_pages > self._pool.num_usable:
            raise InvalidRequestError(
                f"n is {num_choices}, which takes {num_pages} KV pages of {self._pool.num_usable} "
                "as kv.reserve is max_length; lower n or max_tokens",
                field="sampling.n",
            )

    def add(self, request: Request) -> None:
        """Queues a request that `check_fits` has let through, and makes its sequences, one for each
        choice. The first waits; the others begin where it has computed the prompt."""
        self._live.add(request)
        self._waiting.add(request.sequences[0])
        self._deadlines.add(request)
        if self._admission is not None:
            self._new.append(request)

    def expired(self, now_s: float) -> list[Request]:
        """Returns, once, the requests that are late; the engine finishes each of them.

        To be called with the same time before `schedule`, which admits nobody who is late.
        """
        return self._deadlines.pop_expired(now_s)

    def unreachable(self, now_s: float) -> list[tuple[Request, Miss]]:
        """Returns, once, the requests that cannot meet what is due of them, and what they would
        miss; the engine finishes each of them before `schedule`. With policy edf each
        new one is looked at, and who is to start next, while no token of it was computed.
        """
        if self._admission is None:
            return []
        found: list[tuple[Request, Miss]] = []
        new, self._new = self._new, []
        for request in new:
            first = request.sequences[0]
            if first.state is not SequenceState.WAITING:
                continue
            ahead = self._waiting.find_before(first)
            if miss := self._admission.find_miss(request, ahead, now_s):
                found.append((request, miss))
                self.finish(request)
        while (next_up := self._waiting.find_first()) and not next_up.last_step:
            miss = self._admission.find_miss(next_up.request, (), now_s)
            if miss is None:
                break
            found.append((next_up.request, miss))
            self.finish(next_up.request)
        return found

    def finish(self, request: Request) -> None:
        """Ends what is left of a request, in any state, and takes back its rows and pages. Twice is
        as once."""
        for sequence in reversed(request.sequences):  # nobody follows a choice that ends
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends one choice, in any state, and takes back its row and pages; the request's others go
        on. With the last of them the request has ended. Twice is as once."""
        if sequence.state is SequenceState.FINISHED:
            return
        unforked = find_unforked(sequence) if sequence.state is not SequenceState.UNFORKED else []
        match sequence.state:
            case SequenceState.RUNNING:
                self._running.stop(sequence)
            case SequenceState.WAITING:
                self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._reuse.leave(sequence, is_in_flight=self._running.is_in_flight(sequence))
        sequence.num_in_flight = 0
        self._live.remove(sequence)
        if unforked:  # the next choice computes the prompt
            unforked[0].state = SequenceState.WAITING
            unforked[0].last_step = sequence.last_step  # scores may be in flight
            self._waiting.add(unforked[0])
        if is_ended(sequence.request):
            self._deadlines.trim(self._live.num_requests)

    def preempt(self, request: Request) -> None:
        """Takes rows and pages of a request's running choices back; each is recomputed from its
        first token."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.RUNNING:
                self._planner.preemption.preempt(sequence)

    def schedule(self, now_s: float) -> StepPlan:
        """Returns the next step's work; without work where there is none, or it must wait.

        Args:
          now_s: monotonic; who is late by now is not admitted.
        """
        in_flight = self._planner.num_in_flight
        assert in_flight < self._overlap_depth, f"{in_flight} steps are in flight already"
        assert not self._live.ended, (
            f"sequences {self._live.ended} have ended and were not finished"
        )
        plan = self._planner.plan(now_s)
        if plan.has_work:
            self._planned_s[plan.step_id] = now_s
            if self._admission is not None:
                self._admission.note_plan(plan, now_s)
        return plan

    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        stopped: Collection[int] = (),
        *,
        now_s: float | None = None,
    ) -> list[Update]:
        """Takes in a step's result, in launch order, and returns what is new for live sequences.

        An update's request may have ended through one before it: the engine looks.

        Args:
          stopped: ids of sequences whose text ended with this token (a stop string).
          now_s: when the result was read; None times nothing.
        """
        self._planner.retire(plan.step_id)
        planned_s = self._planned_s.pop(plan.step_id)
        if self._admission is not None:
            self._admission.note_result(now_s)
        if now_s is not None:
            self._time_step(plan, result, seconds=now_s - max(planned_s, self._read_s))
            self._read_s = now_s
        updates = self._settlement.settle(plan, result, stopped, now_s=now_s or 0.0)
        self._reuse.retire(plan.step_id)
        return updates

    @property
    def followed_gaps(self) -> Mapping[float, int]:
        """See `Settlement`; of the last commit."""
        return self._settlement.followed_gaps

    def update_gauges(self, num_new: int = 0, num_new_tokens: int = 0) -> None:
        """Sets the levels: queue, rows, and bytes of K/V.

        Args:
          num_new: requests on their way here, which wait too.
          num_new_tokens: of their prompts.
        """
        metrics, pool = self._metrics, self._pool
        num_running = self.num_running
        metrics.requests_running.set(num_running)
        metrics.requests_waiting.set(self._live.num_requests - num_running + num_new)
        metrics.waiting_tokens.set(self.waiting_tokens + num_new_tokens)
        metrics.kv_usage.set(1 - pool.num_free / pool.num_usable)
        num_used = sum([sequence.num_computed for sequence in self._running])
        reserved = pool.num_held * self._page_bytes
        used = (num_used - pool.num_repeated_tokens) * self._page_bytes / pool.page_size
        metrics.kv_reserved_bytes.set(reserved)
        metrics.kv_used_bytes.set(used)
        metrics.kv_stranded_bytes.set(reserved - used)

    def check(self) -> None:
        """Asserts that every page and row is in exactly one place, and the queues agree."""
        self._running.check()
        self._reuse.check(set(self._live.sequences))
        self._live.check()
        num_known = len(self._running) + len(self._waiting) + len(self._live.find_unforked())
        assert len(self._live.sequences) == num_known, "a sequence is lost"

    def _time_step(self, plan: StepPlan, result: StepResult, *, seconds: float) -> None:
        """Takes in how long a step took, unless it waited for something beside the device."""
        if plan.needs_masks or result.compile_s or seconds <= 0:
            return
        if self._admission is not None:
            self._admission.note_step(seconds)
        error = self.step_times.observe(result.bucket, measure_work(plan), seconds)
        if error is not None:
            self._metrics.step_time_error.observe(error)
