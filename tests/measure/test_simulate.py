"""The simulator: small cases by hand, and its own results found again."""

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config, load_config
from jaxserve.errors import ConfigError, WorkloadError
from jaxserve.measure.bench_options import BenchOptions
from jaxserve.measure.limits import read_limits
from jaxserve.measure.load import Load, load_memory
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.simulate import Simulator, build_pool
from jaxserve.measure.simulation import Simulation
from jaxserve.measure.step_times import ServedTimes, read_step_times, write_step_times
from jaxserve.measure.targets.base import Ask
from jaxserve.measure.virtual_device import VirtualDevice
from jaxserve.measure.workload import Header, Recipe, WorkloadEntry
from jaxserve.measure.workload.entry import build_workload
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, StepLimits
from jaxserve.scheduler.step_time import StepTimes, StepWork

DECODE = Bucket(decode_seqs=2, verify_tokens=1, chunk_tokens=0)
CHUNK = Bucket(decode_seqs=2, verify_tokens=1, chunk_tokens=8)
SECONDS = {DECODE: 1.0, CHUNK: 3.0}
CONFIG = load_config(
    flags={
        "scheduler.max_seqs": 2,
        "kv.page_size": 4,
        "kv.num_pages": 17,
        "buckets.decode_seqs": (2,),
        "buckets.chunk_tokens": (8,),
        "buckets.chunk_decode_seqs": (2,),
        "buckets.chunk_tile": 4,
        "model.max_model_tokens": 40,
    }
)


def fixed_times(seconds: dict[Bucket, float] = SECONDS) -> StepTimes:
    """Each program takes the same whatever it reads."""
    times = StepTimes()
    for bucket, bucket_s in seconds.items():
        for kv in range(20):
            times.observe(bucket, StepWork(kv, kv), bucket_s)
    return times


STEADY = fixed_times()


def ask(index: int, at_s: float, prompt_tokens: int, max_tokens: int, **facts: Any) -> Ask:  # noqa: ANN401  # fields
    return Ask(
        index=index,
        request_id=f"r{index}",
        at_s=at_s,
        prompt=(index,) * prompt_tokens,
        wanted_tokens=max_tokens,
        sampling={"max_tokens": max_tokens, "ignore_eos": True},
        **facts,
    )


def simulate(
    asks: Sequence[Ask],
    *,
    config: Config = CONFIG,
    num_pages: int = 17,
    **options: Any,  # noqa: ANN401  # of the simulation
) -> tuple[dict[int, RequestRecord], Simulation]:
    records: dict[int, RequestRecord] = {}
    limits = StepLimits(max_rows=2, max_chunk_tokens=8, chunk_tile=4, max_chunks=4, max_seqs=2)
    pool = build_pool(config, num_pages)
    simulation = Simulation(
        config,
        device=VirtualDevice(fixed_times(), limits=limits, buckets=list(SECONDS)),
        pool=pool,
        max_model_tokens=40,
        metrics=Metrics(),
        on_record=lambda record: records.__setitem__(record.index, record),
        **options,
    )
    simulation.run(iter(asks))
    assert pool.num_free == pool.num_usable
    assert not simulation.scheduler.has_unfinished
    return records, simulation


def times_of(record: RequestRecord) -> list[float]:
    return [arrival.time_s for arrival in record.arrivals]


def test_one_request_takes_its_chunk_and_a_step_a_token() -> None:
    records, _ = simulate([ask(0, 10.0, 6, 3)])
    assert times_of(records[0]) == pytest.approx([13.0, 14.0, 15.0])
    assert records[0].outcome == "ok"
    assert records[0].end_s == pytest.approx(15.0)
    assert records[0].phases.queue_s == pytest.approx(0.0)
    assert records[0].phases.prefill_s == pytest.approx(3.0)
    assert records[0].phases.decode_s == pytest.approx(2.0)


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    """Arriving at 10.5, the second is seen when nothing is left to launch ahead of a result.

    launch   0: chunk of 0 (10 to 13)  1: token (13 to 14)  | read 0 at 13
    launch   2: chunk of 1 and a token of 0 (14 to 17)      | read 1 at 14, and so on
    """
    records, _ = simulate([ask(0, 10.0, 6, 4), ask(1, 10.5, 5, 2)])
    assert times_of(records[0]) == pytest.approx([13.0, 14.0, 17.0, 18.0])
    assert times_of(records[1]) == pytest.approx([17.0, 18.0])
    assert records[1].phases.queue_s == pytest.approx(13.0 - 10.5)


