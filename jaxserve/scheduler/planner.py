"""What a step does: who of those that run is paid in it, before others start or give up."""

from collections.abc import Callable
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan
from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.chunk_size import ChunkSize
from jaxserve.scheduler.fair_shares import build_shares
from jaxserve.scheduler.page_grants import PageGrants
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import build_order
from jaxserve.scheduler.preemption import Preemption
from jaxserve.scheduler.prefix_order import PrefixOrder
from jaxserve.scheduler.prefix_reuse import PrefixReuse
from jaxserve.scheduler.restraint import Restraint
from jaxserve.scheduler.running_set import RunningSet, is_ending
from jaxserve.scheduler.starts import Starts
from jaxserve.scheduler.step_builder import StepBuilder
from jaxserve.scheduler.step_time import StepTimes
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Planner:
    """Moves sequences between the queue and the running set, and plans their tokens.

    Running and waiting have the same order, the policy's, which never changes: a preempted
    sequence keeps its place, and no two take turns in preempting each other.

    A request's first choice computes the prompt. In the step that ends it the others are forked:
    they share its pages and sample beside it. From there on each choice is on its own, after a
    preemption too.

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
        weight_of: Callable[[str], float],
        step_times: StepTimes,
    ) -> None:
        """Raises ConfigError where the step is too small for a prompt."""
        order = build_order(config)
        max_step_tokens = config.max_step_tokens or limits.max_rows + limits.max_chunk_tokens
        self._max_step_tokens = max_step_tokens
        shares = self._shares = build_shares(config, weight_of, max_step_tokens)
        waiting = self.waiting = WaitingQueue(order, shares=shares)
        running = self.running = RunningSet(
            pool, num_rows=min(config.max_seqs, limits.max_seqs), order=order
        )
        needs = self._needs = PageNeeds(pool, running, reserve=reserve)
        reuse = self.reuse = PrefixReuse(pool, metrics, chunk_tokens=limits.max_chunk_tokens)
        self.preemption = Preemption(
            pool=pool,
            waiting=waiting,
            running=running,
            needs=needs,
            reuse=reuse,
            order=order,
            shares=shares,
            max_preemptions=config.max_preemptions,
            metrics=metrics,
        )
        self._is_static = config.batching == "static"
        self._may_split = config.chunked_prefill
        self._restraint = Restraint(running, shares, limits, may_split=self._may_split)
        self._grants = PageGrants(
            pool=pool,
            running=running,
            needs=needs,
            shares=shares,
            restraint=self._restraint,
            metrics=metrics,
        )
        prefix_order = (
            PrefixOrder(waiting, reuse, max_overtakes=config.prefix_max_overtakes, metrics=metrics)
            if config.prefix_order
            else None
        )
        self._starts = Starts(
            pool=pool,
            waiting=waiting,
            running=running,
            needs=needs,
            reuse=reuse,
            grants=self._grants,
            restraint=self._restraint,
            prefix_order=prefix_order,
            is_static=self._is_static,
            may_split=self._may_split,
            metrics=metrics,
        )
        self._pool = pool
        self._limits = limits
        self._metrics = metrics
        self._max_chunks = min(config.max_chunks, limits.max_chunks)
        self._may_take_decodes = min(limits.max_rows, max_step_tokens) >= running.num_rows
        # n tokens of k sequences take as many pages as of one, and k more at most.
        self._max_chunk_pages = pool.pages_for(limits.max_chunk_tokens)
        self._check_step(max_model_tokens)
        self.chunk_size = (
            ChunkSize(config.target_itl_s, step_times, limits) if config.target_itl_s else None
        )
        self._next_step = 1

    @property
    def num_in_flight(self) -> int:
        """Plans with work that are not retired yet."""
        return self._next_step - 1 - self._pool.retired_step

    def plan(self, now_s: float) -> StepPlan:
        """Returns the next step's work; without work where there is none, or it must wait."""
        step = StepBuilder(
            self._limits,
            step_id=self._next_step,
            max_tokens=self._max_step_tokens,
            max_chunks=self._max_chunks,
            max_chunk_tokens=self._find_chunk_size(),
        )
        running = list(self.running)
        if self._max_step_tokens < self._limits.max_rows + self._limits.max_chunk_tokens:
            step.num_decoding = sum(s.num_owed == 1 and not is_ending(s) for s in running)
        if self._shares is not None:
            self._shares.find_ahead()
        if not self._is_static:
            self._start_urgent(step, now_s)
        self._take_decodes(step)
        # not those; and who was preempted to make room may have been started again
        running = [s for s in running if s.last_step != step.step_id]
        self._pay_running(running, step, now_s)
        # After a preemption pages are short, and admitting would thrash; but if there is nothing
        # else to do, admitting is what goes on.
        if not self.preemption.has_preempted or not (step.num_chunks or self.num_in_flight):
            self._starts.start_all(step, now_s)
        else:
            step.waits_for = "pages"
        return self._finish_plan(step)

    def _take_decodes(self, step: StepBuilder) -> None:
        """Plans all at once who need nothing but their next token. Where somebody may have to give
        way, for rows, tokens or pages, all are asked in their order instead."""
        if not self._may_take_decodes:
            return
        running, table = self.running, self.running.decodes
        rows_N = table.find_ready()
        num_others = running.num_rows - running.num_free_rows - len(rows_N)  # with forks to come
        if self._pool.num_free < num_others + self._max_chunk_pages:
            table.clear()
            return
        step.takes_decodes = True
        decodes = table.take(rows_N, step.step_id)
        self._metrics.decode_table_tokens.inc(len(decodes))
        if self._shares is not None:
            for sequence in table.sequences_of(decodes):
                self._shares.count_token(sequence.request.tenant)
        step.num_decoding = max(step.num_decoding - len(decodes), 0)
        step.add_decodes(decodes, num_promised=table.num_full(decodes))

    def _find_chunk_size(self) -> int | None:
        """Returns the prompt tokens that the target leaves; None where there is none."""
        if self.chunk_size is None:
            return None
        if not len(self.waiting) and all(s.num_owed <= 1 for s in self.running):
            return None  # nobody has a prompt to compute
        return self.chunk_size.find(self.running)

    def retire(self, step_id: int) -> None:
        """The step's result is on the host: nothing of it is written any more."""
        assert step_id == self._pool.retired_step + 1, f"step {step_id} is out of order"
        self._pool.retire(step_id)

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

    def _start_urgent(self, step: StepBuilder, now_s: float) -> None:
        """Has others give room up for who waits and comes before them, and starts it at once where
        its pages do not wait for a step in flight."""
        num_promised = 0
        while first := self.preemption.make_room(step.step_id):
            step.made_room_for = first
            step.num_promised = sum(map(self._needs.num_promised, self.running))
            if not self._starts.start_first(step, now_s):
                break
            num_promised += self._needs.num_promised(first)
            self._metrics.joined_running.inc()
        step.num_promised = num_promised

    def _pay_running(self, running: list[Sequence], step: StepBuilder, now_s: float) -> None:
        """Plans running sequences in order; when pages run out, the cheapest to lose gives its up.

        With shares, prompts come behind all others, and take turns by tenant with what waits.
        """
        prompts: list[Sequence] = []
        for sequence in running:
            if self._pay_token(sequence, step):
                continue
            if sequence.state is not SequenceState.RUNNING or is_ending(sequence):
                continue  # preempted for one before it, or with nothing left to plan
            num_owed = sequence.num_owed
            if num_owed > 1 and self._shares is not None:
                prompts.append(sequence)
                continue
            if step.num_decoding and num_owed == 1:
                step.num_decoding -= 1
            self._pay(sequence, step)
        step.num_decoding = 0  # those that were preempted before their turn
        if self._shares is not None:
            self._shares.charge_counted()
        if prompts:
            self._pay_prompts(prompts, step, now_s)

    def _pay_token(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Plans the next token of one that decodes alone, in the pages it has or with a free one
        more; returns whether that was all there is to do. It says what `_pay` would, in a quarter
        of the time.
        """
        request, start = sequence.request, sequence.num_computed
        num_sampled = len(sequence.output) + sequence.num_in_flight
        if num_sampled >= request.max_tokens or len(request.prompt) + num_sampled - start != 1:
            return False
        if start < sequence.num_lost or not step.has_row:
            return False
        if not request.is_followed and (
            len(request.sequences) > 1 or request.sampling.prompt_logprobs is not None
        ):
            return False
        lacks_page = start == len(sequence.pages) * self._pool.page_size
        if lacks_page and (step.pages_are_short or not self._pool.num_free):
            return False
        new_pages = self._grow(1) if lacks_page else ()
        if step.num_decoding:
            step.num_decoding -= 1
        if self._shares is not None:
            self._shares.count_token(request.tenant)
        step.add_token(sequence, start, num_sampled, new_pages)
        step.num_promised += start + 1 == len(sequence.pages) * self._pool.page_size
        if step.takes_decodes and request.is_followed:
            self.running.decodes.enter(sequence)
        return True

    def _pay(self, sequence: Sequence, step: StepBuilder) -> None:
        """Plans what the step has room for of a running sequence's tokens."""
        num_tokens = step.room_for(sequence.num_owed, self._may_split)
        num_tokens = self._restraint.limit_tokens(sequence, num_tokens, step)
        if num_tokens and (pages := self._take_pages(sequence, num_tokens, step)) is not None:
            self._grants.plan(sequence, num_tokens, step, new_pages=pages)
        if sequence.state is SequenceState.RUNNING:  # it may have preempted itself
            step.num_promised += self._needs.num_promised(sequence)

    def _pay_prompts(self, prompts: list[Sequence], step: StepBuilder, now_s: float) -> None:
        """Plans running prompts, whose tenant was given least first; one that waits comes before
        them where its tenant was given less, so that nobody's prompts fill the steps."""
        assert self._shares is not None
        level = self._shares.level
        prompts = [s for s in prompts if s.state is SequenceState.RUNNING]
        promised = {s: self._needs.num_promised(s) for s in prompts}
        step.num_promised += sum(promised.values())
        least = min((level(s.request.tenant) for s in prompts), default=0.0)
        if not self.preemption.has_preempted and not self._is_static:
            while first := self.waiting.find_first():
                if level(first.request.tenant) >= least or not self._starts.start_first(
                    step, now_s
                ):
                    break
                self._metrics.joined_running.inc()
        for sequence in sorted(prompts, key=lambda s: (level(s.request.tenant), s.id)):
            step.num_promised -= promised[sequence]
            if sequence.state is SequenceState.RUNNING:
                self._pay(sequence, step)

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
            victim = self.preemption.find_victim(step.step_id)
            self.preemption.preempt(victim)
            if victim is sequence:
                return None
            num_needed = self._needs.num_needed(sequence, num_tokens)  # it may have shared a page
        if num_needed > self._pool.num_free:
            step.pages_are_short = True
            step.waits_for = "pages"
            return None
        if self._needs.writes_shared(sequence):
            return tuple(self._grants.allocate(num_needed))
        return self._grow(num_needed)

    def _grow(self, num_pages: int) -> tuple[int, ...]:
        """Returns free pages for a running sequence's table; there are as many."""
        self._metrics.grown_pages.inc(num_pages)
        return tuple(self._grants.allocate(num_pages))

    def _finish_plan(self, step: StepBuilder) -> StepPlan:
        preempted = self.preemption.pop_preempted()
        if not step.num_chunks:
            reason = step.waits_for if self.num_in_flight else None
            if reason:
                self._metrics.overlap_waits.labels(reason).inc()
            return StepPlan(step_id=self._next_step, preempted=preempted, retire_first=reason)
        plan = step.build(preempted, self.reuse.pop_moves(step.step_id))
        self._next_step += 1
        metrics = self._metrics
        metrics.offered_rows.inc(self._starts.batch_rows if self._is_static else step.num_chunks)
        if step.is_mixed:
            metrics.mixed_steps.inc()
        if step.is_limited:
            metrics.limited_chunk_steps.inc()
        if step.num_chunked_prompts:
            metrics.chunked_prompts.inc(step.num_chunked_prompts)
        if step.num_recomputed:
            metrics.recomputed_tokens.inc(step.num_recomputed)
        return plan
