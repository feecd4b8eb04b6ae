"""Drives a scheduler and a `FakeRunner` as the engine does, one point at a time, and checks both.

After every point: no page or row is lost or twice, and nobody was admitted past an elder. At the
end of each request: its tokens are those it would get alone, and it has ended once.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan, StepResult
from jaxserve.request import FinishReason, Request, SamplingParams, SequenceState
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.scheduler import Scheduler, Update
from tests.fakes import FakeInFlight, FakeRunner, Script, expected_output

GREEDY = SamplingParams(temperature=0.0)
NO_STOPS: dict[int, FinishReason] = {}

Point = Literal["scheduled", "launched", "read", "committed"]
Outcome = FinishReason | Literal["not_finite", "late"]


class Loop:
    """The small engine E0: pages of 4, 12 of them usable, 10 tokens a step, chunks of 5, 4 rows.

    Attributes:
      outputs: the tokens delivered to each request.
      outcomes: how each request ended.
    """

    def __init__(
        self,
        *,
        num_pages: int = 13,
        page_size: int = 4,
        max_len: int = 40,
        rows: int = 4,
        chunk_tokens: int = 5,
        chunk_tile: int = 1,
        max_chunks: int = 4,
        step_tokens: int | None = 10,
        depth: int = 2,
        batching: Literal["continuous", "static"] = "continuous",
        chunked_prefill: bool = True,
        reserve: Literal["on_demand", "max_length"] = "on_demand",
        vocab_size: int = 259,
        script: Script | None = None,
    ) -> None:
        limits = StepLimits(
            max_rows=rows,
            max_chunk_tokens=chunk_tokens,
            chunk_tile=chunk_tile,
            max_chunks=max_chunks,
            max_seqs=rows,
        )
        self.metrics = Metrics()
        self.pool = PagePool(num_pages, page_size)
        self.runner = FakeRunner(
            limits=limits,
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            script=script,
            late_writes=True,
        )
        self.scheduler = Scheduler(
            config=SchedulerSection(
                batching=batching,
                chunked_prefill=chunked_prefill,
                max_seqs=rows,
                max_chunks=max_chunks,
                max_step_tokens=step_tokens,
            ),
            reserve=reserve,
            pool=self.pool,
            limits=limits,
            max_model_tokens=max_len,
            overlap_depth=depth,
            metrics=self.metrics,
            page_bytes=1000 * page_size,
        )
        self.depth = depth
        self.vocab_size = vocab_size
        self.script = script
        self.now_s = 0.0
        self.outputs: dict[Request, list[int]] = {}
        self.outcomes: dict[Request, Outcome] = {}
        self.live: list[Request] = []
        self.stops_at: dict[Request, int] = {}  # output length at which a stop string matches
        self.plans: list[StepPlan] = []
        self.num_steps = 0
        self._num_uncommitted = 0
        self._has_work = False  # of the last plan
        self._in_flight: collections.deque[tuple[StepPlan, FakeInFlight]] = collections.deque()
        self._points = self._run()

    def add(
        self,
        prompt: tuple[int, ...] | int,
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_ids: dict[int, FinishReason] = NO_STOPS,
        priority: int = 0,
        deadline_s: float | None = None,
        queue_deadline_s: float | None = None,
    ) -> Request:
        """Submits a request; an int prompt is that many tokens, different for each request."""
        if isinstance(prompt, int):
            first = len(self.outputs)
            prompt = tuple((first + 3 * i) % self.vocab_size for i in range(prompt))
        self.scheduler.check_fits(len(prompt), max_tokens)
        request = Request(
            id=f"r{len(self.outputs)}",
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            max_tokens=max_tokens,
            ends_by_context=False,
            stop_ids=stop_ids,
            arrival_s=self.now_s,
            priority=priority,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
        )
        self.scheduler.add(request)
        self.outputs[request] = []
        self.live.append(request)
        return request

    def finish(self, request: Request, outcome: Outcome) -> None:
        assert request not in self.outcomes, f"{request.id} ends twice"
        self.outcomes[request] = outcome
        self.live.remove(request)
        self.scheduler.finish(request)
        self.scheduler.finish(request)  # a second time changes nothing
        self._check_output(request, outcome)

    def abort(self, request: Request) -> None:
        """What a client's cancel does, at whatever point; nothing once the request has ended."""
        if request not in self.outcomes:
            self.finish(request, FinishReason.CANCELLED)

    def expire(self) -> list[Request]:
        """Ends what is late, as the engine does before each step."""
        expired = self.scheduler.expired(self.now_s)
        for request in expired:
            if not self.outputs[request]:
                self.finish(request, "late")
            else:
                self.finish(request, FinishReason.DEADLINE)
        return expired

    def advance(self) -> Point:
        """Goes on to the next point of the engine's loop, and checks the books there."""
        point = next(self._points)
        self.scheduler.check()
        return point

    def step(self, on_point: Callable[[Point], None] | None = None) -> None:
        """One round of the engine: up to the next "committed", or to a plan that only launched."""
        while True:
            point = self.advance()
            if on_point:
                on_point(point)
            if point == "committed" or (point == "launched" and not self._must_retire()):
                return

    def drain(self, max_steps: int) -> None:
        """Runs until all requests have ended and nothing is in flight; raises past the bound."""
        last = self.num_steps + max_steps
        while self.scheduler.has_unfinished or self._num_uncommitted:
            self.advance()
            self.expire()
            assert self.num_steps <= last, f"not done after {max_steps} steps: {self.live}"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held by anyone: what an idle engine must look like."""
        self.pool.check(())
        assert self.pool.num_free == self.pool.num_usable
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.waiting_tokens == 0
        assert set(self.outcomes) == set(self.outputs)

    def preempt(self, request: Request) -> None:
        self.scheduler.preempt(request)

    def is_running(self, request: Request) -> bool:
        return request.sequences[0].state is SequenceState.RUNNING

    def _must_retire(self) -> bool:
        is_full = len(self._in_flight) >= self.depth
        return bool(self._in_flight) and (is_full or not self._has_work)

    def _run(self) -> Iterator[Point]:
        while True:
            self.expire()
            plan = self.scheduler.schedule(self.now_s)
            self._check_plan(plan)
            self._has_work = plan.has_work
            self._num_uncommitted += plan.has_work
            yield "scheduled"
            if plan.has_work:
                self.plans.append(plan)
                self.num_steps += 1
                self._in_flight.append((plan, self.runner.launch(plan)))
            yield "launched"
            if self._must_retire():
                launched, in_flight = self._in_flight.popleft()
                result = in_flight.result()
                yield "read"
                stopped = self._match_stops(result)
                for update in self.scheduler.commit(launched, result, stopped):
                    self._deliver(update)
                self._num_uncommitted -= 1
                yield "committed"

    def _check_plan(self, plan: StepPlan) -> None:
        if not plan.has_work and not self._in_flight:
            assert not self.scheduler.has_unfinished, f"nothing planned for {self.live}"
        assert plan.retire_first is None or (self._in_flight and not plan.has_work)
        waiting = [(-r.priority, r.sequences[0].id) for r in self.live if not self.is_running(r)]
        loaded = {load.sequence_id for load in plan.row_loads}
        for request in self.live:
            order = (-request.priority, request.sequences[0].id)
            if order[1] in loaded:
                assert all(order < other for other in waiting), f"{request.id} overtook another"

    def _match_stops(self, result: StepResult) -> set[int]:
        return {
            request.sequences[0].id
            for request in self.live
            if request.sequences[0].id in result.token_ids
            and len(self.outputs[request]) + 1 == self.stops_at.get(request)
        }

    def _deliver(self, update: Update) -> None:
        request = update.sequence.request
        if update.not_finite:
            self.finish(request, "not_finite")
            return
        assert update.token_id is not None
        self.outputs[request].append(update.token_id)
        if update.finish:
            self.finish(request, update.finish)

    def _check_output(self, request: Request, outcome: Outcome) -> None:
        output = self.outputs[request]
        alone = expected_output(
            request.prompt,
            request.sampling,
            len(output),
            seed=request.seed,
            stop_ids=tuple(request.stop_ids),
            vocab_size=self.vocab_size,
            script=self.script,
        )
        assert output == alone, f"{request.id} got {output}, alone it gets {alone}"
        min_tokens = request.sampling.min_tokens
        ends = [i for i, t in enumerate(output) if t in request.stop_ids and i >= min_tokens]
        if ends:
            assert ends == [len(output) - 1], f"{request.id} went on after its end token"
            assert outcome is request.stop_ids[output[-1]]
        elif self.stops_at.get(request) == len(output):
            assert outcome is FinishReason.STOP
        elif len(output) == request.max_tokens:
            assert outcome is FinishReason.MAX_TOKENS
        else:
            assert outcome not in (FinishReason.MAX_TOKENS, FinishReason.EOS, FinishReason.STOP)
        if outcome == "late" and request.deadline_s is None:
            assert request.sequences[0].last_step == 0, "a prefill was spent on a late request"
