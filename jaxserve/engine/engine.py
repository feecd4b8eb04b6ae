"""The engine: what other threads ask of it, from a request's check to the drain."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from jaxserve.config import Config
from jaxserve.engine import limits
from jaxserve.engine.intake import EngineState, Intake
from jaxserve.engine.live_request import build_live_request
from jaxserve.engine.loop import EngineLoop, find_depth
from jaxserve.engine.machine import count_cores
from jaxserve.engine.namespaces import Namespaces
from jaxserve.engine.quotas import Quotas
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.served_model import ServedModel
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.errors import (
    EngineDeadError,
    JaxserveError,
    QuotaError,
)
from jaxserve.identity import CacheIdentity
from jaxserve.metrics import Metrics
from jaxserve.plan import Runner
from jaxserve.request import GenerationRequest, Request, StructuredOutput
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import check_priority
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.step_time import StepTimes
from jaxserve.text.chat_output import find_parsers
from jaxserve.text.constraints import Constraint, Constraints
from jaxserve.text.mask_batch import MaskBatch
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_MASK_THREADS: Final = 8


class Engine:
    """Takes requests from any thread, runs them on its own, and gives each a stream.

    Every accepted request gets exactly one terminal event, from `EngineLoop` alone.

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
        step_times: StepTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        page_bytes: size of a KV page over all layers, for the gauges.
        step_times: what is known of them already.
        """
        self._runner = runner
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
        self._namespaces = Namespaces(
            config.prefix_cache,
            _identify(model, tokenizer, config),
            changing_ropes=model.changing_ropes,
        )
        self._pool = PagePool(
            runner.num_pages,
            config.kv.page_size,
            cache=_build_cache(config, runner, metrics) if config.prefix_cache.enabled else None,
        )
        self._scheduler = Scheduler(
            config=config.scheduler,
            reserve=config.kv.reserve,
            pool=self._pool,
            limits=runner.limits,
            max_model_tokens=model.max_model_tokens,
            overlap_depth=find_depth(config),
            metrics=metrics,
            page_bytes=page_bytes,
            step_times=step_times,
            weight_of=self.quotas.weight,
        )
        self._constraints = Constraints(
            tokenizer,
            eos_ids=model.eos_ids,
            vocab_size=model.vocab_size,
            max_bytes=config.limits.max_grammar_bytes,
        )
        self._intake = Intake(config.limits)  # where other threads and the engine's meet
        self._loop = EngineLoop(
            runner=runner,
            scheduler=self._scheduler,
            intake=self._intake,
            quotas=self.quotas,
            masks=MaskBatch(
                self._constraints.num_words,
                num_threads=max(1, min((count_cores() or 1) // 2, MAX_MASK_THREADS)),
            ),
            config=config,
            metrics=metrics,
            clock=clock,
        )
        self.trace = self._loop.trace
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._listeners: list[Callable[[EngineState], None]] = []

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
        self._loop.taps.append(tap)

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
            waker=self._loop.waker,
            on_cancel=functools.partial(self._intake.abort, request),
            reader=ReaderAccount(
                self.metrics, self._clock, times_decoding=self.config.measure.phases
            ),
            delivery=delivery,
            total=self._loop.unread,
            on_end=asked.on_end,
        )
        accept = functools.partial(self._loop.accounts.accept, live)
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

    def follow(self, config: Config) -> "Engine":
        """Returns an engine on the same runner that knows its step times, not started yet. This one
        must have stopped, or never begun.

        Args:
          config: may differ from this one's in all that the runner is not made of: scheduling,
            limits, the prefix cache.
        """
        assert not self._thread.is_alive(), "two engines on one runner"
        return Engine(
            runner=self._runner,
            tokenizer=self.tokenizer,
            config=config,
            model=self.model,
            metrics=self.metrics,
            page_bytes=round(self.kv_token_bytes * self.config.kv.page_size),
            step_times=self.step_times,
            clock=self._clock,
        )

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
            self._loop.run()
        # Whatever it is, every request gets its end; a panic of a library in Rust is no Exception.
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
        else:
            self._change_state(EngineState.STOPPED)
        finally:
            self._loop.close()
            self._constraints.close()

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine failed and ends every request", exc_info=error)
        self.error = error
        self._intake.change_state(EngineState.FAILED)
        self._loop.fail(
            EngineDeadError(f"the engine failed: {type(error).__name__}; restart the server")
        )
        self._tell(EngineState.FAILED)  # last: who hears it may end the process


def _build_cache(config: Config, runner: Runner, metrics: Metrics) -> PrefixCache:
    page_size, pages = config.kv.page_size, runner.host_pages
    if pages is None or not config.host_tier.enabled:
        return PrefixCache(page_size)
    return PrefixCache(page_size, host=HostTier(pages, metrics, page_size=page_size))


def _identify(model: ServedModel, tokenizer: Tokenizer, config: Config) -> CacheIdentity:
    """Returns what all K/V of this engine has in common."""
    return CacheIdentity(
        weights=model.weights_digest,
        tokenizer=tokenizer.digest,
        positions=model.positions,
        kv_dtype=model.kv_dtype,
        kv_scales=model.kv_scales,
        page_size=config.kv.page_size,
    )