def test_without_overlap_a_step_waits_for_the_result_before_it() -> None:
    runner = CONFIG.runner.model_copy(update={"overlap": False})
    config = CONFIG.model_copy(update={"runner": runner})
    records, _ = simulate([ask(0, 10.0, 6, 4), ask(1, 10.5, 5, 2)], config=config)
    assert times_of(records[0]) == pytest.approx([13.0, 16.0, 17.0, 18.0])
    assert times_of(records[1]) == pytest.approx([16.0, 17.0])


def test_a_long_prompt_is_cut_and_a_third_request_waits_for_a_row() -> None:
    records, _ = simulate([ask(0, 0.0, 16, 1), ask(1, 0.0, 4, 9), ask(2, 0.0, 4, 1)])
    assert times_of(records[0]) == pytest.approx([6.0])  # two chunks of eight
    assert times_of(records[1])[0] == pytest.approx(9.0)
    assert records[2].phases.queue_s is not None
    assert records[2].phases.queue_s > 0.0


def test_what_a_server_of_the_policy_refuses_is_refused() -> None:
    scheduler = CONFIG.scheduler.model_copy(update={"policy": "fcfs"})
    config = CONFIG.model_copy(update={"scheduler": scheduler})
    records, _ = simulate([ask(0, 0.0, 4, 2, priority=1), ask(1, 0.0, 4, 2)], config=config)
    assert [records[index].outcome for index in (0, 1)] == ["refused", "ok"]
    assert "scheduler.policy is fcfs" in records[0].error


def test_what_can_never_run_and_what_finds_the_queue_full_is_refused() -> None:
    limits = CONFIG.limits.model_copy(update={"max_waiting_requests": 2})
    config = CONFIG.model_copy(update={"limits": limits})
    asks = [ask(0, 0.0, 60, 1), *(ask(index, 0.0, 4, 4) for index in range(1, 7))]
    records, _ = simulate(asks, config=config)
    outcomes = [records[index].outcome for index in range(7)]
    assert outcomes == ["refused", "ok", "ok", "refused", "refused", "refused", "refused"]
    assert "the queue is full" in records[3].error
    assert records[3].end_s == records[3].intended_s


def test_a_deadline_cuts_the_output_and_the_client_gives_up_at_its_limit() -> None:
    records, _ = simulate([ask(0, 0.0, 4, 20, deadline_s=6.5), ask(1, 0.0, 4, 20)], timeout_s=12.0)
    assert records[0].outcome == "timed_out"
    assert records[1].outcome == "timed_out"
    assert records[1].end_s == pytest.approx(12.0)
    assert all(time_s <= 12.0 for time_s in times_of(records[1]))


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    asks = [ask(index, 0.0, 4, 2) for index in range(5)]
    records, simulation = simulate(asks, concurrency=1)
    for before, after in itertools.pairwise(records[index] for index in range(5)):
        assert after.intended_s == before.end_s
    assert max(sample.in_flight for sample in simulation.timeline) == 1


def test_a_replay_that_is_over_cuts_what_still_runs() -> None:
    records, _ = simulate([ask(0, 0.0, 4, 30), ask(1, 1.0, 4, 30)], max_drain_s=5.0)
    assert [records[index].outcome for index in (0, 1)] == ["cancelled", "cancelled"]


def test_the_scheduler_finds_the_device_s_times_again() -> None:
    asks = [ask(index, index * 4.0, 5 + index % 4, 6) for index in range(60)]
    _, simulation = simulate(asks)
    found = simulation.scheduler.step_times
    for bucket, seconds in SECONDS.items():
        assert found.predict(bucket, StepWork(9, 9)) == pytest.approx(seconds, rel=1e-3)


