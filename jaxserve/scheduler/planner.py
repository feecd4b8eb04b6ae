"""The policy: which sequences a step pays, who is admitted, and who gives pages up."""

from collections.abc import Callable, Collection
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan
from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.chunk_size import ChunkSize
from jaxserve.scheduler.deadlines import is_expired
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import FairShares, build_order, find_victim
from jaxserve.scheduler.prefix_reuse import Match, PrefixReuse
from jaxserve.scheduler.running_set import RunningSet, find_unforked, is_ending, num_kept_rows
from jaxserve.scheduler.step_builder import StepBuilder
from jaxserve.scheduler.step_time import StepTimes
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Planner:
    """Moves sequences between the queue and the running set, and plans their tokens.

    Running and waiting have the same order, the policy's, which never changes: a preempted
    sequence keeps its place, and no two take turns in preempting each other.

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
        weight_of: Callable[[str], float],
        step_times: StepTimes,
    ) -> None:
        """Raises ConfigError where the step is too small for a prompt."""
        self._order = build_order(config)
        self._shares = FairShares(weight_of) if config.policy == "fair" else None
        self._max_preemptions = config.max_preemptions
        self.waiting = WaitingQueue(self._order, shares=self._shares)
        self.running = RunningSet(
            pool, num_rows=min(config.max_seqs, limits.max_seqs), order=self._order
        )
        self._is_static = config.batching == "static"
        self._may_split = config.chunked_prefill
        self._reserves_all = reserve == "max_length"
        self._pool = pool
        self._needs = PageNeeds(pool, self.running, reserve=reserve)
        self.reuse = PrefixReuse(pool, metrics, chunk_tokens=limits.max_chunk_tokens)
        self._limits = limits
        self._metrics = metrics
        self._max_chunks = min(config.max_chunks, limits.max_chunks)
        self._max_step_tokens = config.max_step_tokens or limits.max_rows + limits.max_chunk_tokens
        self._check_step(max_model_tokens)
        self._chunk_size = (
            ChunkSize(config.target_itl_s, step_times, limits) if config.target_itl_s else None
        )
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
            self._limits,
            max_tokens=self._max_step_tokens,
            max_chunks=self._max_chunks,
            max_chunk_tokens=self._find_chunk_size(),
        )
        self._make_room()
        self._pay_running(step, now_s)
        # After a preemption pages are short, and admitting would thrash; but if there is nothing
        # else to do, admitting is what goes on.
        if not self._preempted or not (step.num_chunks or self.num_in_flight):
            self._admit_waiting(step, now_s)
        else:
            step.waits_for = "pages"
        return self._finish_plan(step)

    def _find_chunk_size(self) -> int | None:
        """Returns the prompt tokens that the target leaves; None where there is none."""
        if self._chunk_size is None:
            return None
        found = self._chunk_size.find(self.running)
        if found < self._limits.max_chunk_tokens:
            self._metrics.limited_chunk_steps.inc()
        return found

    def retire(self, step_id: int) -> None:
        """The step's result is on the host: nothing of it is written any more."""
        assert step_id == self._retired_step + 1, f"step {step_id} is out of order"
        self._retired_step = step_id
        self._pool.retire(step_id)

    def preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue, to be computed again from its first token."""
        sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
        sequence.num_preemptions += 1
        self.running.stop(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.add(sequence)
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

    def _pay_running(self, step: StepBuilder, now_s: float) -> None:
        """Plans running sequences in order; when pages run out, the cheapest to lose gives its up.

        With shares, prompts come behind all others, and take turns by tenant with what waits.
        """
        if self._max_step_tokens < self._limits.max_rows + self._limits.max_chunk_tokens:
            step.num_decoding = sum(s.num_owed == 1 and not is_ending(s) for s in self.running)
        prompts: list[Sequence] = []
        for sequence in list(self.running):
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
        if prompts:
            self._pay_prompts(prompts, step, now_s)

    def _pay_token(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Plans the next token of one that decodes alone, within the pages it has; returns whether
        that was all there is to do. It says what `_pay` would, in a quarter of the time.
        """
        request, start = sequence.request, sequence.num_computed
        num_sampled = len(sequence.output) + sequence.num_in_flight
        if num_sampled >= request.max_tokens or len(request.prompt) + num_sampled - start != 1:
            return False
        room = len(sequence.pages) * self._pool.page_size - start
        if room < 1 or not step.has_row or len(request.sequences) > 1:
            return False
        if start < sequence.num_lost or request.sampling.prompt_logprobs is not None:
            return False
        if step.num_decoding:
            step.num_decoding -= 1
        if self._shares is not None:
            self._shares.charge(request.tenant, 1)
        step.add_token(sequence, start, self._next_step)
        step.num_promised += room < 2
        return True

    def _pay(self, sequence: Sequence, step: StepBuilder) -> None:
        """Plans what the step has room for of a running sequence's tokens."""
        num_tokens = step.room_for(sequence.num_owed, self._may_split)
        if num_tokens and (pages := self._take_pages(sequence, num_tokens, step)) is not None:
            self._plan(sequence, num_tokens, step, new_pages=pages)
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
        if not self._preempted and not self._is_static:
            while first := self.waiting.find_first():
                if level(first.request.tenant) >= least or not self._admit_first(step, now_s):
                    break
                self._metrics.joined_running.inc()
        for sequence in sorted(prompts, key=lambda s: (level(s.request.tenant), s.id)):
            if sequence.state is not SequenceState.RUNNING:
                step.num_promised -= promised[sequence]
                continue
            step.num_promised -= promised[sequence]
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
            victim = self._find_victim()
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

    def _find_victim(self) -> Sequence:
        """Returns whom to preempt for want of pages: nobody that this step has planned already, so
        that the first in order always goes on, and with shares one of the tenant given most."""
        running = [s for s in self.running if s.last_step != self._next_step and not is_ending(s)]
        if self._shares is not None:
            level = self._shares.level
            most = max(level(s.request.tenant) for s in running)
            running = [s for s in running if level(s.request.tenant) == most]
        victim = find_victim(running, self._order, max_preemptions=self._max_preemptions)
        assert victim is not None, "nobody runs"
        return victim

    def _make_room(self) -> None:
        """Preempts others for the first in the queue, if that is enough to admit it.

        Only those that come strictly after it: no two ever take each other's place. Nobody is
        preempted for this more often than the bound.
        """
        first = self.waiting.find_first()
        if first is None or not self.running or self._is_static or self.is_in_flight(first):
            return
        if self._shares is None and self._order(self.running[-1]) < self._order(first):
            return
        if not self._lacks_room(first, ()):
            return
        preempted: list[Sequence] = []
        while self._lacks_room(first, preempted):
            lower = self._find_lower(first, preempted)
            victim = find_victim(lower, self._order, max_preemptions=self._max_preemptions)
            if victim is None:
                return
            preempted.append(victim)
        for victim in preempted:
            self.preempt(victim)

    def _lacks_room(self, first: Sequence, preempted: Collection[Sequence]) -> bool:
        """Whether one that waits could not start even without those, once all in flight retired."""
        needs = self._needs
        if 1 + num_kept_rows(first) > needs.num_coming_rows(preempted):
            return True
        num_pages = needs.num_to_admit(first) - self.reuse.num_held(first)
        return num_pages > needs.num_coming(preempted)

    def _find_lower(self, first: Sequence, preempted: Collection[Sequence]) -> list[Sequence]:
        """Returns who runs and may be preempted for one that waits: of a lower class, with shares
        of its own tenant; or of a tenant that has more of the machine, and would have after."""
        order, priority, tenant = self._order(first), first.request.priority, first.request.tenant
        others = [
            s
            for s in self.running
            if s not in preempted and s.num_preemptions < self._max_preemptions and not is_ending(s)
        ]
        lower = [s for s in others if s.request.priority < priority and self._order(s) > order]
        if self._shares is None:
            return lower
        lower = [s for s in lower if s.request.tenant == tenant]
        return lower or self._find_richer(tenant, first, preempted, others=others)

    def _find_richer(
        self,
        tenant: str,
        first: Sequence,
        preempted: Collection[Sequence],
        *,
        others: list[Sequence],
    ) -> list[Sequence]:
        """Returns those of `others` that are of the tenant with most of rows or pages, by weight,
        if it has no less than this one after giving up one of them."""
        assert self._shares is not None
        page = 1 / self._pool.num_usable
        has: dict[str, float] = {}
        for sequence in self.running:
            part = 0.0 if sequence in preempted else self._part_of(len(sequence.pages) * page)
            name = sequence.request.tenant
            has[name] = has.get(name, 0.0) + part
        mine = has.get(tenant, 0.0) + self._part_of(self._needs.num_to_admit(first) * page)
        weight = self._shares.weight
        names = {s.request.tenant for s in others} - {tenant}
        if not names:
            return []
        richest = max(names, key=lambda name: (has[name] / weight(name), name))
        return [
            s
            for s in others
            if s.request.tenant == richest
            and (has[richest] - self._part_of(len(s.pages) * page)) / weight(richest)
            >= mine / weight(tenant)
        ]

    def _part_of(self, pages: float) -> float:
        """Returns what a sequence has of the machine: of its rows, or of its pages if more."""
        return max(1 / self.running.num_rows, pages)

    def _admit_waiting(self, step: StepBuilder, now_s: float) -> None:
        """Starts waiting sequences in order, up to the first that cannot start now."""
        if not self.running:
            self._is_batch_open, self._batch_rows = True, 0
        if self._is_static and not self._is_batch_open:
            return
        has_others = len(self.running) > 0
        self._is_batch_open = False
        while self._admit_first(step, now_s):
            if has_others and not self._is_static:  # a static batch is not joined, it is formed
                self._metrics.joined_running.inc()

    def _admit_first(self, step: StepBuilder, now_s: float) -> bool:
        """Starts the first in the queue, if it can start now; returns whether it did."""
        admissible = self._find_admissible(step, now_s)
        if admissible is None:
            return False
        sequence, match = admissible
        num_tokens = step.room_for(sequence.num_owed - match.num_tokens, self._may_split)
        if not num_tokens:
            self._is_batch_open = True  # only this step is full: it grows on in the next
            return False
        self._batch_rows += 1 + num_kept_rows(sequence)
        self._start(sequence, match, num_tokens, step=step)
        return True

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
        if not self._is_static and self.reuse.should_wait(
            sequence, match, step_id=self._next_step, is_in_flight=self.is_in_flight
        ):
            step.waits_for = "prefill"
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
        if self._shares is not None:  # what was lost to a preemption is not charged again
            end = sequence.num_computed + num_tokens
            num_new = end - min(end, max(sequence.num_computed, sequence.num_lost))
            self._shares.charge(sequence.request.tenant, num_new)
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
