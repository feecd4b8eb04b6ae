"""Percentiles, spreads and confidence intervals, each by a method that is said here and in results.

METHODS is copied into every result, so that a number can be checked without this code.
"""

import array
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

METHODS: Final[Mapping[str, str]] = {
    "percentile": "linear interpolation between order statistics (Hyndman and Fan's type 7, "
    "numpy's default); a value with n tokens counts n times",
    "std": "population standard deviation (divided by n) within a run; sample standard deviation "
    "(divided by n - 1) over repeats",
    "interval": "mean of the repeats +- t * std / sqrt(n), two-sided 95 %, Student's t with n - 1 "
    "degrees of freedom; absent with fewer than two repeats; cut at 0 where no repeat is below it",
    "ratio": "exp of Welch's two-sided 95 % interval for the difference of the means of the "
    "repeats' logarithms, degrees of freedom rounded down; absent with fewer than two repeats on "
    "either side",
}
CONFIDENCE: Final = 0.95

# Student's t, quantile 0.975, by degrees of freedom; between two rows the one above holds, whose
# interval is the wider.
_T_975: Final = {
    1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060,
    9: 2.2622, 10: 2.2281, 11: 2.2010, 12: 2.1788, 13: 2.1604, 14: 2.1448, 15: 2.1314, 16: 2.1199,
    17: 2.1098, 18: 2.1009, 19: 2.0930, 20: 2.0860, 21: 2.0796, 22: 2.0739, 23: 2.0687, 24: 2.0639,
    25: 2.0595, 26: 2.0555, 27: 2.0518, 28: 2.0484, 29: 2.0452, 30: 2.0423, 40: 2.0211, 60: 2.0003,
    120: 1.9799,
}  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Distribution:
    """A sample in a few numbers; all None where nothing was observed.

    Attributes:
      count: values, each as often as it counts.
    """

    count: int
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class Sample:
    """Observed values in sixteen bytes each, so that a long replay's fit in memory."""

    def __init__(self) -> None:
        self._values = array.array("d")
        self._counts = array.array("q")

    def add(self, value: float, count: int = 1) -> None:
        """Adds a value that counts `count` times; nothing where that is 0."""
        if count > 0:
            self._values.append(value)
            self._counts.append(count)

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, other: "Sample") -> None:
        self._values.extend(other._values)
        self._counts.extend(other._counts)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Returns the quantiles; the sample must not be empty."""
        values, counts = self._arrays()
        return weighted_quantiles(values, counts, shares)

    def describe(self) -> Distribution:
        if not self._values:
            return Distribution(count=0)
        values, counts = self._arrays()
        count = int(counts.sum())
        mean = float((values * counts).sum() / count)
        variance = float((counts * (values - mean) ** 2).sum() / count)
        p50, p90, p95, p99 = weighted_quantiles(values, counts, (0.5, 0.9, 0.95, 0.99))
        return Distribution(
            count=count,
            mean=mean,
            median=p50,
            std=math.sqrt(variance),
            min=float(values.min()),
            max=float(values.max()),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
        )

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._values), np.array(self._counts)


def weighted_quantiles(
    values: np.ndarray, counts: np.ndarray, shares: Sequence[float]
) -> list[float]:
    """Returns numpy.quantile(numpy.repeat(values, counts), shares), without the repeating.

    Args:
      counts: how often each value counts; integers of at least 1.
      shares: each in [0, 1].
    """
    order = np.argsort(values, kind="stable")
    ordered, ends = values[order], np.cumsum(counts[order])
    ranks = np.asarray(shares) * (ends[-1] - 1)
    below = np.floor(ranks)
    low = ordered[np.searchsorted(ends, below, side="right")]
    above = np.minimum(below + 1, ends[-1] - 1)
    high = ordered[np.searchsorted(ends, above, side="right")]
    return [float(value) for value in low + (ranks - below) * (high - low)]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Interval:
    """A mean or a ratio with its confidence interval; low and high are None where there is none."""

    value: float
    low: float | None
    high: float | None
    num_repeats: int


def mean_interval(values: Iterable[float]) -> Interval | None:
    """Returns the mean over repeats with its t interval; None of nothing.

    Rates, times and shares are never below 0, so their interval is cut there.
    """
    repeats = list(values)
    if not repeats:
        return None
    mean = sum(repeats) / len(repeats)
    if len(repeats) < 2:
        return Interval(value=mean, low=None, high=None, num_repeats=len(repeats))
    half = t_975(len(repeats) - 1) * math.sqrt(_variance(repeats) / len(repeats))
    low = mean - half
    if min(repeats) >= 0:
        low = max(low, 0.0)
    return Interval(value=mean, low=low, high=mean + half, num_repeats=len(repeats))


def ratio_interval(new: Sequence[float], old: Sequence[float]) -> Interval | None:
    """Returns new ÷ old, of geometric means over repeats; None where a value is not above 0."""
    if not new or not old or min(*new, *old) <= 0:
        return None
    logs = [[math.log(value) for value in side] for side in (new, old)]
    means = [sum(side) / len(side) for side in logs]
    num_repeats = min(len(new), len(old))
    ratio = math.exp(means[0] - means[1])
    if num_repeats < 2:
        return Interval(value=ratio, low=None, high=None, num_repeats=num_repeats)
    parts = [_variance(side) / len(side) for side in logs]
    half = math.sqrt(sum(parts)) * t_975(_welch_freedom(parts, [len(new), len(old)]))
    middle = means[0] - means[1]
    return Interval(
        value=ratio,
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        num_repeats=num_repeats,
    )


def t_975(freedom: int) -> float:
    """Returns the 0.975 quantile of Student's t for at least one degree of freedom, or a little
    more between the rows of the table."""
    return _T_975[max(row for row in _T_975 if row <= freedom)]


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _welch_freedom(parts: Sequence[float], sizes: Sequence[int]) -> int:
    """Welch and Satterthwaite's degrees of freedom, rounded down. B. L. Welch, Biometrika 34, 1947.

    Args:
      parts: of each side, variance over size.
    """
    below = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    if below == 0:  # no spread at all: the interval is a point
        return min(sizes) - 1
    return max(1, math.floor(sum(parts) ** 2 / below + 1e-9))
