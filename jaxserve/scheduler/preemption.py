"""Who gives row and pages up, when they are short, and for whom."""

from collections.abc import Collection, Iterable

from jaxserve.metrics import Metrics
from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.fair_shares import FairShares
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.policies import OrderOf, find_victim
from jaxserve.scheduler.prefix_reuse import PrefixReuse
from jaxserve.scheduler.running_set import RunningSet, is_ending, num_kept_rows
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Preemption:
    """Takes running sequences' pages back, to be computed again: for one that runs and comes before
    them, or for the first in the queue. No two ever take each other's place, and nobody is
    preempted for one that waits more often than the bound.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        waiting: WaitingQueue,
        running: RunningSet,
        needs: PageNeeds,
        reuse: PrefixReuse,
        order: OrderOf,
        shares: FairShares | None,
        max_preemptions: int,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._waiting = waiting
        self._running = running
        self._needs = needs
        self._reuse = reuse
        self._order = order
        self._shares = shares
        self._max_preemptions = max_preemptions
        self._metrics = metrics
        self._preempted: list[int] = []  # since the last plan

    @property
    def has_preempted(self) -> bool:
        """Whether anybody was preempted since the last plan."""
        return bool(self._preempted)

    def pop_preempted(self) -> tuple[int, ...]:
        """Returns, once, who was."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue, to be computed again from its first token."""
        sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
        sequence.num_preemptions += 1
        self._running.stop(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)
        self._preempted.append(sequence.id)
        self._metrics.preemptions.inc()

    def find_victim(self, step_id: int) -> Sequence:
        """Returns whom to preempt for want of pages: nobody that this step has planned already, so
        that the first in order always goes on, and with shares one of the tenant given most."""
        running = [s for s in self._running if s.last_step != step_id and not is_ending(s)]
        if self._shares is not None:
            level = self._shares.level
            most = max(level(s.request.tenant) for s in running)
            running = [s for s in running if level(s.request.tenant) == most]
        victim = find_victim(running, self._order, max_preemptions=self._max_preemptions)
        assert victim is not None, "nobody runs"
        return victim

    def make_room(self, step_id: int) -> Sequence | None:
        """Preempts others for the first in the queue, if that is needed to admit it, and enough;
        returns it, or None where nobody was preempted.

        Only those that come strictly after it, and that this step has not planned yet: no two ever
        take each other's place. Nobody is preempted for this more often than the bound.
        """
        first = self._waiting.find_first()
        if first is None or not self._running or self._running.is_in_flight(first):
            return None
        if self._shares is None and self._order(self._running[-1]) < self._order(first):
            return None
        running = [s for s in self._running if s.last_step != step_id and not is_ending(s)]
        preempted: list[Sequence] = []
        while self._lacks_room(first, preempted):
            lower = self._find_lower(first, preempted, running)
            victim = find_victim(lower, self._order, max_preemptions=self._max_preemptions)
            if victim is None:
                return None
            preempted.append(victim)
        for victim in preempted:
            self.preempt(victim)
        return first if preempted else None

    def _lacks_room(self, first: Sequence, preempted: Collection[Sequence]) -> bool:
        """Whether one that waits could not start even without those, once all in flight retired."""
        needs = self._needs
        if 1 + num_kept_rows(first) > needs.num_coming_rows(preempted):
            return True
        num_pages = needs.num_to_admit(first) - self._reuse.num_held(first)
        return num_pages > needs.num_coming(preempted)

    def _find_lower(
        self, first: Sequence, preempted: Collection[Sequence], running: Iterable[Sequence]
    ) -> list[Sequence]:
        """Returns who of those that run may be preempted for one that waits: of a lower class, with
        shares of its own tenant; or of a tenant that was given more, or has more of the machine,
        and would have after."""
        order, priority, tenant = self._order(first), first.request.priority, first.request.tenant
        others = [
            s for s in running if s not in preempted and s.num_preemptions < self._max_preemptions
        ]
        lower = [s for s in others if s.request.priority < priority and self._order(s) > order]
        if self._shares is None:
            return lower
        lower = [s for s in lower if s.request.tenant == tenant]
        lower = lower or self._find_ahead(first, others)
        return lower or self._find_richer(tenant, first, preempted, others=others)

    def _find_ahead(self, first: Sequence, others: list[Sequence]) -> list[Sequence]:
        """Returns those of `others` that are of the tenant given most, if it was given more by all
        that this one may take and all that it gives up: then the two do not take turns."""
        assert self._shares is not None
        level, weight, tenant = self._shares.level, self._shares.weight, first.request.tenant
        names = {s.request.tenant for s in others} - {tenant}
        if not names:
            return []
        most = max(names, key=lambda name: (level(name), name))
        gap = level(most) - level(tenant) - _num_all(first) / weight(tenant)
        if gap <= 0:
            return []
        return [s for s in others if s.request.tenant == most and _num_all(s) / weight(most) < gap]

    def _find_richer(
        self,
        tenant: str,
        first: Sequence,
        preempted: Collection[Sequence],
        *,
        others: list[Sequence],
    ) -> list[Sequence]:
        """Returns those of `others` that are of the tenant with most of rows or pages, by weight,
        if it was given no less than this one, and has no less after giving up one of them."""
        assert self._shares is not None
        page = 1 / self._pool.num_usable
        has: dict[str, float] = {}
        for sequence in self._running:
            part = 0.0 if sequence in preempted else self._part_of(len(sequence.pages) * page)
            name = sequence.request.tenant
            has[name] = has.get(name, 0.0) + part
        mine = has.get(tenant, 0.0) + self._part_of(self._needs.num_to_admit(first) * page)
        weight, level = self._shares.weight, self._shares.level(tenant)
        names = {s.request.tenant for s in others} - {tenant}
        names = {name for name in names if self._shares.level(name) >= level}
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
        return max(1 / self._running.num_rows, pages)


def _num_all(sequence: Sequence) -> int:
    """Returns the tokens that a sequence may have in all."""
    return len(sequence.request.prompt) + sequence.request.max_tokens
