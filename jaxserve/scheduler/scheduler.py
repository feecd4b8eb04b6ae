"""Requests from the queue to their end: what a step is to do, and what came of it."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidRequestError
from jaxserve.metrics import Metrics
from jaxserve.plan import Chunk, StepLimits, StepPlan, StepResult, TokenLogprobs
from jaxserve.request import FinishReason, Request, Sequence, SequenceState
from jaxserve.scheduler.admission import Admission
from jaxserve.scheduler.deadlines import Deadlines, is_ended
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.planner import Planner
from jaxserve.scheduler.running_set import find_unforked
from jaxserve.scheduler.step_time import StepTimes, measure_work


@dataclasses.dataclass(slots=True, eq=False)
class Update:
    """What a committed step brought one live choice. Its fields have places, as one is made of
    every token.

    Attributes:
      token_id: the sampled token, an end token too; None where the logits were not finite, or
        nothing was sampled.
      finish: why the choice ends with this; the engine then gives it to `Scheduler.end`.
      logprobs: the token's, where they were asked for.
      prompt_logprobs: of the prompt's next tokens, in order: those of a request's updates together
        are the prompt's from its second token on. They come once, a preemption or not, before its
        first token or with it.
    """

    sequence: Sequence
    token_id: int | None = None
    finish: FinishReason | None = None
    not_finite: bool = False
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


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
        self.step_times = step_times or StepTimes()
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
            Admission(self.step_times, self._running, limits) if config.policy == "edf" else None
        )
        self._new: list[Request] = []  # with edf: whose deadlines nobody has looked at
        self._planned_s: dict[int, float] = {}  # of steps in flight
        self._read_s = -math.inf  # when the last result was
        self._deadlines = Deadlines()
        self._next_sequence_id = 1
        self._live: dict[int, Sequence] = {}
        self._owners: dict[int, Request] = {}  # of all choices of requests that have not ended
        self._num_live_requests = 0
        self._ended: set[int] = set()  # reported as ended, and not yet given to end() or finish()
        metrics.kv_capacity_tokens.set(pool.capacity_tokens)

    @property
    def num_waiting(self) -> int:
        """Requests none of whose choices runs."""
        return self._num_live_requests - self.num_running

    @property
    def num_running(self) -> int:
        """Requests one of whose choices runs."""
        return len({id(sequence.request) for sequence in self._running})

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
        for choice in range(request.sampling.num_choices):
            state = SequenceState.UNFORKED if choice else SequenceState.WAITING
            sequence = Sequence(
                id=self._next_sequence_id, request=request, choice=choice, state=state
            )
            self._next_sequence_id += 1
            request.sequences.append(sequence)
            self._live[sequence.id] = sequence
            self._owners[sequence.id] = request
        self._num_live_requests += 1
        self._waiting.add(request.sequences[0])
        self._deadlines.add(request)
        if self._admission is not None:
            self._new.append(request)

    def expired(self, now_s: float) -> list[Request]:
        """Returns, once, the requests that are late; the engine finishes each of them.

        To be called with the same time before `schedule`, which admits nobody who is late.
        """
        return self._deadlines.pop_expired(now_s)

    def unreachable(self, now_s: float) -> list[tuple[Request, float]]:
        """Returns, once, the requests that cannot meet what is due of them, and by how many seconds
        they would miss it; the engine finishes each of them before `schedule`. With policy edf each
        new one is looked at, and who is to start next, while no token of it was computed.
        """
        if self._admission is None:
            return []
        found: list[tuple[Request, float]] = []
        new, self._new = self._new, []
        for request in new:
            first = request.sequences[0]
            if first.state is not SequenceState.WAITING:
                continue
            ahead = self._waiting.find_before(first)
            if late_s := self._admission.late_by_s(request, ahead, now_s):
                found.append((request, late_s))
                self.finish(request)
        while (next_up := self._waiting.find_first()) and not next_up.last_step:
            late_s = self._admission.late_by_s(next_up.request, (), now_s)
            if not late_s:
                break
            found.append((next_up.request, late_s))
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
        self._reuse.leave(sequence, is_in_flight=self._planner.is_in_flight(sequence))
        sequence.num_in_flight = 0
        self._ended.discard(sequence.id)
        del self._live[sequence.id]
        if unforked:  # the next choice computes the prompt
            unforked[0].state = SequenceState.WAITING
            unforked[0].last_step = sequence.last_step  # scores may be in flight
            self._waiting.add(unforked[0])
        if is_ended(sequence.request):
            for ended in sequence.request.sequences:
                del self._owners[ended.id]
            self._num_live_requests -= 1
            self._deadlines.trim(self._num_live_requests)

    def preempt(self, request: Request) -> None:
        """Takes rows and pages of a request's running choices back; each is recomputed from its
        first token."""
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
        plan = self._planner.plan(now_s)
        if plan.has_work:
            self._planned_s[plan.step_id] = now_s
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
        if now_s is not None:
            self._time_step(plan, result, seconds=now_s - max(planned_s, self._read_s))
            self._read_s = now_s
        updates: list[Update] = []
        num_surplus = num_useful = 0
        is_plain = not result.not_finite and not result.logprobs
        for chunk in plan.chunks:
            if is_plain and chunk.samples and chunk.num_tokens == 1 and not chunk.forks:
                sequence = self._live.get(chunk.sequence_id)
                if sequence is not None and chunk.scoring is None:
                    num_useful += 1
                    updates.append(self._settle_token(sequence, chunk, result, stopped))
                    continue
            live = self._find_live(chunk)
            self._publish(chunk, live, result)
            num_useful += bool(live)
            if chunk.samples:
                num_surplus += 1 + len(chunk.forks) - len(live)
                new = [self._settle(sequence, result, stopped) for sequence in live]
            else:
                new = self._settle_prompt(live, chunk)
            if chunk.scoring and (request := self._owners.get(chunk.sequence_id)):
                new = new or [Update(sequence=self._get_live(request))]
                self._take_scores(new[0], chunk, result)
            updates += new
        self._reuse.retire(plan.step_id)
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
        num_running = self.num_running
        metrics.requests_running.set(num_running)
        metrics.requests_waiting.set(self._num_live_requests - num_running + num_new)
        metrics.waiting_tokens.set(self.waiting_tokens + num_new_tokens)
        metrics.kv_usage.set(1 - pool.num_free / pool.num_usable)
        num_used = sum(sequence.num_computed for sequence in self._running)
        reserved = pool.num_held * self._page_bytes
        used = (num_used - pool.num_repeated_tokens) * self._page_bytes / pool.page_size
        metrics.kv_reserved_bytes.set(reserved)
        metrics.kv_used_bytes.set(used)
        metrics.kv_stranded_bytes.set(reserved - used)

    def check(self) -> None:
        """Asserts that every page and row is in exactly one place, and the queues agree."""
        self._running.check()
        self._reuse.check(set(self._live))
        live = self._live.values()
        unforked = [s for s in live if s.state is SequenceState.UNFORKED]
        num_known = len(self._running) + len(self._waiting) + len(unforked)
        assert len(live) == num_known, "a sequence is lost"
        num_requests = len({id(sequence.request) for sequence in live})
        owners = {id(request) for request in self._owners.values()}
        assert len(owners) == num_requests, "an ended request is remembered"
        assert num_requests == self._num_live_requests, f"{num_requests} requests are live"
        for sequence in unforked:
            others = [s for s in sequence.request.sequences if s.id in self._live]
            firsts = [s for s in others if s.state is not SequenceState.UNFORKED]
            assert len(firsts) == 1, f"nobody computes the prompt for sequence {sequence.id}"

    def _time_step(self, plan: StepPlan, result: StepResult, *, seconds: float) -> None:
        """Takes in how long a step took, unless it waited for something beside the device."""
        if plan.needs_masks or result.compile_s or seconds <= 0:
            return
        if self._admission is not None:
            self._admission.note_step(seconds)
        error = self.step_times.observe(result.bucket, measure_work(plan), seconds)
        if error is not None:
            self._metrics.step_time_error.observe(error)

    def _settle(self, sequence: Sequence, result: StepResult, stopped: Collection[int]) -> Update:
        """Appends the sampled token and decides whether the sequence ends with it."""
        sequence.num_in_flight -= 1
        if sequence.id in result.not_finite:
            self._ended.add(sequence.id)
            return Update(sequence=sequence, not_finite=True)
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
            if self._admission is not None:
                self._admission.note_end(sequence)
        return Update(
            sequence=sequence,
            token_id=token_id,
            finish=finish,
            logprobs=result.logprobs.get(sequence.id),
        )

    def _publish(self, chunk: Chunk, live: list[Sequence], result: StepResult) -> None:
        """Keeps the pages that a chunk filled, now that it is known what came of it."""
        not_finite, end = result.not_finite, chunk.start + chunk.num_tokens
        if not_finite and _has_failed(chunk, not_finite):
            self._reuse.forget(chunk.sequence_id, self._live.get(chunk.sequence_id))
            return
        page_size = self._pool.page_size
        if chunk.start // page_size < end // page_size:
            running = (s for s in live if s.state is SequenceState.RUNNING)
            holder = next(running, None)  # None: who computed it has given its pages up
            if holder is not None:
                self._reuse.publish(holder, end)
        if chunk.samples:
            self._reuse.prove(chunk.sequence_id)

    def _settle_token(
        self, sequence: Sequence, chunk: Chunk, result: StepResult, stopped: Collection[int]
    ) -> Update:
        """Does what `_publish` and `_settle` do, for one token of one that decodes alone."""
        if self._reuse.is_on:
            end = chunk.start + 1
            if not end % self._pool.page_size and sequence.state is SequenceState.RUNNING:
                self._reuse.publish(sequence, end)
            self._reuse.prove(sequence.id)
        request, output = sequence.request, sequence.output
        token_id = result.token_ids[sequence.id]
        may_end = len(output) + 1 >= request.max_tokens or sequence.id in stopped
        if may_end or token_id in request.stop_ids:
            return self._settle(sequence, result, stopped)
        sequence.num_in_flight -= 1
        output.append(token_id)
        return Update(sequence, token_id)

    def _find_live(self, chunk: Chunk) -> list[Sequence]:
        """Returns those of a chunk's choices that have not ended."""
        first = self._live.get(chunk.sequence_id)
        live = [] if first is None else [first]
        if not chunk.forks:
            return live
        ids = [fork.sequence_id for fork in chunk.forks]
        return live + [self._live[id_] for id_ in ids if id_ in self._live]

    def _get_live(self, request: Request) -> Sequence:
        return next(sequence for sequence in request.sequences if sequence.id in self._live)

    def _take_scores(self, update: Update, chunk: Chunk, result: StepResult) -> None:
        """Adds a chunk's part of its prompt's log-probabilities to the request's update."""
        if chunk.sequence_id in result.not_finite:
            update.not_finite, update.token_id, update.finish = True, None, None
            self._ended.add(update.sequence.id)
            return
        assert chunk.scoring is not None
        update.prompt_logprobs = tuple(result.prompt_logprobs[chunk.sequence_id])
        update.sequence.request.num_scored = chunk.scoring.first + len(chunk.scoring.targets)

    def _settle_prompt(self, live: list[Sequence], chunk: Chunk) -> list[Update]:
        """Ends a request that wants its prompt scored and no more, after the last chunk of it."""
        if not live or live[0].request.max_tokens:
            return []
        if chunk.start + chunk.num_tokens < live[0].num_tokens:
            return []
        ended = [other for other in live[0].request.sequences if other.id in self._live]
        self._ended.update(other.id for other in ended)
        return [Update(sequence=other, finish=FinishReason.MAX_TOKENS) for other in ended]


def _has_failed(chunk: Chunk, not_finite: Collection[int]) -> bool:
    """Whether logits of a chunk, or of a choice forked from it, were not finite."""
    return chunk.sequence_id in not_finite or any(
        fork.sequence_id in not_finite for fork in chunk.forks
    )
