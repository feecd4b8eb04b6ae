"""Which of those that wait start with a step."""

from jaxserve.metrics import Metrics
from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.deadlines import is_expired
from jaxserve.scheduler.page_grants import PageGrants
from jaxserve.scheduler.page_needs import PageNeeds
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_match import Match
from jaxserve.scheduler.prefix_order import PrefixOrder
from jaxserve.scheduler.prefix_reuse import PrefixReuse
from jaxserve.scheduler.restraint import Restraint
from jaxserve.scheduler.running_set import RunningSet, num_kept_rows
from jaxserve.scheduler.step_builder import StepBuilder
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Starts:
    """Starts waiting sequences in the queue's order: nobody overtakes one that cannot start."""

    def __init__(
        self,
        *,
        pool: PagePool,
        waiting: WaitingQueue,
        running: RunningSet,
        needs: PageNeeds,
        reuse: PrefixReuse,
        grants: PageGrants,
        restraint: Restraint,
        prefix_order: PrefixOrder | None,
        is_static: bool,
        may_split: bool,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._waiting = waiting
        self._running = running
        self._needs = needs
        self._reuse = reuse
        self._grants = grants
        self._restraint = restraint
        self._prefix_order = prefix_order
        self._is_static = is_static
        self._may_split = may_split
        self._metrics = metrics
        self._is_batch_open = True  # static batching: whether the batch still takes members
        self.batch_rows = 0  # static batching: members of the batch

    def start_all(self, step: StepBuilder, now_s: float) -> None:
        """Starts waiting sequences in order, up to the first that cannot start now."""
        if not self._running:
            self._is_batch_open, self.batch_rows = True, 0
        if self._is_static and not self._is_batch_open:
            return
        has_others = len(self._running) > 0
        self._is_batch_open = False
        while self.start_first(step, now_s):
            if has_others and not self._is_static:  # a static batch is not joined, it is formed
                self._metrics.joined_running.inc()

    def start_first(self, step: StepBuilder, now_s: float) -> bool:
        """Starts the first in the queue, if it can start now; returns whether it did."""
        admissible = self._find_admissible(step, now_s)
        if admissible is None:
            return False
        sequence, match = admissible
        num_tokens = self._room_for(sequence, match, step)
        if not num_tokens or not step.has_room_to_swap_in(len(match.host)):
            self._is_batch_open = True  # only this step is full: it grows on in the next
            return False
        if match.host:
            match = self._reuse.verify(match)
            num_tokens = self._room_for(sequence, match, step)
            if not num_tokens:
                self._is_batch_open = True
                return False
        self.batch_rows += 1 + num_kept_rows(sequence)
        self._start(sequence, match, num_tokens, step=step)
        return True

    def _room_for(self, sequence: Sequence, match: Match, step: StepBuilder) -> int:
        """Returns how many tokens of a sequence that starts the step can take."""
        num_tokens = step.room_for(sequence.num_owed - match.num_tokens, self._may_split)
        return self._restraint.limit_tokens(sequence, num_tokens, step)

    def _find_first(self, step: StepBuilder) -> Sequence | None:
        """Returns the sequence to start next, if there is a row for it at all."""
        urgent = step.made_room_for
        if urgent is not None and urgent.state is SequenceState.WAITING:
            return urgent  # who gave the room up may be first now, of a tenant given as much
        first = self._waiting.find_first()
        if self._prefix_order is None or first is None:
            return first
        return self._prefix_order.find_first() if self._running.num_free_rows else first

    def _find_admissible(self, step: StepBuilder, now_s: float) -> tuple[Sequence, Match] | None:
        """Returns the first in the queue if it can start now, and what the cache spares it; nobody
        overtakes it."""
        sequence = self._find_first(step)
        if sequence is None or is_expired(sequence.request, now_s):
            return None
        if self._running.is_in_flight(sequence):  # preempted, and its last token is not here yet
            step.waits_for = "results"
            return None
        num_rows = 1 + num_kept_rows(sequence) + self._restraint.num_rows_left(sequence, step)
        if self._running.num_free_rows < num_rows:
            step.waits_for = "rows"
            return None
        match = self._reuse.find_affordable(
            sequence,
            num_pages=self._needs.num_to_admit(sequence),
            num_free=self._pool.num_free - step.num_promised,
        )
        if match is None:
            step.waits_for = "pages"
            return None
        if not self._is_static and self._reuse.should_wait(
            sequence, match, step_id=step.step_id, is_in_flight=self._running.is_in_flight
        ):
            step.waits_for = "prefill"
            return None
        return sequence, match

    def _start(
        self, sequence: Sequence, match: Match, num_tokens: int, *, step: StepBuilder
    ) -> None:
        if self._prefix_order is not None:
            self._prefix_order.note_start(sequence)
        self._waiting.remove(sequence)
        self._running.start(sequence)
        host_pages = self._reuse.take(sequence, match)
        num_needed = self._pool.pages_for(match.num_tokens + num_tokens)
        if self._needs.reserves_all:
            num_held = self._needs.num_to_hold(sequence)
            self._metrics.reserved_pages.inc(num_held - num_needed)
            num_needed = num_held
        new_pages = self._grants.allocate(num_needed - match.num_pages)
        sequence.pages += new_pages
        step.swap_in(host_pages, new_pages)
        if match.source is not None:
            step.copy_page(match.source.page, new_pages[0])
            self._reuse.release_source(match, step_id=step.step_id)
        step.load_row(sequence)
        self._grants.plan(sequence, num_tokens, step)
        step.num_promised += self._needs.num_promised(sequence)