def test_a_text_and_an_open_end_cannot_be_simulated() -> None:
    with pytest.raises(WorkloadError, match="is a text"):
        simulate([dataclasses.replace(ask(0, 0.0, 4, 1), prompt="hello")])
    with pytest.raises(WorkloadError, match="leaves its end to the model"):
        simulate([dataclasses.replace(ask(0, 0.0, 4, 1), sampling={})])


def served(times: StepTimes) -> ServedTimes:
    return ServedTimes(
        times=times,
        model="tiny",
        platform="cpu",
        vocab_size=100,
        max_model_tokens=64,
        num_pages=33,
        page_size=4,
        page_bytes=400,
    )


def small_load(num_requests: int = 40) -> Load:
    entries = [
        WorkloadEntry(
            index=index,
            at_s=index * 2.0,
            prompt=Recipe(num_tokens=3 + index % 9),
            prompt_class="long" if index % 2 else "short",
            wanted_tokens=2 + index % 5,
        )
        for index in range(num_requests)
    ]
    return load_memory(build_workload(Header(name="small"), entries))


def simulator(**options: Any) -> Simulator:  # noqa: ANN401  # fields
    return Simulator(
        load=small_load(),
        config=CONFIG,
        served=served(fixed_times()),
        options=BenchOptions(limits=read_limits(["ttft=8"], {}), seed=3, repeats=2),
        **options,
    )


def test_the_result_is_that_of_a_benchmark(tmp_path: Path) -> None:
    lines = tmp_path / "requests.jsonl"
    with RequestWriter(lines) as writer:
        result = simulator(writer=writer).run(date="today")
    assert result["kind"] == "bench"
    assert result["backend"] == "jaxserve simulated"
    assert result["outcomes"]["ok"] == 80
    assert len(lines.read_text().splitlines()) == 80
    assert result["tokens"]["output"] == 2 * sum(2 + index % 5 for index in range(40))
    assert result["goodput"]["tokens_per_s"] <= result["goodput"]["raw_tokens_per_s"]
    assert result["latency"]["itl"]["p50"] == pytest.approx(1.0)
    assert result["server"]["preemptions"] == 0
    assert {row["bucket"] for row in result["server"]["buckets"]} == {"2x1+0", "2x1+8"}
    assert json.dumps(result)


def test_the_same_seed_is_the_same_simulation() -> None:
    first, second = (simulator().run(date="today") for _ in range(2))
    assert first == second


def test_jitter_draws_from_what_was_measured() -> None:
    times = fixed_times()
    times.programs[DECODE].ratios.extend([0.5, 1.5] * 128)
    with_jitter = dataclasses.replace(simulator(), served=served(times))
    itl = with_jitter.run(date="today")["latency"]["itl"]
    assert itl["p99"] >= 1.5
    steady = dataclasses.replace(with_jitter, has_jitter=False)
    assert steady.run(date="today")["latency"]["itl"]["p50"] == pytest.approx(1.0)


