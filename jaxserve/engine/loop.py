"""The engine's thread: a step after the other, and the end of every request."""

import functools
from collections.abc import Callable
from typing import Final

from jaxserve.config import Config
from jaxserve.engine.accounts import Accounts, ThroughputLog
from jaxserve.engine.followed import Followed
from jaxserve.engine.intake import EngineState, Intake
from jaxserve.engine.live_choice import LiveChoice, find_stopped
from jaxserve.engine.live_request import LiveRequest, Outcome, late_outcome, note_step
from jaxserve.engine.masks import fill_masks
from jaxserve.engine.pipeline import Pipeline
from jaxserve.engine.queue_bounds import build_unreachable
from jaxserve.engine.quotas import Quotas
from jaxserve.engine.step_clock import StepClock
from jaxserve.engine.stream import Stream
from jaxserve.engine.unread import UnreadTotal
from jaxserve.engine.waker import Waker
from jaxserve.errors import (
    EngineDeadError,
    NotServingError,
    NumericsError,
    SlowReaderError,
)
from jaxserve.metrics import Metrics
from jaxserve.plan import Runner, StepPlan
from jaxserve.request import FinishReason, Request, Sequence
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.settlement import Update
from jaxserve.text.mask_batch import MaskBatch

OVERLAP_DEPTH: Final = 2  # steps launched before the oldest must be read


def find_depth(config: Config) -> int:
    """Returns the launched steps that may wait for their commit."""
    return OVERLAP_DEPTH if config.runner.overlap else 1


