"""Requests from the queue to their end: what a step is to do, and what came of it."""

import dataclasses
from collections.abc import Collection
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidRequestError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan, StepResult
from jaxserve.request import FinishReason, Request, Sequence, SequenceState
from jaxserve.scheduler.deadlines import Deadlines
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.planner import Planner


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Update:
    """What a committed step brought one live sequence.

    Attributes:
      token_id: the sampled token, an end token too; None where the logits were not finite.
      finish: why the sequence ends with this token; the engine then ends the request.
    """

    sequence: Sequence
    token_id: int | None
    finish: FinishReason | None = None
    not_finite: bool = False


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
    ) -> None:
        """Args:
          overlap_depth: launched steps that may wait for their commit; 1 is no overlap.
          page_bytes: size of a page over all layers, for the gauges.

        Raises:
          ConfigError: a step is too small for a prompt.
        """
        self._planner = Planner(
            config=config,
            reserve=reserve,
            pool=pool,
            limits=limits,
            max_model_tokens=max_model_tokens,
            metrics=metrics,
        )
        self._waiting = self._planner.waiting
        self._running = self._planner.running
        self._pool = pool
        self._max_model_tokens = max_model_tokens
        self._overlap_depth = overlap_depth
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._deadlines = Deadlines()
        self._next_sequence_id = 1
        self._live: dict[int, Sequence] = {}
        self._ended: set[int] = set()  # reported as ended, and not yet given to finish()
        metrics.kv_capacity_tokens.set(pool.capacity_tokens)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return self._waiting.num_prompt_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Refuses what could never run. Any thread may call it.

        All of prompt and output is counted, though the last token's K/V is never written: exactly
        full is allowed, and what is advertised as capacity is what fits.

        Raises:
          InvalidRequestError: prompt and output are longer than the context or the pool.
        """
        total = prompt_len + max_tokens
        capacity = self._pool.capacity_tokens
        limit = min(self._max_model_tokens, capacity)
        if total <= limit:
            return
        what = "this model's context" if limit == self._max_model_tokens else "the KV pool"
        raise InvalidRequestError(
            f"prompt ({prompt_len}) + max_tokens ({max_tokens}) is {total} tokens, but {what} "
            f"holds {limit}; shorten the prompt or lower max_tokens",
            field="max_tokens" if prompt_len < limit else "prompt",
        )

    def add(self, request: Request) -> None:
        """Queues a request that `check_fits` has let through, and makes its sequence."""
        sequence = Sequence(id=self._next_sequence_id, request=request)
        self._next_sequence_id += 1
        request.sequences.append(sequence)
        self._live[sequence.id] = sequence
        self._waiting.append(sequence)
        self._deadlines.add(request)

    def expired(self, now_s: float) -> list[Request]:
        """Returns, once, the requests that are late; the engine finishes each of them.

        To be called with the same time before `schedule`, which admits nobody who is late.
        """
        return self._deadlines.pop_expired(now_s)

    def finish(self, request: Request) -> None:
        """Ends a request in any state, and takes back its rows and pages. Twice is as once."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.FINISHED:
                continue
            if sequence.state is SequenceState.RUNNING:
                self._running.stop(sequence)
            else:
                self._waiting.remove(sequence)
            sequence.state = SequenceState.FINISHED
            sequence.num_in_flight = 0
            self._ended.discard(sequence.id)
            del self._live[sequence.id]
        self._deadlines.trim(len(self._live))

    def preempt(self, request: Request) -> None:
        """Takes rows and pages of a running request back; it is recomputed from its first token."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.RUNNING:
                self._planner.preempt(sequence)

    def schedule(self, now_s: float) -> StepPlan:
        """Returns the next step's work; without work where there is none, or it must wait.

        Args:
          now_s: monotonic; who is late by now is not admitted.
        """
        in_flight = self._planner.num_in_flight
        assert in_flight < self._overlap_depth, f"{in_flight} steps are in flight already"
        assert not self._ended, f"sequences {self._ended} have ended and were not finished"
        return self._planner.plan(now_s)

    def commit(
        self, plan: StepPlan, result: StepResult, stopped: Collection[int] = ()
    ) -> list[Update]:
        """Takes in a step's result, in launch order, and returns what is new for live sequences.

        Args:
          stopped: ids of sequences whose text ended with this token (a stop string).
        """
        self._planner.retire(plan.step_id)
        updates = []
        num_surplus = num_useful = 0
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is None:
                num_surplus += chunk.samples
                continue
            num_useful += 1
            if chunk.samples:
                updates.append(self._settle(sequence, result, stopped))
        self._metrics.useful_rows.inc(num_useful)
        if num_surplus:
            self._metrics.surplus_tokens.inc(num_surplus)
        return updates

    def update_gauges(self, num_new: int = 0, num_new_tokens: int = 0) -> None:
        """Sets the levels: queue, rows, and bytes of K/V.

        Args:
          num_new: requests on their way here, which wait too.
          num_new_tokens: of their prompts.
        """
        metrics, pool = self._metrics, self._pool
        metrics.requests_running.set(len(self._running))
        metrics.requests_waiting.set(len(self._waiting) + num_new)
        metrics.waiting_tokens.set(self.waiting_tokens + num_new_tokens)
        metrics.kv_usage.set(1 - pool.num_free / pool.num_usable)
        num_used = sum(sequence.num_computed for sequence in self._running)
        reserved = sum(len(sequence.pages) for sequence in self._running) * self._page_bytes
        used = num_used * self._page_bytes / pool.page_size
        metrics.kv_reserved_bytes.set(reserved)
        metrics.kv_used_bytes.set(used)
        metrics.kv_stranded_bytes.set(reserved - used)

    def check(self) -> None:
        """Asserts that every page and row is in exactly one place, and the queues agree."""
        self._running.check()
        assert len(self._live) == len(self._running) + len(self._waiting), "a sequence is lost"

    def _settle(self, sequence: Sequence, result: StepResult, stopped: Collection[int]) -> Update:
        """Appends the sampled token and decides whether the sequence ends with it."""
        sequence.num_in_flight -= 1
        if sequence.id in result.not_finite:
            self._ended.add(sequence.id)
            return Update(sequence=sequence, token_id=None, not_finite=True)
        request = sequence.request
        token_id = result.token_ids[sequence.id]
        finish = None
        if token_id in request.stop_ids and len(sequence.output) >= request.sampling.min_tokens:
            finish = request.stop_ids[token_id]
        sequence.output.append(token_id)
        if finish is None and sequence.id in stopped:
            finish = FinishReason.STOP
        if finish is None and len(sequence.output) >= request.max_tokens:
            by_context = request.ends_by_context
            finish = FinishReason.CONTEXT_LENGTH if by_context else FinishReason.MAX_TOKENS
        if finish:
            self._ended.add(sequence.id)
        return Update(sequence=sequence, token_id=token_id, finish=finish)
