"""The policy: which sequences a step pays, who is admitted, and who gives pages up."""

from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan
from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.deadlines import is_expired
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_reuse import Match, PrefixReuse
from jaxserve.scheduler.running_set import RunningSet, find_unforked, is_ending, num_kept_rows
from jaxserve.scheduler.step_builder import StepBuilder
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Planner:
    """Moves sequences between the queue and the running set, and plans their tokens.

    Order is by class, then by age (the id); running and waiting use the same, so a preempted
    sequence keeps its place and two of a class never take turns in preempting each other.

    A request's first choice computes the prompt. In the step that ends it the others are forked:
    they share its pages and sample beside it. Whoever writes into a shared page copies it first,
    the last holder excepted. From there on each choice is on its own, after a preemption too.

    A plan is empty only if nothing is unfinished or a launched step has still to be committed.
    """

    def __init__(
        self,
        *,
        config: SchedulerSection,
        reserve: Literal["on_demand", "max_length"],
        pool: PagePool,
        limits: StepLimits,
        max_model_tokens: int,
        metrics: Metrics,
    ) -> None:
        """Raises ConfigError where the step is too small for a prompt."""
        self.waiting = WaitingQueue()
        self.running = RunningSet(pool, num_rows=min(config.max_seqs, limits.max_seqs))
        self._is_static = config.batching == "static"
        self._may_split = config.chunked_prefill
        self._reserves_all = reserve == "max_length"
        self._pool = pool
        self._needs = PageNeeds(pool, self.running, reserve=reserve)
        self.reuse = PrefixReuse(pool, metrics)
        self._limits = limits
        self._metrics = metrics
        self._max_chunks = min(config.max_chunks, limits.max_chunks)
        self._max_step_tokens = config.max_step_tokens or limits.max_rows + limits.max_chunk_tokens
        self._check_step(max_model_tokens)
        self._next_step = 1
        self._retired_step = 0
        self._preempted: list[int] = []  # since the last plan
        self._is_batch_open = True  # static batching: whether the batch still takes members
        self._batch_rows = 0  # static batching: members of the batch

    @property
    def num_in_flight(self) -> int:
        """Plans with work that are not retired yet."""
        return self._next_step - 1 - self._retired_step

    def plan(self, now_s: float) -> StepPlan:
        """Returns the next step's work; without work where there is none, or it must wait."""
        step = StepBuilder(
            self._limits, max_tokens=self._max_step_tokens, max_chunks=self._max_chunks
        )
        self._make_room_for_a_higher_class()
        self._pay_running(step)
        # After a preemption pages are short, and admitting would thrash; but if there is nothing
        # else to do, admitting is what goes on.
        if not self._preempted or not (step.num_chunks or self.num_in_flight):
            self._admit_waiting(step, now_s)
        else:
            step.waits_for = "pages"
        return self._finish_plan(step)

    def retire(self, step_id: int) -> None:
        """The step's result is on the host: nothing of it is written any more."""
        assert step_id == self._retired_step + 1, f"step {step_id} is out of order"
        self._retired_step = step_id
        self._pool.retire(step_id)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the front of its class, to be computed again from its first token."""
        sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
        sequence.num_preemptions += 1
        self.running.stop(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.put_back(sequence)
        self._preempted.append(sequence.id)
        self._metrics.preemptions.inc()

    def _check_step(self, max_model_tokens: int) -> None:
        tile, chunk_tokens = self._limits.chunk_tile, self._limits.max_chunk_tokens
        if chunk_tokens < tile:
            raise ConfigError(
                f"buckets.chunk_tokens is {chunk_tokens}, less than one tile of {tile} "
                "(buckets.chunk_tile); raise it to a multiple of the tile"
            )
        largest = min(self._max_step_tokens, chunk_tokens // tile * tile)
        if not self._may_split and largest < max_model_tokens:
            raise ConfigError(
                f"scheduler.chunked_prefill is off, but a step takes prompts of {largest} tokens "
                f"and max_model_tokens is {max_model_tokens}; raise buckets.chunk_tokens "
                "and scheduler.max_step_tokens to it, or turn chunked_prefill on"
            )

    def _pay_running(self, step: StepBuilder) -> None:
        """Plans running sequences in order; when pages run out, the last in order gives its up."""
        if self._max_step_tokens < self._limits.max_rows + self._limits.max_chunk_tokens:
            step.num_decoding = sum(s.num_owed == 1 and not is_ending(s) for s in self.running)
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            if is_ending(sequence):
                continue
            if sequence.last_step == self._next_step:
                continue  # forked just now
            if step.num_decoding and sequence.num_owed == 1:
                step.num_decoding -= 1
            num_tokens = step.room_for(sequence.num_owed, self._may_split)
            if num_tokens and (pages := self._take_pages(sequence, num_tokens, step)) is not None:
                self._plan(sequence, num_tokens, step, new_pages=pages)
            if sequence.state is SequenceState.RUNNING:  # it may have preempted itself
                step.num_promised += self._needs.num_promised(sequence)
        step.num_decoding = 0  # those that were preempted before their turn

    def _take_pages(
        self, sequence: Sequence, num_tokens: int, step: StepBuilder
    ) -> tuple[int, ...] | None:
        """Returns the pages a running sequence needs for its next tokens, or None if it must wait.

        What is pending comes with a retire, and what ends in flight soon after: then nobody is
        preempted, the sequence misses a step.
        """
        num_needed = self._needs.num_needed(sequence, num_tokens)
        if not num_needed:
            return ()
        if step.pages_are_short:
            return None
        while num_needed > self._pool.num_free and num_needed > self._needs.num_coming():
            victim = self.running.get_victim()
            self.preempt(victim)
            if victim is sequence:
                return None
            num_needed = self._needs.num_needed(sequence, num_tokens)  # it may have shared a page
        if num_needed > self._pool.num_free:
            step.pages_are_short = True
            step.waits_for = "pages"
            return None
        if not self._needs.writes_shared(sequence):
            self._metrics.grown_pages.inc(num_needed)
        return tuple(self._allocate(num_needed))

    def _make_room_for_a_higher_class(self) -> None:
        """Preempts lower classes for the first in the queue, if that is enough to admit it.

        Strictly lower: two of one class never take each other's place.
        """
        first = self.waiting.find_first()
        if first is None or self._is_static or self.is_in_flight(first):
            return
        priority = first.request.priority
        if not self.running or self.running[-1].request.priority >= priority:
            return
        lower = [s for s in self.running if s.request.priority < priority and not is_ending(s)]
        needs = self._needs
        num_rows, num_pages = 1 + num_kept_rows(first), needs.num_to_admit(first)
        if num_rows > needs.num_coming_rows(lower) or num_pages > needs.num_coming(lower):
            return
        while (
            num_rows > needs.num_coming_rows()
            or num_pages - self.reuse.num_held(first) > needs.num_coming()
        ):
            self.preempt(lower.pop())

    def _admit_waiting(self, step: StepBuilder, now_s: float) -> None:
        """Starts waiting sequences in order, up to the first that cannot start now."""
        if not self.running:
            self._is_batch_open, self._batch_rows = True, 0
        if self._is_static and not self._is_batch_open:
            return
        has_others = len(self.running) > 0
        self._is_batch_open = False
        while admissible := self._find_admissible(step, now_s):
            sequence, match = admissible
            num_tokens = step.room_for(sequence.num_owed - match.num_tokens, self._may_split)
            if not num_tokens:
                self._is_batch_open = True  # only this step is full: it grows on in the next
                break
            self._batch_rows += 1 + num_kept_rows(sequence)
            self._start(sequence, match, num_tokens, step=step)
            if has_others and not self._is_static:  # a static batch is not joined, it is formed
                self._metrics.joined_running.inc()

    def _find_admissible(self, step: StepBuilder, now_s: float) -> tuple[Sequence, Match] | None:
        """Returns the first in the queue if it can start now, and what the cache spares it; nobody
        overtakes it."""
        sequence = self.waiting.find_first()
        if sequence is None or is_expired(sequence.request, now_s):
            return None
        if self.is_in_flight(sequence):  # preempted, and its last token is not here yet
            step.waits_for = "results"
            return None
        if self.running.num_free_rows < 1 + num_kept_rows(sequence):
            step.waits_for = "rows"
            return None
        match = self.reuse.find_affordable(
            sequence,
            num_pages=self._needs.num_to_admit(sequence),
            num_free=self._pool.num_free - step.num_promised,
        )
        if match is None:
            step.waits_for = "pages"
            return None
        return sequence, match

    def _start(
        self, sequence: Sequence, match: Match, num_tokens: int, *, step: StepBuilder
    ) -> None:
        self.waiting.remove(sequence)
        self.running.start(sequence)
        self.reuse.take(sequence, match)
        num_needed = self._pool.pages_for(match.num_tokens + num_tokens)
        if self._reserves_all:
            num_held = self._needs.num_to_hold(sequence)
            self._metrics.reserved_pages.inc(num_held - num_needed)
            num_needed = num_held
        new_pages = self._allocate(num_needed - match.num_pages)
        sequence.pages += new_pages
        if match.source is not None:
            step.copy_page(match.source.page, new_pages[0])
            self.reuse.release_source(match, step_id=self._next_step)
        step.load_row(sequence)
        self._plan(sequence, num_tokens, step)
        step.num_promised += self._needs.num_promised(sequence)

    def _plan(
        self,
        sequence: Sequence,
        num_tokens: int,
        step: StepBuilder,
        *,
        new_pages: tuple[int, ...] = (),
    ) -> None:
        """Plans a sequence's next tokens, with the pages they need."""
        num_before = len(sequence.pages)
        if new_pages and self._needs.writes_shared(sequence):
            num_before = sequence.num_computed // self._pool.page_size
            self._replace_page(sequence, num_before, *new_pages, step=step)
        else:
            sequence.pages += new_pages
        has_forks = num_kept_rows(sequence) > 0 and num_tokens == sequence.num_owed
        step.add(
            sequence,
            num_tokens,
            new_pages=new_pages,
            num_pages_before=num_before,
            forks=self._fork(sequence, step) if has_forks else (),
        )
        sequence.last_step = self._next_step

    def _replace_page(
        self, sequence: Sequence, index: int, page: int, *, step: StepBuilder
    ) -> None:
        """Has a sequence write into a copy of a page that others read."""
        shared = sequence.pages[index]
        step.copy_page(shared, page)
        self._pool.release([shared], last_step=self._next_step)
        sequence.pages[index] = page

    def _fork(self, first: Sequence, step: StepBuilder) -> list[Sequence]:
        """Starts a request's other choices where its first has the prompt with this step."""
        prompt_len = len(first.request.prompt)
        shared = first.pages[: self._pool.pages_for(prompt_len)]
        forks = find_unforked(first)
        for sequence in forks:
            self.running.start(sequence)
            self._pool.share(shared, prompt_len)
            sequence.pages += shared
            if self._reserves_all:
                num_own = self._needs.num_to_hold(sequence) - len(shared)
                self._metrics.reserved_pages.inc(num_own)
                sequence.pages += self._allocate(num_own)
            step.load_row(sequence)
            sequence.num_computed = prompt_len
            sequence.num_in_flight = 1
            sequence.last_step = self._next_step
            if not is_ending(sequence):
                step.num_promised += self._needs.num_promised(sequence)
        self._metrics.forked_choices.inc(len(forks))
        return forks

    def _finish_plan(self, step: StepBuilder) -> StepPlan:
        preempted, self._preempted = tuple(self._preempted), []
        if not step.num_chunks:
            reason = step.waits_for if self.num_in_flight else None
            if reason:
                self._metrics.overlap_waits.labels(reason).inc()
            return StepPlan(step_id=self._next_step, preempted=preempted, retire_first=reason)
        plan = step.build(self._next_step, preempted)
        self._next_step += 1
        metrics = self._metrics
        metrics.offered_rows.inc(self._batch_rows if self._is_static else step.num_chunks)
        if step.is_mixed:
            metrics.mixed_steps.inc()
        if step.num_chunked_prompts:
            metrics.chunked_prompts.inc(step.num_chunked_prompts)
        if step.num_recomputed:
            metrics.recomputed_tokens.inc(step.num_recomputed)
        return plan

    def _allocate(self, num_pages: int) -> list[int]:
        self._metrics.pages_allocated.inc(num_pages)
        return self._pool.allocate(num_pages)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step that it is in has not been committed yet."""
        return sequence.last_step > self._retired_step
