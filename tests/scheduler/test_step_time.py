"""The step-time model finds the times it was shown, whatever single steps do."""

import json
import random

import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan import Bucket, StepPlan
from jaxserve.scheduler.step_time import KvCost, StepTimes, StepWork, kv_cost_of, measure_work
from tests.scheduler.loop import Loop

SMALL = Bucket(decode_seqs=2, verify_tokens=1, chunk_tokens=0)
LARGE = Bucket(decode_seqs=8, verify_tokens=1, chunk_tokens=0)
CHUNK = Bucket(decode_seqs=8, verify_tokens=1, chunk_tokens=64)
BASES = {SMALL: 0.02, LARGE: 0.05, CHUNK: 0.1}
SLOPE = 1e-6  # a token of K/V and a token of the shape


def true_s(bucket: Bucket, kv: int) -> float:
    return BASES[bucket] + SLOPE * bucket.num_tokens * kv


def fit(num_steps: int, *, noise: float = 0.0, kv_cost: KvCost = "longest") -> StepTimes:
    rng, times = random.Random(1), StepTimes(kv_cost)
    for _ in range(num_steps):
        bucket, kv = rng.choice(list(BASES)), rng.randrange(10, 2000)
        seconds = true_s(bucket, kv) * (1 + noise * rng.uniform(-1, 1))
        times.observe(bucket, StepWork(kv, kv), seconds)
    return times


@pytest.mark.parametrize("kv", [10, 500, 1999])
@pytest.mark.parametrize("bucket", list(BASES))
def test_base_and_slope_of_each_program_are_found(bucket: Bucket, kv: int) -> None:
    predicted = fit(600, noise=0.1).predict(bucket, StepWork(kv, kv))
    assert predicted == pytest.approx(true_s(bucket, kv), rel=0.04)


def test_one_step_in_ten_that_takes_twenty_times_as_long_moves_the_fit_little() -> None:
    rng, times = random.Random(2), StepTimes()
    for step in range(800):
        kv = rng.randrange(10, 2000)
        seconds = true_s(LARGE, kv) * (20 if step % 10 == 3 else 1 + 0.05 * rng.uniform(-1, 1))
        times.observe(LARGE, StepWork(kv, kv), seconds)
    predicted = times.predict(LARGE, StepWork(800, 800))
    assert predicted == pytest.approx(true_s(LARGE, 800), rel=0.15)


def test_a_machine_that_became_half_as_fast_is_believed() -> None:
    times = StepTimes()
    for speed, num_steps in ((1, 600), (2, 900)):
        for step in range(num_steps):
            kv = step * 37 % 1000
            times.observe(LARGE, StepWork(kv, kv), speed * true_s(LARGE, kv))
    predicted = times.predict(LARGE, StepWork(500, 500))
    assert predicted == pytest.approx(2 * true_s(LARGE, 500), rel=0.2)


def test_a_program_seen_at_one_length_takes_the_common_slope() -> None:
    times = fit(600)
    other = Bucket(decode_seqs=4, verify_tokens=1, chunk_tokens=0)
    for _ in range(20):
        times.observe(other, StepWork(100, 100), 0.03)
    rise = times.predict(other, StepWork(1100, 1100)) or 0.0
    assert rise - 0.03 == pytest.approx(1000 * 4 * SLOPE, rel=0.1)


def test_a_program_never_seen_lies_between_its_neighbours_by_tokens() -> None:
    times = fit(600)
    middle = Bucket(decode_seqs=5, verify_tokens=1, chunk_tokens=0)
    ends = [times.predict(bucket, StepWork(0, 0)) or 0.0 for bucket in (SMALL, LARGE)]
    assert times.predict(middle, StepWork(0, 0)) == pytest.approx(sum(ends) / 2)
    twice = Bucket(decode_seqs=144, verify_tokens=1, chunk_tokens=0)
    largest = times.predict(CHUNK, StepWork(0, 0)) or 0.0
    assert times.predict(twice, StepWork(0, 0)) == pytest.approx(2 * largest)


def test_the_error_is_of_the_prediction_made_before_the_step() -> None:
    times = StepTimes()
    assert times.observe(SMALL, StepWork(5, 5), 2.0) is None  # nothing was known
    assert times.observe(SMALL, StepWork(5, 5), 4.0) == pytest.approx(0.5)
    assert times.observe(SMALL, StepWork(5, 5), 1.0) == pytest.approx(2.0)


def test_what_is_counted_of_the_kv_is_a_choice() -> None:
    work = StepWork(10, 1000)
    longest, every = fit(600), fit(600, kv_cost="all")
    assert longest.predict(LARGE, work) == pytest.approx(true_s(LARGE, 10), rel=0.05)
    assert every.predict(LARGE, work) == pytest.approx(true_s(LARGE, 1000), rel=0.05)


