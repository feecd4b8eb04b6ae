"""Which requests have run out of time. The clock is an argument."""

import heapq
import itertools

from jaxserve.request import Request, SequenceState


class Deadlines:
    """A heap of the times at which something may be due; entries of ended requests go lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._ties = itertools.count()  # requests have no order of their own

    def add(self, request: Request) -> None:
        for due_s in (request.queue_deadline_s, request.deadline_s):
            if due_s is not None:
                heapq.heappush(self._heap, (due_s, next(self._ties), request))

    def pop_expired(self, now_s: float) -> list[Request]:
        """Returns, once, the live requests whose deadline or latest admission has come."""
        expired: dict[Request, None] = {}  # a request may be in the heap twice
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if is_expired(request, now_s):
                expired[request] = None
        return list(expired)

    def trim(self, num_live: int) -> None:
        """Drops the entries of ended requests once they are most of the heap."""
        if len(self._heap) > 4 * num_live + 64:
            self._heap = [entry for entry in self._heap if not is_ended(entry[2])]
            heapq.heapify(self._heap)


def is_ended(request: Request) -> bool:
    return all(sequence.state is SequenceState.FINISHED for sequence in request.sequences)


def is_expired(request: Request, now_s: float) -> bool:
    """Whether a live request is late: for its deadline, or for its first admission."""
    if is_ended(request):
        return False
    if request.deadline_s is not None and request.deadline_s <= now_s:
        return True
    if request.queue_deadline_s is None or request.queue_deadline_s > now_s:
        return False
    return not any(sequence.last_step for sequence in request.sequences)  # none was ever planned
