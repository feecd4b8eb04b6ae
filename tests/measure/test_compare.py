"""Two results: refused where they are not of the same thing, else ratios with intervals."""

import copy
import json
import math
from typing import Any

import pytest

from jaxserve.errors import ResultError
from jaxserve.measure.compare import compare, find_config_changes, find_differences
from tests.measure import sample


@pytest.fixture
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sample.RESULT.read_text())
    return found


def change(result: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(result)
    place = changed["manifest"]
    *parents, last = path.split(".")
    for name in parents:
        place = place[name]
    place[last] = value
    return changed


def test_the_same_thing_can_be_compared(result: dict[str, Any]) -> None:
    assert find_differences(result, copy.deepcopy(result)) == []


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("workload.hash", "f" * 64, "workload hash"),
        ("bundle_digest", "cd" * 32, "bundle digest"),
        ("hardware.cores", 4, "hardware"),
        ("jax_version", "0.11.2", "jax version"),
        ("limits.all", ["ttft=1"], "limits"),
        ("sampling.temperature", 1.0, "sampling"),
        ("offered_load.rate_scale", 2.0, "offered load"),
        ("cache_state", "primed", "cache state at the start"),
        ("timeout_s", 5.0, "timeout"),
        ("max_drain_s", 5.0, "longest drain"),
    ],
)
def test_each_fact_that_differs_is_named(
    result: dict[str, Any], path: str, value: object, name: str
) -> None:
    other = change(result, path, value)
    assert [difference.name for difference in find_differences(result, other)] == [name]
    assert [difference.name for difference in find_differences(other, result)] == [name]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("bundle_digest", ""),
        ("hardware", {}),
        ("hardware", {"platform": "cpu", "device": "cpu"}),
        ("jax_version", ""),
        ("cache_state", "unknown"),
        ("cache_state", "mixed"),
    ],
)
def test_what_neither_knows_is_not_the_same(
    result: dict[str, Any], path: str, value: object
) -> None:
    other = change(result, path, value)
    assert len(find_differences(other, copy.deepcopy(other))) == 1


def test_a_setting_that_differs_is_shown_and_no_obstacle(result: dict[str, Any]) -> None:
    other = change(result, "config.scheduler.max_seqs", 8)
    assert find_differences(result, other) == []
    assert [str(found) for found in find_config_changes(result, other)] == [
        "scheduler.max_seqs: 2 against 8"
    ]


def test_another_way_to_the_server_is_shown(result: dict[str, Any]) -> None:
    other = change(result, "target.backend", "openai chat")
    assert [str(found) for found in find_config_changes(result, other)] == [
        "target: simulated against openai chat"
    ]


def test_a_digest_is_shown_short_and_nothing_as_not_known(result: dict[str, Any]) -> None:
    found = find_differences(result, change(result, "bundle_digest", ""))
    assert str(found[0]) == "bundle digest: abababababab… against not known"
    assert found[0].is_unknown


def test_of_a_fact_with_parts_those_that_differ_are_shown(result: dict[str, Any]) -> None:
    other = change(result, "offered_load.burstiness", 0.25)
    (found,) = find_differences(result, other)
    before = result["manifest"]["offered_load"]["burstiness"]
    assert str(found) == f"offered load: burstiness {before} against burstiness 0.25"
    assert not found.is_unknown


def scaled(result: dict[str, Any], name: str, values: list[float]) -> dict[str, Any]:
    changed = copy.deepcopy(result)
    for each, value in zip(changed["repeats"]["each"], values, strict=True):
        each[name] = value
    return changed


def test_ratios_are_of_the_repeats(result: dict[str, Any]) -> None:
    old = scaled(result, "goodput", [10.0, 10.1, 9.9])
    new = scaled(result, "goodput", [20.0, 20.2, 19.8])
    found = next(change for change in compare(old, new) if change.name == "goodput")
    assert found.ratio.value == pytest.approx(2.0)
    assert found.ratio.low is not None
    assert found.ratio.high is not None
    assert 1.9 < found.ratio.low < 2.0 < found.ratio.high < 2.1
    assert found.verdict == "better"
    assert math.isclose(found.ratio.low * found.ratio.high, found.ratio.value**2)


@pytest.mark.parametrize(
    ("name", "new", "verdict"),
    [
        ("goodput", [5.0, 5.1, 4.9], "worse"),
        ("ttft_p99", [5.0, 5.1, 4.9], "better"),
        ("ttft_p99", [20.0, 20.1, 19.9], "worse"),
        ("goodput", [5.0, 25.0, 9.0], "unclear"),
    ],
)
def test_only_an_interval_without_one_is_a_verdict(
    result: dict[str, Any], name: str, new: list[float], verdict: str
) -> None:
    old = scaled(result, name, [10.0, 10.1, 9.9])
    found = {change.name: change for change in compare(old, scaled(result, name, new))}
    assert found[name].verdict == verdict


@pytest.mark.parametrize(
    ("old", "new", "ratio"),
    [([10.0, 11.0, 9.0], [0.0, 0.0, 0.0], 0.0), ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], math.inf)],
)
def test_a_goodput_that_fell_to_nothing_is_told(
    result: dict[str, Any], old: list[float], new: list[float], ratio: float
) -> None:
    changes = compare(scaled(result, "goodput", old), scaled(result, "goodput", new))
    found = next(change for change in changes if change.name == "goodput")
    assert (found.ratio.value, found.ratio.low, found.verdict) == (ratio, None, "unclear")


def test_single_runs_have_a_ratio_without_a_verdict(result: dict[str, Any]) -> None:
    single = copy.deepcopy(result)
    single["repeats"]["each"] = single["repeats"]["each"][:1]
    found = compare(single, single)
    assert {change.verdict for change in found} == {"unclear"}
    assert {change.ratio.low for change in found} == {None}


def test_a_sweep_is_not_compared_as_a_run(result: dict[str, Any]) -> None:
    with pytest.raises(ResultError, match="kind 'sweep'"):
        compare(result, json.loads(sample.SWEEP.read_text()))
