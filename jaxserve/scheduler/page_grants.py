"""What a sequence's next tokens take beside their place in the step: pages, copies, forks."""

from jaxserve.metrics import Metrics
from jaxserve.request import Sequence
from jaxserve.scheduler.fair_shares import FairShares
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.restraint import Restraint
from jaxserve.scheduler.running_set import RunningSet, find_unforked, is_ending, num_kept_rows
from jaxserve.scheduler.step_builder import StepBuilder


class PageGrants:
    """Whoever writes into a shared page copies it first, the last holder excepted."""

    def __init__(
        self,
        *,
        pool: PagePool,
        running: RunningSet,
        needs: PageNeeds,
        shares: FairShares | None,
        restraint: Restraint,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._running = running
        self._needs = needs
        self._shares = shares
        self._restraint = restraint
        self._metrics = metrics

    def allocate(self, num_pages: int) -> list[int]:
        self._metrics.pages_allocated.inc(num_pages)
        return self._pool.allocate(num_pages)

    def plan(
        self,
        sequence: Sequence,
        num_tokens: int,
        step: StepBuilder,
        *,
        new_pages: tuple[int, ...] = (),
    ) -> None:
        """Plans a sequence's next tokens, with the pages they need."""
        self._restraint.count(sequence, num_tokens, step)
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
        sequence.last_step = step.step_id

    def _replace_page(
        self, sequence: Sequence, index: int, page: int, *, step: StepBuilder
    ) -> None:
        """Has a sequence write into a copy of a page that others read."""
        shared = sequence.pages[index]
        step.copy_page(shared, page)
        self._pool.release([shared], last_step=step.step_id)
        sequence.pages[index] = page

    def _fork(self, first: Sequence, step: StepBuilder) -> list[Sequence]:
        """Starts a request's other choices where its first has the prompt with this step."""
        prompt_len = len(first.request.prompt)
        shared = first.pages[: self._pool.pages_for(prompt_len)]
        forks = find_unforked(first)
        for sequence in forks:
            self._running.start(sequence)
            self._pool.share(shared, prompt_len)
            sequence.pages += shared
            if self._needs.reserves_all:
                num_own = self._needs.num_to_hold(sequence) - len(shared)
                self._metrics.reserved_pages.inc(num_own)
                sequence.pages += self.allocate(num_own)
            step.load_row(sequence)
            sequence.num_computed = prompt_len
            sequence.num_in_flight = 1
            sequence.last_step = step.step_id
            if not is_ending(sequence):
                step.num_promised += self._needs.num_promised(sequence)
        self._metrics.forked_choices.inc(len(forks))
        return forks