def test_the_smallest_program_seen_that_fits_is_found() -> None:
    times = fit(100)
    assert times.find_bucket(3, 0) == LARGE
    assert times.find_bucket(1, 16) == CHUNK
    assert times.find_bucket(99, 999) == CHUNK  # the largest there is
    assert StepTimes().find_bucket(1, 0) is None


@pytest.mark.parametrize(
    ("attention", "kv_cost"),
    [
        ("xla", "longest"),
        ("reference", "longest"),
        ("native", "all"),
        ("triton", "all"),
        ("mosaic", "all"),
        ("triton_interpret", "all"),
        ("mosaic_interpret", "all"),
    ],
)
def test_attention_costs_what_its_implementation_reads(attention: str, kv_cost: str) -> None:
    assert kv_cost_of(attention) == kv_cost


def test_what_is_written_and_read_again_predicts_the_same() -> None:
    times = fit(300, noise=0.2)
    again = StepTimes.from_json(json.loads(json.dumps(times.as_json())), source="memory")
    for bucket in BASES:
        work = StepWork(700, 700)
        assert again.predict(bucket, work) == pytest.approx(times.predict(bucket, work))
        assert again.ratio_quantiles(bucket) == times.ratio_quantiles(bucket)
        assert times.ratio_quantiles(bucket)[0] < 1 < times.ratio_quantiles(bucket)[-1]
    assert times.observe(SMALL, work, 1.0) == pytest.approx(again.observe(SMALL, work, 1.0))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "not of format 1"),
        ({"kv_cost": "some"}, "kv_cost is 'some'"),
        ({"common_slope_s": None}, "common_slope_s is no number"),
        ({"programs": []}, "no programs"),
        ({"programs": [{"decode_seqs": 1}]}, "program 0 has no number"),
    ],
)
def test_a_damaged_file_is_refused_by_what_is_wrong(
    change: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        StepTimes.from_json({**fit(100).as_json(), **change}, source="x.json")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_steps", -1, "not above 0"),
        ("num_steps", 1.5, "not whole"),
        ("decode_seqs", 0.5, "not whole"),
        ("decode_seqs", -2, "below 0"),
        ("mean_kv", -1, "below 0"),
        ("deviation_s", -1, "below 0"),
        ("mean_s", 0, "not above 0"),
        ("ratios", [1.0, -1.0], "ratio below 0"),
        ("ratios", [], "no list of numbers ratios"),
    ],
)
def test_a_program_that_cannot_be_is_refused(field: str, value: object, problem: str) -> None:
    facts = fit(100).as_json()
    facts["programs"][0][field] = value
    with pytest.raises(ConfigError, match=f"program 0 has a.*{problem}|program 0 has {problem}"):
        StepTimes.from_json(facts, source="x.json")


def test_a_program_that_became_faster_as_it_read_more_is_written_and_read_too() -> None:
    times = StepTimes()
    for kv in range(50):
        times.observe(SMALL, StepWork(kv, kv), 1.0 - 0.001 * kv)
    again = StepTimes.from_json(times.as_json(), source="memory")
    assert again.predict(SMALL, StepWork(9, 9)) == times.predict(SMALL, StepWork(9, 9))


def test_the_work_of_a_plan_is_what_its_attention_reads() -> None:
    loop = Loop(chunk_tokens=8)
    loop.add(3, 4)
    loop.step()
    loop.add(6, 4)
    loop.step()
    assert measure_work(loop.plans[0]) == StepWork(3, 3)
    assert measure_work(loop.plans[1]) == StepWork(6, 4 + 6)
    assert measure_work(StepPlan(step_id=9)) == StepWork(0, 0)


def test_steps_are_timed_from_result_to_result_or_from_their_own_planning() -> None:
    loop = Loop(depth=2)
    loop.add(3, 3)
    times, scheduler = loop.scheduler.step_times, loop.scheduler
    first = scheduler.schedule(10.0)
    results = {first.step_id: loop.runner.launch(first).result()}
    second = scheduler.schedule(11.0)
    results[second.step_id] = loop.runner.launch(second).result()
    scheduler.commit(first, results[first.step_id], now_s=14.0)  # 4 s after its planning
    scheduler.commit(second, results[second.step_id], now_s=15.5)  # 1.5 s after that result
    seen = [step for program in times.programs.values() for step in program.first]
    assert sorted(seconds for _, seconds in seen) == [1.5, 4.0]
    assert loop.metrics.value("step_time_error_ratio_count") == 1


def test_a_stall_of_the_machine_is_no_part_of_what_steps_deviate_by() -> None:
    times = fit(300, noise=0.1)
    bucket = next(iter(BASES))
    times.observe(bucket, StepWork(100, 100), 60.0)
    assert max(times.programs[bucket].ratios) > 100
    assert max(times.ratio_quantiles(bucket)) < 1.5
