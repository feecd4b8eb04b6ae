"""Prompts that are being computed, and who waits for one of them instead of computing the same."""

import dataclasses
from collections.abc import Callable

from jaxserve.request import Sequence, SequenceState
from jaxserve.scheduler.cached_page import CachedPage

STEPS_IN_FLIGHT = 3  # between the last chunk and the commit that publishes it, and one to spare


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Wait:
    """Whom a sequence waits for, and until which step at most."""

    leader_id: int
    last_step: int


class Fills:
    """A sequence that is about to start waits for another that is filling its next page.

    It waits for one only, once, and no longer than that prompt takes: as many steps as its tokens
    are chunks, however few of them the steps in between compute.
    """

    def __init__(self, page_size: int, *, chunk_tokens: int) -> None:
        """Args:
        chunk_tokens: most prompt tokens of a step.
        """
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens
        self._leaders: dict[int, Sequence] = {}  # running, with prompt pages still to fill
        self._waits: dict[int, Wait] = {}  # by the id of who waits, or has waited

    def start(self, sequence: Sequence, *, num_kept: int) -> None:
        """Notes a sequence that starts; it waits no more.

        Args:
          num_kept: of its tokens, those that others find already.
        """
        self._waits.pop(sequence.id, None)
        if self._last_fill(sequence) > num_kept:
            self._leaders[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._waits.pop(sequence.id, None)
        self._leaders.pop(sequence.id, None)

    def has_waited(self, sequence: Sequence) -> bool:
        return sequence.id in self._waits

    def should_wait(
        self,
        sequence: Sequence,
        last: CachedPage | None,
        *,
        step_id: int,
        is_in_flight: Callable[[Sequence], bool],
    ) -> bool:
        """Returns whether a sequence is not to start yet.

        Args:
          last: the last page that it has found.
          step_id: of the step in the making.
          is_in_flight: whether a step that a sequence is in has not been committed yet.
        """
        if not self._leaders or sequence.num_preemptions:
            return False
        wait = self._waits.get(sequence.id)
        if wait is not None and step_id > wait.last_step:
            return False
        end = self._page_size * (1 if last is None else last.depth + 1)
        leader = (
            self._find_leader(sequence, end, is_in_flight) if end < sequence.num_tokens else None
        )
        if wait is not None:
            if leader is not None and leader.id == wait.leader_id:
                return True
            # another one's prompt is no reason to wait again
            self._waits[sequence.id] = dataclasses.replace(wait, last_step=0)
            return False
        if leader is None:
            return False
        num_left = max(0, self._last_fill(leader) - leader.num_computed)
        num_steps = -(-num_left // self._chunk_tokens) + STEPS_IN_FLIGHT
        self._waits[sequence.id] = Wait(leader_id=leader.id, last_step=step_id + num_steps)
        return True

    def check(self, live: set[int]) -> None:
        """Asserts that nobody is remembered who has ended."""
        assert self._waits.keys() | self._leaders.keys() <= live, "an ended sequence is waited for"

    def _find_leader(
        self, sequence: Sequence, end: int, is_in_flight: Callable[[Sequence], bool]
    ) -> Sequence | None:
        """Returns who is filling the page of a sequence's prompt that ends there."""
        wanted, identity = sequence.request.prompt[:end], sequence.request.cache_identity
        for leader in list(self._leaders.values()):
            num_retired = leader.num_computed  # or a little more than that, while in flight
            is_running = leader.state is SequenceState.RUNNING
            has_token = bool(leader.output) and not leader.num_preemptions  # all is committed
            if not is_running or (
                num_retired >= self._last_fill(leader) and (has_token or not is_in_flight(leader))
            ):
                del self._leaders[leader.id]
                continue
            if num_retired >= end and not is_in_flight(leader):
                continue  # it was filled, and is not kept
            request = leader.request
            if request.cache_identity == identity and request.prompt[:end] == wanted:
                return leader
        return None

    def _last_fill(self, sequence: Sequence) -> int:
        """Returns where the last full page of a prompt ends."""
        return len(sequence.request.prompt) // self._page_size * self._page_size
