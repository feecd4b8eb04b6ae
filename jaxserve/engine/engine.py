"""The engine: one thread that owns scheduler, runner and clock, and ends every request once."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from jaxserve.config import Config
from jaxserve.engine import limits
from jaxserve.engine.accounts import Accounts, ThroughputLog
from jaxserve.engine.intake import EngineState, Intake
from jaxserve.engine.live_choice import LiveChoice, find_stopped
from jaxserve.engine.live_request import Outcome, build_live_request, late_outcome, note_step
from jaxserve.engine.masks import fill_masks
from jaxserve.engine.namespaces import Namespaces
from jaxserve.engine.pipeline import Pipeline
from jaxserve.engine.queue_bounds import build_unreachable
from jaxserve.engine.quotas import Quotas
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.served_model import ServedModel
from jaxserve.engine.step_clock import StepClock
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.engine.unread import UnreadTotal
from jaxserve.engine.waker import Waker
from jaxserve.errors import (
    EngineDeadError,
    JaxserveError,
    NotServingError,
    NumericsError,
    QuotaError,
    RequestError,
    SlowReaderError,
)
from jaxserve.identity import CacheIdentity
from jaxserve.metrics import Metrics
from jaxserve.plan import Runner, StepPlan
from jaxserve.request import FinishReason, GenerationRequest, Request, StructuredOutput
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import check_priority
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.scheduler import Scheduler, Update
from jaxserve.scheduler.step_time import StepTimes
from jaxserve.text.chat_output import find_parsers
from jaxserve.text.constraints import Constraint, Constraints
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OVERLAP_DEPTH: Final = 2  # steps launched before the oldest must be read


class Engine:
    """Takes requests from any thread, runs them on its own, and gives each a stream.

    Every accepted request gets exactly one terminal event, from `_finish` alone.

    Attributes:
      error: what the engine died of; None while it lives.
      parsers: how tool calls and reasoning are read from a chat's output.
      kv_token_bytes: of a token's keys and values over all layers; 0 where it is not known.
      quotas: what each tenant may use; nothing is limited until somebody sets limits.
      trace: the last steps and requests; None where none are kept.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        tokenizer: Tokenizer,
        config: Config,
        model: ServedModel,
        metrics: Metrics,
        page_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        page_bytes: size of a KV page over all layers, for the gauges.
        """
        self.tokenizer = tokenizer
        self.parsers = find_parsers(
            tokenizer, tool=config.model.tool_parser, reasoning=config.model.reasoning_parser
        )
        self.config = config
        self.model = model
        self.metrics = metrics
        self.error: BaseException | None = None
        self._clock = clock
        self.kv_token_bytes = page_bytes / config.kv.page_size
        self.quotas = Quotas(config.limits, metrics=metrics, clock=clock)
        depth = OVERLAP_DEPTH if config.runner.overlap else 1
        self._namespaces = Namespaces(
            config.prefix_cache,
            _identify(model, tokenizer, config),
            changing_ropes=model.changing_ropes,
        )
        self._pool = PagePool(
            runner.num_pages,
            config.kv.page_size,
            cache=PrefixCache(config.kv.page_size) if config.prefix_cache.enabled else None,
        )
        self._scheduler = Scheduler(
            config=config.scheduler,
            reserve=config.kv.reserve,
            pool=self._pool,
            limits=runner.limits,
            max_model_tokens=model.max_model_tokens,
            overlap_depth=depth,
            metrics=metrics,
            page_bytes=page_bytes,
            weight_of=self.quotas.weight,
        )
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._listeners: list[Callable[[EngineState], None]] = []
        self._taps: list[Callable[[Request, int], None]] = []
        self._constraints = Constraints(
            tokenizer,
            eos_ids=model.eos_ids,
            vocab_size=model.vocab_size,
            padded_vocab_size=model.padded_vocab_size,
            max_bytes=config.limits.max_grammar_bytes,
        )
        self._intake = Intake(config.limits)  # where other threads and this one meet
        # the engine thread alone
        self._by_sequence: dict[int, LiveChoice] = {}
        self._waker = Waker()
        self._unread: UnreadTotal[Stream] = UnreadTotal(config.limits.total_buffer_bytes)
        self._steps = StepClock(config.measure, metrics, clock, name_of=self._name_of)
        self._in_flight = Pipeline(runner, depth=depth, metrics=metrics, clock=self._steps)
        self.trace = self._steps.trace
        self._accounts = Accounts(metrics, self.trace)
        self._throughput = ThroughputLog(metrics, config.log.interval_s)

    # any thread

    @property
    def state(self) -> EngineState:
        return self._intake.state

    @property
    def step_times(self) -> StepTimes:
        """What was found out about steps; the engine thread's, so read it while nothing runs."""
        return self._scheduler.step_times

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the padding page among them."""
        return self._pool.num_pages

    def now(self) -> float:
        """Returns the engine's monotonic seconds: what deadlines are measured in."""
        return self._clock()

    def add_listener(self, listener: Callable[[EngineState], None]) -> None:
        """Has `listener` called with each new state, in the thread that changed it."""
        self._listeners.append(listener)

    def add_tap(self, tap: Callable[[Request, int], None]) -> None:
        """Has `tap` called, on the engine thread, with each request that ended and its output's
        tokens. It must return at once and raise nothing: every request waits for it."""
        self._taps.append(tap)

    def start(self) -> None:
        """Starts the engine thread; requests are accepted from here on."""
        self._change_state(EngineState.SERVING)
        self._thread.start()

    def submit(self, asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
        """Checks a request to the end, queues it and returns its stream.

        Args:
          delivery: when a token counts as delivered; see `Stream`.

        Raises:
          RequestError: it is not allowed, can never fit, repeats an id in flight, or the queue or
            a quota of its tenant is full.
          NotServingError: starting, draining or stopped.
          EngineDeadError: the engine failed.
        """
        try:
            return self.offer(asked, delivery=delivery)
        except JaxserveError as error:
            self.count_refusal(asked, error)
            raise

    def offer(self, asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
        """Does what `submit` does, but counts no refusal: the caller will offer it again, or counts
        it."""
        self._intake.check_serving()
        check_priority(self.config.scheduler, asked.priority)  # before a tenant's ceiling
        asked = self.quotas.allow(asked)
        request = limits.resolve(
            asked,
            model=self.quotas.narrow(self.model, asked.tenant),
            tokenizer=self.tokenizer,
            limits=self.config.limits,
            now_s=self._clock(),
        )
        request.cache_identity = self._namespaces.find_identity(
            request.tenant, asked.cache_salt, prompt_len=len(request.prompt)
        )
        self._scheduler.check_fits(
            len(request.prompt), request.max_tokens, request.sampling.num_choices
        )
        live = build_live_request(
            request,
            tokenizer=self.tokenizer,
            constraint=self._build_constraint(request, asked.structured_output),
            max_bytes=self.config.limits.stream_buffer_bytes,
            waker=self._waker,
            on_cancel=functools.partial(self._intake.abort, request),
            reader=ReaderAccount(
                self.metrics, self._clock, times_decoding=self.config.measure.phases
            ),
            delivery=delivery,
            total=self._unread,
            on_end=asked.on_end,
        )
        accept = functools.partial(self._accounts.accept, live)
        with self.quotas.admitting(request):
            self._intake.add(live, on_accept=accept)
        return live.stream

    def count_refusal(self, asked: GenerationRequest, error: JaxserveError) -> None:
        """Counts a request that is not accepted."""
        self.metrics.count_refusal(error)
        if isinstance(error, QuotaError):
            self.quotas.count_refusal(asked.tenant, error)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """Ends a tenant's request with CANCELLED and its output so far; False if it is not here."""
        live = self._intake.find(request_id, tenant)
        if live is None:
            return False
        live.stream.cancel()
        return True

    def flush_prefix_cache(self, tenant: str | None = None) -> Future[int]:
        """Has the engine forget what it keeps of computed prompts; gives the pages that are free
        for it. What running requests hold is free once they have ended.

        Args:
          tenant: whose; None is everybody's, and what is shared.

        Raises:
          NotServingError, EngineDeadError: the engine has stopped or failed.
        """

        def flush() -> int:
            return self._pool.flush(
                lambda identity: (
                    tenant is None or (identity.scope == "tenant" and identity.owner == tenant)
                )
            )

        return self._intake.call(flush)

    def _build_constraint(
        self, request: Request, structured: StructuredOutput | None
    ) -> Constraint | None:
        """Returns what masks the request's tokens. It may take long: it is the caller's time."""
        if not request.is_masked:
            return None
        constraint = self._constraints.build(request.sampling, structured)
        request.is_masked = constraint is not None
        return constraint

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets running ones end for a while, then stops.

        What still runs after `timeout_s` ends with NotServingError. A second call, with a shorter
        time, cuts the first one short. Returns when the engine thread has ended.
        """
        if self.state is EngineState.STARTING:
            self._change_state(EngineState.STOPPED)
        if self._thread.ident is None:
            return
        self._change_state(EngineState.DRAINING)
        self._intake.wait_until_empty(timeout_s)
        self._intake.cut()
        self._thread.join()

    def stop(self) -> None:
        """Stops now: what runs ends with NotServingError."""
        self.drain(0.0)

    def _change_state(self, state: EngineState) -> None:
        if self._intake.change_state(state):
            self._tell(state)

    def _tell(self, state: EngineState) -> None:
        logger.info("engine state=%s", state.value)
        for listener in self._listeners:
            listener(state)

    # the engine thread

    def _run(self) -> None:
        try:
            self._steps.begin()
            while self._wait_for_work():
                self._step()
            self._end_rest()
        # Whatever it is, every request gets its end; a panic of a library in Rust is no Exception.
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
        else:
            self._change_state(EngineState.STOPPED)
        finally:
            self._waker.flush()
            self._steps.end()
            self._constraints.close()

    def _wait_for_work(self) -> bool:
        """Blocks while idle; False once the thread is to end."""
        self._waker.flush()
        if not self._in_flight and self._intake.is_empty:
            self._throughput.rest(self._clock())
            self._steps.rest()
            self._intake.wait_for_work()
            self._steps.lap("idle")
        return not self._intake.is_cut

    def _step(self) -> None:
        self._take_inbox()
        now_s = self._clock()
        self._end_expired(now_s)
        plan = self._scheduler.schedule(now_s)
        self._start_new(plan)
        self._steps.lap("schedule")
        if plan.has_work:
            self._in_flight.launch(plan)
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
            self._unread.watch(live.stream)
            self._scheduler.add(live.request)
            for sequence in live.request.sequences:
                self._by_sequence[sequence.id] = live.choices[sequence.choice]
        for request in aborts:
            self._finish(request, FinishReason.CANCELLED)
        self._intake.run_calls()

    def _end_expired(self, now_s: float) -> None:
        for request in self._scheduler.expired(now_s):
            self._finish(request, late_outcome(request, now_s))
        for request, late_s in self._scheduler.unreachable(now_s):
            self._finish(request, build_unreachable(request, late_s))

    def _start_new(self, plan: StepPlan) -> None:
        for load in plan.row_loads:
            live = self._by_sequence[load.sequence_id].live
            if live.scheduled_s is not None:  # a fork, or resumed after a preemption
                continue
            self._accounts.start(live, self._clock())
            self._intake.leave_queue(live)
            self.quotas.leave_queue(live.request)
            if not live.waits_for_prompt:
                live.stream.start(cached_prompt_tokens=live.request.num_cached)

    def _launch_output(self, plan: StepPlan) -> None:
        """Masks the step just launched by all that came before it, and lets it sample."""
        while len(self._in_flight) > 1:
            self._retire()
        self._steps.lap("commit")
        masks = fill_masks(plan, self._by_sequence)
        for choice, error in masks.failed:
            self._finish(choice.live.request, error)
        self._steps.lap("mask")
        self._in_flight.launch_output(masks.by_sequence)

    def _retire(self) -> None:
        self._waker.flush()  # before it may take long
        plan, result = self._in_flight.retire()
        now_s = self._clock()
        stopped = find_stopped(result, self._by_sequence)
        self._steps.lap("detokenize")
        note_step(plan, result, self._by_sequence)
        for update in self._scheduler.commit(plan, result, stopped, now_s=now_s):
            self._deliver(update, now_s)
        self._make_room()

    def _name_of(self, sequence_id: int) -> str:
        return self._by_sequence[sequence_id].live.request.id

    def _deliver(self, update: Update, now_s: float) -> None:
        choice = self._by_sequence.get(update.sequence.id)
        if choice is None:  # another choice's update has ended the request
            self.metrics.surplus_tokens.inc(update.token_id is not None)
            return
        live, token_id = choice.live, update.token_id
        if update.prompt_logprobs:
            live.add_prompt_logprobs(update.prompt_logprobs)
        if update.not_finite:
            is_scored = not live.request.max_tokens
            where = "the prompt" if is_scored else f"output token {choice.num_output}"
            text = f"the logits of {where} are not finite; report the prompt"
            self._finish(live.request, NumericsError(text))
            return
        if token_id is not None:
            before_s, is_first = choice.last_token_s, live.first_token_s is None
            if not live.put(choice, update, now_s=now_s):
                limit = self.config.limits.stream_buffer_bytes
                text = f"more than {limit} bytes of output are unread; read faster"
                self._finish(live.request, SlowReaderError(text))
                self.metrics.surplus_tokens.inc()
                return
            self._accounts.add_token(live, is_first=is_first, before_s=before_s, now_s=now_s)
        elif update.finish is not None:  # nothing was to come but the prompt's scores
            self._accounts.add_prompt(live, now_s)
        if update.finish is not None:
            self._end_choice(choice, update, now_s=now_s)
        elif choice.constraint is not None and token_id is not None:
            try:
                choice.constraint.advance(token_id)
            except RequestError as error:
                self._finish(live.request, error)

    def _end_choice(self, choice: LiveChoice, update: Update, *, now_s: float) -> None:
        """Ends a choice, and with the last one the request."""
        assert update.finish is not None
        live = choice.live
        if all(other.has_ended for other in live.choices if other is not choice):
            self._finish(live.request, update.finish, end_s=now_s)
            return
        del self._by_sequence[update.sequence.id]
        self._scheduler.end(update.sequence)
        live.end_choice(choice, update.finish)

    def _make_room(self) -> None:
        """Gives up the streams with the most unread while all have too much together."""
        while (stream := self._unread.find_largest()) is not None:
            limit = self._unread.max_bytes
            error = SlowReaderError(
                f"more than {limit} bytes of output are unread in all streams, the most of them in "
                "this one; read faster"
            )
            stream.give_up(error)
            live = next((live for live in self._intake.live() if live.stream is stream), None)
            if live is None:
                self.metrics.given_up_streams.inc()
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
        self.quotas.release(request, output_tokens=live.num_output)
        for sequence in request.sequences:
            self._by_sequence.pop(sequence.id, None)
        if self.state is not EngineState.FAILED:  # a failed engine's pages are nobody's
            self._scheduler.finish(request)
        self._accounts.finish(live, outcome, now_s)
        live.end(outcome, now_s=now_s)
        live.tell_end(outcome, now_s=now_s)
        for tap in self._taps:
            tap(request, live.num_output)

    def _end_rest(self) -> None:
        self._take_inbox()
        for live in self._intake.live():
            text = "the server stopped before this request was done; send it again elsewhere"
            self._finish(live.request, NotServingError(text))
        while self._in_flight:
            self._retire()
        self._scheduler.update_gauges()

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine failed and ends every request", exc_info=error)
        self.error = error
        self._in_flight.clear()
        self._intake.drop_calls()
        self._intake.change_state(EngineState.FAILED)
        for live in self._intake.live():
            cause = f"the engine failed: {type(error).__name__}; restart the server"
            self._finish(live.request, EngineDeadError(cause))
        self.metrics.clear_levels()
        self._waker.flush()
        self._tell(EngineState.FAILED)  # last: who hears it may end the process


def _identify(model: ServedModel, tokenizer: Tokenizer, config: Config) -> CacheIdentity:
    """Returns what all K/V of this engine has in common."""
    return CacheIdentity(
        weights=model.weights_digest,
        tokenizer=tokenizer.digest,
        positions=model.positions,
        kv_dtype=model.kv_dtype,
        page_size=config.kv.page_size,
    )