def test_step_times_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "step_times.json"
    before = served(fixed_times())
    write_step_times(before, path)
    again = read_step_times(path)
    assert dataclasses.replace(again, times=STEADY) == dataclasses.replace(before, times=STEADY)
    assert again.times.predict(CHUNK, StepWork(5, 5)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not JSON"), ("{}", "has no step_times"), ('{"step_times": {}}', "vocab_size is")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_step_times(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_step_times(tmp_path / "y.json")


def test_time_never_runs_backwards() -> None:
    records, _ = simulate([ask(index, index * 0.7, 3 + index % 7, 5) for index in range(50)])
    for record in records.values():
        times = times_of(record)
        assert times == sorted(times)
        assert record.intended_s <= times[0] <= times[-1] <= record.end_s < math.inf


def replay_overload(policy: str, *, rate: float, seed: int = 1) -> float:
    """Returns the goodput of requests of 4 + 6 tokens, for a machine that does a fifth a second.

    A first token is due within 12 s, and six tokens take 6 s more at least.
    """
    rng, at_s, asks = random.Random(seed), 0.0, []
    for index in range(200):
        at_s += rng.expovariate(rate)
        asks.append(ask(index, at_s, 4, 6, deadline_s=40.0))
    limits = CONFIG.limits.model_copy(update={"queue_timeout_s": 12.0})
    scheduler = CONFIG.scheduler.model_copy(update={"policy": policy})
    config = CONFIG.model_copy(update={"limits": limits, "scheduler": scheduler})
    records, _ = simulate(asks, config=config)
    good = [r for r in records.values() if r.outcome == "ok" and _ttft_s(r) <= 12.0]
    return 6 * len(good) / max(record.end_s for record in records.values())


def _ttft_s(record: RequestRecord) -> float:
    return record.arrivals[0].time_s - record.intended_s


def test_edf_keeps_its_goodput_at_three_times_what_the_machine_can_do() -> None:
    """What fcfs runs at three times the load has waited until its first token is late."""
    rates = (0.1, 0.2, 0.6)
    goodput = {
        (policy, rate): replay_overload(policy, rate=rate)
        for policy in ("fcfs", "edf")
        for rate in rates
    }
    best = max(goodput.values())
    assert goodput["edf", 0.6] >= 0.9 * best
    assert goodput["fcfs", 0.6] < 0.6 * best


def same(index: int, prompt_class: str = "") -> Ask:
    """One of several with the same prompt, which do not meet."""
    asked = ask(index, 20.0 * index, 16, 2, prompt_class=prompt_class)
    return dataclasses.replace(asked, prompt=(9,) * 16)


@pytest.mark.parametrize(("enabled", "num_cached"), [(True, 15), (False, None)])
def test_a_prompt_that_was_computed_before_is_not_computed_again(
    enabled: bool, num_cached: int | None
) -> None:
    section = CONFIG.prefix_cache.model_copy(update={"enabled": enabled})
    config = CONFIG.model_copy(update={"prefix_cache": section})
    asks = [same(0), same(1)]
    records, _ = simulate(asks, config=config)
    assert records[1].cached_prompt_tokens == num_cached  # all but the last
    assert _ttft_s(records[1]) == pytest.approx(1.0 if enabled else 2 * 3.0)  # or two chunks


def test_a_host_tier_is_refused_by_name() -> None:
    section = CONFIG.host_tier.model_copy(update={"enabled": True})
    with pytest.raises(ConfigError, match="the host tier is not simulated"):
        simulate([same(0)], config=CONFIG.model_copy(update={"host_tier": section}))


def test_tenants_share_nothing() -> None:
    asks = [same(index, prompt_class=name) for index, name in enumerate("abb")]
    records, _ = simulate(asks, tenant_of=lambda asked: asked.prompt_class)
    assert [records[index].cached_prompt_tokens for index in range(3)] == [0, 0, 15]


def times_of_second(first: int, *, shared: bool, gap_s: float) -> list[float]:
    """Returns when the second tenant's tokens come, after or while the first asks something.

    Args:
      first: the token of the first one's prompt; the second's is of nines.
    """
    names = {"team": ("a", "b")} if shared else {}
    section = CONFIG.prefix_cache.model_copy(update={"shared_namespaces": names})
    config = CONFIG.model_copy(update={"prefix_cache": section})
    asks = [
        dataclasses.replace(same(0, "a"), prompt=(first,) * 16),
        dataclasses.replace(same(1, "b"), at_s=gap_s),
    ]
    records, _ = simulate(asks, config=config, tenant_of=lambda asked: asked.prompt_class)
    return times_of(records[1])


@pytest.mark.parametrize("gap_s", [20.0, 4.0, 0.0])
def test_no_time_tells_a_tenant_what_another_asked(gap_s: float) -> None:
    """Neither what is kept nor a prefill that one could wait for; where they share, it does."""
    same_prompt, other_prompt = (
        times_of_second(first, shared=False, gap_s=gap_s) for first in (9, 7)
    )
    assert same_prompt == other_prompt
    shared_same, shared_other = (
        times_of_second(first, shared=True, gap_s=gap_s) for first in (9, 7)
    )
    assert shared_other == other_prompt
    assert shared_same != shared_other
