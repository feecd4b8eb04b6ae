"""Taking many values at once is as taking one after another."""

from collections.abc import Callable

import pytest

from jaxserve.metrics import Metrics

AMOUNTS = (0.0, 0.001, 0.0010001, 0.25, 0.25, 3.0, 120.0, 600.0, 601.0)
NAME = "inter_token_seconds"


def read(take: Callable[[Metrics], object]) -> dict[str, float]:
    """Returns what the histogram shows: each bucket by its bound, count and sum."""
    metrics = Metrics()
    take(metrics)
    (family,) = metrics.itl_seconds.collect()
    return {
        f"{sample.name} {sample.labels.get('le', '')}": sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def one_by_one(*amounts: float) -> dict[str, float]:
    def take(metrics: Metrics) -> None:
        for amount in amounts:
            metrics.itl_seconds.observe(amount)

    return read(take)


def test_all_are_taken_at_once() -> None:
    shown = read(lambda metrics: metrics.itl_seconds.observe_all(AMOUNTS))
    assert shown == pytest.approx(one_by_one(*AMOUNTS))
    assert shown[f"jaxserve_{NAME}_count "] == len(AMOUNTS)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_one_is_taken_many_times(amount: float) -> None:
    shown = read(lambda metrics: metrics.itl_seconds.observe_many(amount, 3))
    assert shown == pytest.approx(one_by_one(amount, amount, amount))
