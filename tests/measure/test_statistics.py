"""Percentiles and intervals against numpy and scipy, and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxserve.measure.statistics import (
    Sample,
    mean_interval,
    ratio_interval,
    t_975,
    weighted_quantiles,
)

SHARES = (0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_weighted_quantiles_are_those_of_the_repeated_values(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 8, size=random.integers(1, 30)) / 7
    counts = random.integers(1, 6, size=len(values))
    expected = np.quantile(np.repeat(values, counts), SHARES)
    assert weighted_quantiles(values, counts, SHARES) == pytest.approx(expected, abs=1e-12)


def test_a_sample_is_described_as_if_its_values_were_repeated() -> None:
    sample = Sample()
    sample.add(2.0)
    sample.add(4.0, 3)
    sample.add(9.0, 0)
    found = sample.describe()
    assert (found.count, found.mean, found.median) == (4, 3.5, 4.0)
    assert (found.min, found.max) == (2.0, 4.0)
    assert found.std == pytest.approx(math.sqrt(0.75))


def test_nothing_observed_is_no_number() -> None:
    found = Sample().describe()
    assert found.count == 0
    assert found.mean is found.p50 is found.p99 is found.std is None


def test_samples_that_are_put_together_are_one() -> None:
    sample, other = Sample(), Sample()
    sample.add(1.0)
    other.add(3.0, 2)
    sample.extend(other)
    assert sample.describe().mean == pytest.approx(7 / 3)


def test_the_table_of_t_is_right_and_never_makes_an_interval_narrower() -> None:
    for freedom in (1, 2, 3, 7, 15, 29, 30, 40, 60, 120):
        assert t_975(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), abs=5e-5)
    for freedom in (31, 39, 59, 119, 5000):
        assert t_975(freedom) > scipy.stats.t.ppf(0.975, freedom)


def test_an_interval_over_repeats_is_students() -> None:
    found = mean_interval([10.0, 12.0, 11.0, 13.0])
    low, high = scipy.stats.t.interval(0.95, 3, loc=11.5, scale=math.sqrt(5 / 3) / 2)
    assert found is not None
    assert (found.value, found.num_repeats) == (11.5, 4)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_of_what_is_never_below_zero_ends_there() -> None:
    found = mean_interval([0.0, 1.0])
    assert found is not None
    assert (found.value, found.low) == (0.5, 0.0)
    assert found.high == pytest.approx(0.5 + 12.7062 / 2)
    signed = mean_interval([-1.0, 1.0])
    assert signed is not None
    assert signed.low == pytest.approx(-12.7062)


def test_one_repeat_has_no_interval() -> None:
    found = mean_interval([10.0])
    assert found is not None
    assert (found.value, found.low, found.high) == (10.0, None, None)
    assert mean_interval([]) is None


def test_a_ratio_has_welchs_interval_on_logarithms() -> None:
    new, old = [2.0, 2.2, 2.4], [1.0, 1.3, 1.1, 1.2]
    found = ratio_interval(new, old)
    assert found is not None
    logs = np.log(new), np.log(old)
    middle = logs[0].mean() - logs[1].mean()
    welch = scipy.stats.ttest_ind(*logs, equal_var=False)
    freedom = math.floor(welch.df)
    half = scipy.stats.t.ppf(0.975, freedom) * middle / welch.statistic
    assert found.value == pytest.approx(math.exp(middle))
    assert found.low == pytest.approx(math.exp(middle - half), rel=1e-4)
    assert found.high == pytest.approx(math.exp(middle + half), rel=1e-4)


def test_a_ratio_of_single_runs_has_no_interval_and_one_to_nothing_is_none() -> None:
    found = ratio_interval([3.0], [2.0, 2.0])
    assert found is not None
    assert found.value == pytest.approx(1.5)
    assert (found.low, found.high, found.num_repeats) == (None, None, 1)
    assert ratio_interval([0.0], [2.0]) is None
    assert ratio_interval([], [2.0]) is None


def test_repeats_without_any_spread_have_an_interval_of_one_point() -> None:
    found = ratio_interval([3.0, 3.0], [1.5, 1.5])
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))
