"""A histogram for what comes many at a time."""

import bisect
from collections.abc import Sequence

from prometheus_client import Histogram


class ManyHistogram(Histogram):
    """One that takes what is the same many times at once."""

    def observe_many(self, amount: float, count: int) -> None:
        """Does what `count` calls of `observe` do."""
        self._sum.inc(count * amount)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(count)

    def observe_all(self, amounts: Sequence[float]) -> float:
        """Does what a call of `observe` with each does; returns their sum."""
        counts: dict[int, int] = {}
        for amount in amounts:
            place = bisect.bisect_left(self._upper_bounds, amount)
            counts[place] = counts.get(place, 0) + 1
        total = sum(amounts)
        self._sum.inc(total)
        for place, count in counts.items():
            self._buckets[place].inc(count)
        return total
