"""A tenant that floods, and what another feels of it, in virtual time."""

import dataclasses

import pytest

from jaxserve.measure.fairness import SCENARIOS, build_machine, compare_flood

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NUM_REQUESTS = 700


@pytest.mark.parametrize("name", ["two, 80%", "long prompts, 30%"])
def test_ten_times_its_share_moves_anothers_p99_by_less_than_a_tenth(name: str) -> None:
    scenario = dataclasses.replace(BY_NAME[name], num_requests=NUM_REQUESTS)
    found = compare_flood(scenario, build_machine("fair"))
    assert found.ratio < 1.10, found
    assert found.flood.tokens_per_s > found.share.tokens_per_s


def test_first_come_first_served_keeps_no_bound() -> None:
    scenario = dataclasses.replace(BY_NAME["two, 80%"], num_requests=100)
    found = compare_flood(scenario, build_machine("fcfs"))
    assert found.ratio > 10