class EngineLoop:
    """Owns scheduler, runner and clock; all but the attributes belongs to its one thread.

    Every accepted request gets exactly one terminal event, from `_finish` alone.

    Attributes:
      accounts: what requests have cost.
      taps: see `Engine.add_tap`.
      trace: the last steps and requests; None where none are kept.
      unread: bytes of output that clients have not taken.
      waker: wakes those that read streams.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        intake: Intake,
        quotas: Quotas,
        masks: MaskBatch,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._intake = intake
        self._quotas = quotas
        self._masks = masks
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._by_sequence: dict[int, LiveChoice] = {}
        self._stopping: dict[int, LiveChoice] = {}  # those of them with stop strings
        self._slow: list[LiveRequest] = []  # their readers are, of those that are followed
        self.waker = Waker()
        self.unread: UnreadTotal[Stream] = UnreadTotal(config.limits.total_buffer_bytes)
        self._steps = StepClock(config.measure, metrics, clock, name_of=self._name_of)
        self._in_flight = Pipeline(
            runner, depth=find_depth(config), metrics=metrics, clock=self._steps
        )
        self.trace = self._steps.trace
        self.accounts = Accounts(metrics, self.trace)
        self.taps: list[Callable[[Request, int], None]] = []
        self._throughput = ThroughputLog(metrics, config.log.interval_s)

    def run(self) -> None:
        """Returns when it was told to end, and everything has."""
        self._steps.begin()
        while self._wait_for_work():
            self.step()
        self._end_rest()

    def fail(self, error: EngineDeadError) -> None:
        """Ends every request with this, after the engine has failed."""
        self._in_flight.clear()
        self._intake.drop_calls()
        for live in self._intake.live():
            self._finish(live.request, error)
        self._metrics.clear_levels()
        self.waker.flush()

    def close(self) -> None:
        """Nothing runs any more."""
        self.waker.flush()
        self._steps.end()

    def _wait_for_work(self) -> bool:
        """Blocks while idle; False once the thread is to end."""
        self.waker.flush_due()
        if self.is_idle:
            self.waker.flush()
            self._throughput.rest(self._clock())
            self._steps.rest()
            self._intake.wait_for_work()
            self._steps.lap("idle")
        return not self._intake.is_cut

    @property
    def is_idle(self) -> bool:
        """Whether nothing is live, in flight or to be called."""
        return not self._in_flight and self._intake.is_empty

    def step(self) -> None:
        """Plans and launches a step, and takes in the result of one before it."""
        self._take_inbox()
        now_s = self._clock()
        self._end_expired(now_s)
        plan = self._scheduler.schedule(now_s)
        self._start_new(plan)
        self._steps.lap("schedule")
        if plan.has_work:
            self._in_flight.launch(plan)
        self._give_turns(now_s)
        if plan.needs_masks:
            self._launch_output(plan)
        if self._in_flight and (self._in_flight.is_full or not plan.has_work):
            self._retire()
        elif not plan.has_work and self._scheduler.has_unfinished:
            raise RuntimeError("the scheduler planned nothing while nothing was in flight")
        self._intake.tell_new(self._scheduler.update_gauges)
        self._throughput.note_step(self._clock())
        self._steps.end_turn()

    def _take_inbox(self) -> None:
        new, aborts = self._intake.take()
        for live in new:
            self.unread.watch(live.stream)
            self._scheduler.add(live.request)
            for sequence in live.request.sequences:
                choice = self._by_sequence[sequence.id] = live.choices[sequence.choice]
                choice.output, choice.output_s = sequence.output, sequence.output_s
                if choice.stops is not None:
                    self._stopping[sequence.id] = choice
            if live.request.is_followed:
                self._follow(live, choice)
        for request in aborts:
            self._finish(request, FinishReason.CANCELLED)
        self._intake.run_calls()

    def _end_expired(self, now_s: float) -> None:
        for request in self._scheduler.expired(now_s):
            self._finish(request, late_outcome(request, now_s))
        for request, miss in self._scheduler.unreachable(now_s):
            self._finish(request, build_unreachable(miss))

    def _start_new(self, plan: StepPlan) -> None:
        for load in plan.row_loads:
            live = self._by_sequence[load.sequence_id].live
            if live.scheduled_s is not None:  # a fork, or resumed after a preemption
                continue
            self.accounts.start(live, self._clock())
            self._intake.leave_queue(live)
            self._quotas.leave_queue(live.request)
            if not live.waits_for_prompt:
                live.stream.start(cached_prompt_tokens=live.request.num_cached)

    def _launch_output(self, plan: StepPlan) -> None:
        """Masks the step just launched by all that came before it, and lets it sample."""
        while len(self._in_flight) > 1:
            self._retire()
        self._steps.lap("commit")
        masks, failed = fill_masks(plan, self._by_sequence, self._masks)
        for choice, error in failed:
            self._finish(choice.live.request, error)
        self._metrics.batched_masks.inc(self._masks.num_together)
        self._steps.lap("mask")
        self._in_flight.launch_output(masks)

    def _give_turns(self, now_s: float) -> None:
        """Has readers work beside the device: once a step, when it has the next to do."""
        num_put_off = self.waker.flush_turns(now_s, is_late=self._in_flight.is_ready)
        self._metrics.put_off_streams.inc(num_put_off)
        slow, self._slow = self._slow, []
        for live in slow:
            self._finish(live.request, self._build_slow())

    def _retire(self) -> None:
        plan, result = self._in_flight.retire()
        now_s = self._clock()
        stopped = find_stopped(result, self._stopping)
        self._steps.lap("detokenize")
        note_step(plan, result, self._by_sequence)
        updates = self._scheduler.commit(plan, result, stopped, now_s=now_s)
        self.accounts.add_gaps(self._scheduler.followed_gaps)
        for update in updates:
            self._deliver(update, now_s)
        self.accounts.flush_tokens()
        self._make_room()

    def _name_of(self, sequence_id: int) -> str:
        return self._by_sequence[sequence_id].live.request.id

    def _deliver(self, update: Update, now_s: float) -> None:
        choice = self._by_sequence.get(update.sequence.id)
        if choice is None:  # another choice's update has ended the request
            self._metrics.surplus_tokens.inc(update.token_id is not None)
            return
        live, token_id = choice.live, update.token_id
        if update.prompt_logprobs:
            live.add_prompt_logprobs(update.prompt_logprobs)
        if update.not_finite:
            is_scored = not live.request.max_tokens
            where = "the prompt" if is_scored else f"output token {len(choice.output)}"
            text = f"the logits of {where} are not finite; report the prompt"
            self._finish(live.request, NumericsError(text))
            return
        if token_id is not None:
            is_first = live.first_token_s is None
            if not live.put(choice, update, now_s=now_s):
                self._finish(live.request, self._build_slow())
                self._metrics.surplus_tokens.inc()
                return
            if is_first:
                self.accounts.add_first_token(live, now_s)
            self.accounts.add_token(choice)
        elif update.finish is not None:  # nothing was to come but the prompt's scores
            self.accounts.add_prompt(live, now_s)
        if update.finish is not None:
            self._end_choice(choice, update, now_s=now_s)

    def _end_choice(self, choice: LiveChoice, update: Update, *, now_s: float) -> None:
        """Ends a choice, and with the last one the request."""
        assert update.finish is not None
        live = choice.live
        if all(other.has_ended for other in live.choices if other is not choice):
            self._finish(live.request, update.finish, end_s=now_s)
            return
        self._forget(update.sequence)
        self._scheduler.end(update.sequence)
        live.end_choice(choice, update.finish)

    def _follow(self, live: LiveRequest, choice: LiveChoice) -> None:
        followed = Followed(
            choice.output,
            choice.output_s,
            functools.partial(self._note_slow, live),
        )
        live.stream.follow(followed)

    def _note_slow(self, live: LiveRequest) -> None:
        self._slow.append(live)

    def _build_slow(self) -> SlowReaderError:
        limit = self._config.limits.stream_buffer_bytes
        return SlowReaderError(f"more than {limit} bytes of output are unread; read faster")

    def _forget(self, sequence: Sequence) -> None:
        self._by_sequence.pop(sequence.id, None)
        self._stopping.pop(sequence.id, None)

    def _make_room(self) -> None:
        """Gives up the streams with the most unread while all have too much together."""
        while (stream := self.unread.find_largest()) is not None:
            limit = self.unread.max_bytes
            error = SlowReaderError(
                f"more than {limit} bytes of output are unread in all streams, the most of them in "
                "this one; read faster"
            )
            stream.give_up(error)
            live = next((live for live in self._intake.live() if live.stream is stream), None)
            if live is None:
                self._metrics.given_up_streams.inc()
            else:
                self._finish(live.request, error)

    def _finish(self, request: Request, outcome: Outcome, *, end_s: float | None = None) -> None:
        """Ends a request, whatever the cause; the only place that gives back what it held.

        Args:
          end_s: when its last token was on the host, where that ends it.
        """
        now_s = self._clock() if end_s is None else end_s
        live = self._intake.remove(request, now_s=now_s)
        if live is None:
            return  # it has ended: an abort that came late
        live.catch_up()
        self._quotas.release(request, output_tokens=live.num_output)
        for sequence in request.sequences:
            self._forget(sequence)
        if self._intake.state is not EngineState.FAILED:  # a failed engine's pages are nobody's
            self._scheduler.finish(request)
        self.accounts.finish(live, outcome, now_s)
        live.end(outcome, now_s=now_s)
        live.tell_end(outcome, now_s=now_s)
        for tap in self.taps:
            tap(request, live.num_output)

    def _end_rest(self) -> None:
        self._take_inbox()
        for live in self._intake.live():
            text = "the server stopped before this request was done; send it again elsewhere"
            self._finish(live.request, NotServingError(text))
        while self._in_flight:
            self._retire()
        self._scheduler.update_gauges()
