"""The search for the highest load."""

import asyncio
import json

import pytest

from jaxserve.measure.sweep import Found, Search, find_highest
from tests.measure import sample


def search(capacity: float, **options: float) -> tuple[Found, list[float]]:
    """Returns what is found of a server that attains everything up to its capacity."""
    scales: list[float] = []

    async def measure(scale: float) -> float:
        scales.append(scale)
        return 0.97 if scale <= capacity else 0.5

    chosen = Search(attainment=0.95, **options)  # type: ignore[arg-type]  # fields
    return asyncio.run(find_highest(measure, chosen)), scales


@pytest.mark.parametrize("capacity", [0.1, 0.7, 1.0, 3.3, 37.0])
@pytest.mark.parametrize("resolution", [0.2, 0.02])
def test_the_highest_load_is_found_within_the_resolution(
    capacity: float, resolution: float
) -> None:
    found, scales = search(capacity, resolution=resolution, max_points=40)
    assert found.best is not None
    assert found.above is not None
    assert found.best <= capacity < found.above <= found.best * (1 + resolution) * 1.0001
    assert len(scales) == len(set(scales)) < 20


def test_the_search_ends_where_nothing_attains() -> None:
    found, scales = search(0.0)
    assert found.best is None
    assert scales == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]


def test_the_search_ends_after_its_points() -> None:
    found, scales = search(1e9, max_points=5)
    assert (found.best, found.above, len(scales)) == (16.0, None, 5)
    assert not found.is_within(0.05)


def test_exactly_enough_is_enough() -> None:
    async def measure(scale: float) -> float:
        return 0.95

    found = asyncio.run(find_highest(measure, Search(attainment=0.95, max_points=1)))
    assert found.best == 1.0


def test_a_sweep_lists_its_points_by_load_with_the_best_of_them() -> None:
    sweep = json.loads(sample.SWEEP.read_text())
    scales = [point["rate_scale"] for point in sweep["points"]]
    assert scales == sorted(scales)
    wanted = sweep["search"]["attainment"]
    good = [point for point in sweep["points"] if point["attainment"] >= wanted]
    assert sweep["best"] == good[-1]
    assert sweep["lowest_that_failed"] > sweep["best"]["rate_scale"]
    assert sweep["is_within_resolution"]
    assert sweep["highest_goodput"] == max(sweep["points"], key=lambda point: point["goodput"])
