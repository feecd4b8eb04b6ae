"""The order in which waiting sequences are admitted."""

import heapq
from typing import Final

from jaxserve.request import Sequence
from jaxserve.scheduler.fair_shares import FairShares
from jaxserve.scheduler.policies import Order, OrderOf

LOOKED_AT: Final = 4  # entries for each sequence that is wanted: some have left


class WaitingQueue:
    """By the policy's order; with shares the tenant comes first that has had least.

    A sequence's order never changes, so a preempted one finds its old place. Every operation but
    `find_before` takes at most the logarithm of the length, and `find_first` looks at each tenant
    that waits besides.
    """

    def __init__(self, order: OrderOf, *, shares: FairShares | None = None) -> None:
        self.num_prompt_tokens = 0
        self._order = order
        self._shares = shares
        self._members: dict[int, Sequence] = {}
        # by tenant, where there are shares; who has left stays in the heap until it comes up
        self._heaps: dict[str, list[Order]] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def find_first(self) -> Sequence | None:
        """Returns the sequence to admit next."""
        if not self._counts:
            return None
        if self._shares is None:
            return self._first_of("")
        level = self._shares.level
        tenant = min(self._counts, key=lambda name: (level(name), self._first_of(name).id))
        return self._first_of(tenant)

    def find_front(self, num_sequences: int) -> list[Sequence]:
        """Returns the first that wait, in order; with shares those of the tenant that is first. It
        looks at a few times as many at most, whatever waits behind them."""
        first = self.find_first()
        if first is None:
            return []
        heap, found = self._heaps[self._heap_of(first)], [first]
        frontier = [(heap[0], 0)]  # of the heap as a tree: whose parents were all looked at
        for _ in range(LOOKED_AT * num_sequences):
            if not frontier or len(found) == num_sequences:
                break
            order, place = heapq.heappop(frontier)
            sequence = self._members.get(order[-1])
            if sequence is not None and sequence is not found[-1]:  # not twice, or gone
                found.append(sequence)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
        return found

    def find_before(self, sequence: Sequence) -> list[Sequence]:
        """Returns who comes before one that waits, in order; it looks at all that wait."""
        order, mine = self._order, self._order(sequence)
        return sorted((s for s in self._members.values() if order(s) < mine), key=order)

    def add(self, sequence: Sequence) -> None:
        tenant = self._heap_of(sequence)
        if tenant not in self._counts:
            self._counts[tenant] = 0
            self._heaps[tenant] = []
            if self._shares is not None:
                self._shares.join(tenant, self._counts.keys() - {tenant})
        heap = self._heaps[tenant]
        heapq.heappush(heap, self._order(sequence))
        self._members[sequence.id] = sequence
        self._counts[tenant] += 1
        self.num_prompt_tokens += len(sequence.request.prompt)
        if len(heap) > 2 * self._counts[tenant] + 64:
            self._rebuild(tenant)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._heap_of(sequence)
        del self._members[sequence.id]
        self.num_prompt_tokens -= len(sequence.request.prompt)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._heaps[tenant]

    def _heap_of(self, sequence: Sequence) -> str:
        return "" if self._shares is None else sequence.request.tenant

    def _first_of(self, tenant: str) -> Sequence:
        heap, members = self._heaps[tenant], self._members
        while heap[0][-1] not in members:
            heapq.heappop(heap)
        return members[heap[0][-1]]

    def _rebuild(self, tenant: str) -> None:
        heap = {order for order in self._heaps[tenant] if order[-1] in self._members}
        self._heaps[tenant] = sorted(heap)
