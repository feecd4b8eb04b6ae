"""Requests through the real scheduler and page pool, on a virtual device, in virtual time."""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from jaxserve.config import Config
from jaxserve.engine.live_request import late_outcome
from jaxserve.engine.loop import find_depth
from jaxserve.engine.queue_bounds import QueueBounds, build_unreachable
from jaxserve.errors import RequestError
from jaxserve.measure.records import Arrival, Outcome, RequestRecord
from jaxserve.measure.replay import TimelineSample
from jaxserve.measure.targets.base import Ask, Levels
from jaxserve.measure.virtual_device import VirtualDevice
from jaxserve.measure.virtual_request import RequestMaker, VirtualRequest
from jaxserve.metrics import Metrics
from jaxserve.plan import StepPlan, StepResult
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.deadlines import is_ended
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import check_priority
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.step_time import StepTimes


class Simulation:
    """One replay, with the prefix cache where the pool has one.

    It does what `EngineLoop.step` does, in the same order, and its clients do what `Replay` does;
    delivery takes no time, and nobody is late to send.

    Attributes:
      scheduler: the real one.
      timeline: a sample each `sample_s` of virtual time.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: VirtualDevice,
        pool: PagePool,
        max_model_tokens: int,
        metrics: Metrics,
        on_record: Callable[[RequestRecord], None],
        concurrency: int | None = None,
        timeout_s: float = math.inf,
        max_drain_s: float | None = None,
        sample_s: float = 1.0,
        tenant_of: Callable[[Ask], str] | None = None,
        step_times: StepTimes | None = None,
    ) -> None:
        """Args:
        on_record: called with each request that ended.
        concurrency: of a closed loop; None is an open one.
        timeout_s, max_drain_s: as those of `Replay`.
        tenant_of: whose a request is; None has no tenants.
        step_times: what the scheduler knows of steps at the start.
        """
        self._config = config.scheduler
        self._depth = find_depth(config)
        self._device = device
        self._pool = pool
        self._metrics = metrics
        self.scheduler = Scheduler(
            config=config.scheduler,
            reserve=config.kv.reserve,
            pool=pool,
            limits=device.limits,
            max_model_tokens=max_model_tokens,
            overlap_depth=self._depth,
            metrics=metrics,
            step_times=step_times,
            weight_of=lambda tenant: config.tenants.limits_of(tenant).weight,
        )
        self.timeline: list[TimelineSample] = []
        self._has_cache = config.prefix_cache.enabled
        self._maker = RequestMaker(config, tenant_of=tenant_of)
        self._queue = QueueBounds(config.limits)
        self._on_record = on_record
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._max_drain_s = max_drain_s
        self._sample_s = sample_s
        self._now_s = 0.0
        self._live: dict[Request, VirtualRequest] = {}
        self._by_sequence: dict[int, VirtualRequest] = {}
        self._in_flight: collections.deque[tuple[StepPlan, float, StepResult]] = collections.deque()
        self._limits: list[tuple[float, int, VirtualRequest]] = []  # when clients give up
        self._ties = itertools.count()
        self._cut_s = math.inf
        self._num_tokens = 0

    def run(self, asks: Iterator[Ask]) -> None:
        """Sends everything; returns when every request has ended.

        Raises:
          WorkloadError: a request cannot be simulated.
        """
        ask = next(asks, None)
        while True:
            ask = self._send_due(ask, asks)
            self._give_up_due()
            if not self._live and not self._in_flight:
                if ask is None:
                    return
                self._now_s = max(self._now_s, ask.at_s)
                continue
            self._step()
            self._sample()

    def _send_due(self, ask: Ask | None, asks: Iterator[Ask]) -> Ask | None:
        """Sends what is due by now; returns the first that is not."""
        while ask is not None:
            if self._concurrency is None:
                if ask.at_s > self._now_s:
                    return ask
                self._submit(ask, ask.at_s)
            else:
                if len(self._live) >= self._concurrency:
                    return ask
                self._submit(ask, self._now_s)
            ask = next(asks, None)
            if ask is None and self._max_drain_s is not None:
                self._cut_s = self._now_s + self._max_drain_s
        return None

    def _submit(self, ask: Ask, intended_s: float) -> None:
        request = self._maker.make(ask, intended_s)
        live = VirtualRequest(ask=ask, request=request, intended_s=intended_s)
        try:
            check_priority(self._config, request.priority)
            num_choices = request.sampling.num_choices
            self.scheduler.check_fits(len(request.prompt), request.max_tokens, num_choices)
            self._queue.join(len(request.prompt))
        except RequestError as error:
            self._metrics.count_refusal(error)
            live.is_queued = False
            self._record(live, "refused", end_s=intended_s, error=str(error))
            return
        self._live[request] = live
        self.scheduler.add(request)
        for sequence in request.sequences:
            self._by_sequence[sequence.id] = live
        limit_s = min(self._timeout_s, math.inf if ask.deadline_s is None else ask.deadline_s)
        if limit_s < math.inf:
            heapq.heappush(self._limits, (intended_s + limit_s, next(self._ties), live))

    def _step(self) -> None:
        now_s = self._now_s
        for request in self.scheduler.expired(now_s):
            self._end(self._live[request], late_outcome(request, now_s), end_s=now_s)
        for request, miss in self.scheduler.unreachable(now_s):
            error = str(build_unreachable(miss))
            self._record(self._live[request], "refused", end_s=now_s, error=error)
        plan = self.scheduler.schedule(now_s)
        for load in plan.row_loads:
            self._start(self._by_sequence[load.sequence_id])
        if plan.has_work:
            done_s, result = self._device.launch(plan, now_s)
            self._metrics.steps.labels(result.bucket.name).inc()
            self._in_flight.append((plan, done_s, result))
        if len(self._in_flight) >= self._depth or (self._in_flight and not plan.has_work):
            self._retire()

    def _start(self, live: VirtualRequest) -> None:
        if live.scheduled_s is None:
            live.scheduled_s = self._now_s
            self._leave_queue(live)

    def _retire(self) -> None:
        plan, done_s, result = self._in_flight.popleft()
        now_s = self._now_s = max(self._now_s, done_s)
        arrival = Arrival(time_s=now_s, num_tokens=1)
        for update in self.scheduler.commit(plan, result, now_s=now_s):
            live = self._live.get(update.sequence.request)
            if live is None:
                continue
            if update.token_id is not None:
                live.arrivals.append(arrival)
                self._num_tokens += 1
            if update.finish is None:
                continue
            self.scheduler.end(update.sequence)
            if is_ended(live.request):
                self._end(live, update.finish, end_s=now_s)

    def _give_up_due(self) -> None:
        """Ends what its client does not wait for any longer."""
        while self._limits and self._limits[0][0] <= self._now_s:
            limit_s, _, live = heapq.heappop(self._limits)
            if not live.has_ended:
                self._cancel(live, "timed_out", end_s=limit_s)
        if self._now_s >= self._cut_s:
            for live in list(self._live.values()):
                self._cancel(live, "cancelled", end_s=self._cut_s)

    def _cancel(self, live: VirtualRequest, outcome: Outcome, *, end_s: float) -> None:
        self.scheduler.finish(live.request)
        self._record(live, outcome, end_s=end_s, finish_reason="cancelled")

    def _end(
        self, live: VirtualRequest, outcome: FinishReason | RequestError, *, end_s: float
    ) -> None:
        self.scheduler.finish(live.request)
        if isinstance(outcome, RequestError):
            self._record(live, "timed_out", end_s=end_s, error=str(outcome))
            return
        wanted = max(1, live.ask.wanted_tokens or 1)
        word: Outcome = "ok" if len(live.arrivals) >= wanted else "short"
        if outcome is FinishReason.DEADLINE:
            word = "timed_out"
        self._record(live, word, end_s=end_s, finish_reason=outcome.value)

    def _record(
        self,
        live: VirtualRequest,
        outcome: Outcome,
        *,
        end_s: float,
        error: str = "",
        finish_reason: str = "",
    ) -> None:
        live.has_ended = True
        self._leave_queue(live)
        if self._live.pop(live.request, None) is not None:  # what was refused was never in
            self._queue.note_end(end_s)
        for sequence in live.request.sequences:
            self._by_sequence.pop(sequence.id, None)
        self._on_record(
            live.build_record(
                outcome,
                end_s=end_s,
                error=error,
                finish_reason=finish_reason,
                has_cache=self._has_cache,
            )
        )

    def _leave_queue(self, live: VirtualRequest) -> None:
        if live.is_queued:
            live.is_queued = False
            self._queue.leave(len(live.request.prompt))

    def _sample(self) -> None:
        """Looks at each `sample_s`, or at the step behind it."""
        if self.timeline and self._now_s < self.timeline[-1].time_s + self._sample_s:
            return
        num_running = self.scheduler.num_running
        self.timeline.append(
            TimelineSample(
                time_s=self._now_s,
                in_flight=len(self._live),
                output_tokens=self._num_tokens,
                levels=Levels(
                    running=num_running,
                    waiting=self.scheduler.num_waiting,
                    kv_usage=1 - self._pool.num_free / self._pool.num_usable,
                ),
            )
        )
