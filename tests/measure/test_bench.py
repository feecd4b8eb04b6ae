"""A whole benchmark in virtual time: its result, its requests, what it warns of."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ResultError, WorkloadError
from jaxserve.measure.bench import Bench, Progress
from jaxserve.measure.bench_options import BenchOptions, Served
from jaxserve.measure.cautions import find_warnings
from jaxserve.measure.goodput import Totals
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.load import AskMaker, Load, load_file, load_memory
from jaxserve.measure.records import ServerPhases
from jaxserve.measure.request_lines import RequestWriter, read_records
from jaxserve.measure.result import read_result, write_result
from jaxserve.measure.targets.base import TargetFacts
from jaxserve.measure.workload import Header, Prompt, Recipe, WorkloadEntry, save_workload
from jaxserve.measure.workload.entry import Workload, build_workload
from tests.measure import sample
from tests.measure.records import build_record, sum_up
from tests.measure.simulated import SimulatedTarget
from tests.measure.virtual import run_virtual

FACTS = TargetFacts(backend="x", model="m", vocab_size=50, special_ids=frozenset({0}))
VLLM_KEYS = (
    "date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput",
    *(
        f"{part}_{name}_ms"
        for part in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
)  # fmt: skip


def run(target: SimulatedTarget, **options: Any) -> dict[str, Any]:  # noqa: ANN401  # BenchOptions
    bench = sample.build_bench(target, **options)
    return run_virtual(bench.run(date=sample.DATE))


def build_workload_of(*prompts: Prompt, prompts_are: str = "unique", **facts: Any) -> Workload:  # noqa: ANN401
    header = Header(name="w", prompts=prompts_are, **facts)  # type: ignore[arg-type]  # a word
    return build_workload(
        header,
        [
            WorkloadEntry(index=0, at_s=float(n), prompt=prompt, wanted_tokens=3)
            for n, prompt in enumerate(prompts)
        ],
    )


def test_the_committed_samples_are_what_is_made_today(tmp_path: Path) -> None:
    """Whoever reads results is tested with them: a change of the schema shows here first."""
    result = sample.make_result(tmp_path / "requests.jsonl")
    assert json.loads(json.dumps(result)) == json.loads(sample.RESULT.read_text())
    assert (tmp_path / "requests.jsonl").read_text() == sample.REQUESTS.read_text()
    assert json.loads(json.dumps(sample.make_sweep())) == json.loads(sample.SWEEP.read_text())


def test_a_result_has_vllms_keys_and_they_agree_with_ours() -> None:
    result = json.loads(sample.RESULT.read_text())
    assert [key for key in VLLM_KEYS if key not in result] == []
    goodput, outcomes = result["goodput"], result["outcomes"]
    assert result["num_prompts"] == outcomes["sent"] == 72
    assert result["completed"] + result["failed"] == 72
    assert result["output_throughput"] == goodput["raw_tokens_per_s"]
    assert result["mean_ttft_ms"] == pytest.approx(1000 * result["latency"]["ttft"]["mean"])
    assert result["median_e2el_ms"] == pytest.approx(1000 * result["latency"]["e2e"]["p50"])
    assert sum(outcomes[name] for name in ("ok", "refused", "failed")) == 72


def test_the_figures_of_a_result_are_those_of_its_requests() -> None:
    """Worked out again from the lines alone."""
    result = json.loads(sample.RESULT.read_text())
    limits = read_limits(sample.LIMITS)
    pooled = Totals()
    lines = list(read_records(sample.REQUESTS))
    assert [repeat for repeat, _ in lines].count(None) == 2
    for number in range(3):
        pooled.extend(sum_up((record for repeat, record in lines if repeat == number), limits))
    assert pooled.goodput == pytest.approx(result["goodput"]["tokens_per_s"], rel=1e-6)
    assert pooled.attainment == pytest.approx(result["attainment"]["all"]["share"])
    assert pooled.samples["itl"].describe().p95 == pytest.approx(
        result["latency"]["itl"]["p95"], abs=2e-9
    )


def test_phases_send_and_delivery_make_up_the_whole() -> None:
    for _, record in read_records(sample.REQUESTS):
        if record.outcome == "ok":
            phases = dataclasses.astuple(record.phases)[:4]
            assert record.end_s - record.sent_s == pytest.approx(sum(phases), abs=1e-6)


def test_a_records_line_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = build_record(
        [(1.0, 2), (1.5, 0)],
        phases=ServerPhases(queue_s=0.25),
        error="a \u2028 b",
        deadline_s=3.0,
        is_warm_up=True,
    )
    with RequestWriter(tmp_path / "r.jsonl") as writer:
        writer.write(record, 4)
        writer.write(record, None)
    assert list(read_records(tmp_path / "r.jsonl")) == [(4, record), (None, record)]


@pytest.mark.parametrize(
    "damage",
    [
        {"index": "0"},
        {"sent_s": "1.0"},
        {"outcome": "fine"},
        {"repeat": "0"},
        {"new": 1},
        {"arrivals": [[1.0, 2.5]]},
        {"arrivals": [1.0]},
        {"phases": {"queue_s": "a"}},
        {"phases": {"new": 1.0}},
        {"end_s": None},
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "r.jsonl"
    with RequestWriter(path) as writer:
        writer.write(build_record([(1.0, 2)]), 0)
    facts = json.loads(path.read_text())
    assert len(list(read_records(path))) == 1
    path.write_text(path.read_text() + json.dumps(facts | damage) + "\n")
    with pytest.raises(ResultError, match=r"r\.jsonl, line 2: not a request"):
        list(read_records(path))


def test_a_server_is_told_by_what_it_did_during_the_repeats() -> None:
    target = SimulatedTarget()
    target.metrics.steps.labels("2x1+0").inc(1000)  # before
    server = run(target, warm_up=3)["server"]
    by_bucket = {row["bucket"]: row for row in server["buckets"]}
    assert by_bucket["2x1+64"]["steps"] == 24
    assert by_bucket["2x1+0"]["steps"] == sum(4 + n % 4 - 1 for n in range(24))
    assert server["row_occupancy"] == pytest.approx(0.5)
    assert server["host_gap_share"] == pytest.approx(0.1)
    assert server["kv_usage_peak"] == 0.5
    assert server["peak_memory_bytes"] == 1.5 * (1 << 30)
    assert server["compiles"]["while_serving"] == 0
    assert 0 < server["padding_share"] < 1


def test_repeats_have_prompts_of_their_own_and_the_same_lengths() -> None:
    prompts: dict[str, tuple[int, ...]] = {}

    class Watched(SimulatedTarget):
        def stream(self, ask, *, left_s):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            prompts[ask.request_id] = ask.prompt
            return super().stream(ask, left_s=left_s)

    run(Watched(), repeats=2, warm_up=4)
    assert len(prompts) == 2 * 24 + 4
    assert len(set(prompts.values())) == len(prompts)
    assert sorted(len(prompt) for prompt in prompts.values()) == sorted(
        [20 + 7 * (n % 5) for n in range(24)] * 2 + [20 + 7 * (n % 5) for n in range(4)]
    )
    assert not {0, 1} & {token for prompt in prompts.values() for token in prompt}


def test_a_seed_makes_the_same_prompts_again_and_another_makes_others() -> None:
    maker = AskMaker(header=Header(name="w"), facts=FACTS, sampling={})
    entry = WorkloadEntry(index=3, at_s=0.0, prompt=Recipe(num_tokens=9))
    assert maker.make(entry, "1 repeat 0") == maker.make(entry, "1 repeat 0")
    assert maker.make(entry, "1 repeat 0").prompt != maker.make(entry, "2 repeat 0").prompt


def test_a_scale_of_the_rate_sends_sooner() -> None:
    slow, fast = (
        run(SimulatedTarget(rows=100), rate_scale=scale)["manifest"]["offered_load"]
        for scale in (1.0, 4.0)
    )
    assert fast["requests_per_s"] == pytest.approx(4 * slow["requests_per_s"])
    maker = AskMaker(header=Header(name="w"), facts=FACTS, sampling={}, rate_scale=4.0)
    entry = WorkloadEntry(index=0, at_s=6.0, prompt=Recipe(num_tokens=1))
    assert maker.make(entry, "").at_s == 1.5


@pytest.mark.parametrize(
    ("lengths", "ignores_end", "wanted", "sampling"),
    [
        ("exact", True, 5, {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}),
        ("exact", False, 5, {"temperature": 0.0, "max_tokens": 5}),
        ("at_most", True, None, {"temperature": 0.0, "max_tokens": 5}),
    ],
)
def test_lengths_are_exact_or_at_most(
    lengths: Any,  # noqa: ANN401  # a word
    ignores_end: bool,
    wanted: int | None,
    sampling: dict[str, object],
) -> None:
    maker = AskMaker(
        header=Header(name="w"),
        facts=FACTS,
        sampling={"temperature": 0.0},
        lengths=lengths,
        ignores_end=ignores_end,
    )
    entry = WorkloadEntry(index=0, at_s=0.0, prompt=Recipe(num_tokens=1), wanted_tokens=5)
    ask = maker.make(entry, "")
    assert (ask.wanted_tokens, ask.sampling) == (wanted, sampling)


def test_sampled_requests_get_seeds_and_an_entrys_own_sampling_wins() -> None:
    maker = AskMaker(header=Header(name="w"), facts=FACTS, sampling={"temperature": 0.5})
    entry = WorkloadEntry(
        index=0, at_s=0.0, prompt=Recipe(num_tokens=1), sampling={"temperature": 0.9, "top_k": 4}
    )
    one, other = maker.make(entry, "a").sampling, maker.make(entry, "b").sampling
    assert (one["temperature"], one["top_k"]) == (0.9, 4)
    assert one["seed"] != other["seed"]


def test_made_up_prompts_need_a_vocabulary_and_may_become_text() -> None:
    entry = WorkloadEntry(index=0, at_s=0.0, prompt=Recipe(num_tokens=3))
    maker = AskMaker(header=Header(name="w"), facts=TargetFacts(backend="x"), sampling={})
    with pytest.raises(WorkloadError, match="name the model's files as MODEL"):
        maker.make(entry, "")
    maker = AskMaker(
        header=Header(name="w"), facts=FACTS, sampling={}, decode=lambda ids: f"{len(ids)} words"
    )
    assert maker.make(entry, "").prompt == "3 words"


@pytest.mark.parametrize(
    ("prompts_are", "options", "is_fresh", "state"),
    [
        ("unique", {}, False, "cold"),
        ("unique", {"repeats": 3, "warm_up": 1}, False, "cold"),
        ("unique", {"primes_cache": True}, False, "primed"),
        ("unique", {"primes_cache": True, "repeats": 2}, False, "mixed"),
        ("unique", {"is_seed_chosen": True}, False, "unknown"),
        ("unique", {"is_seed_chosen": True}, True, "cold"),
        ("fixed", {}, True, "cold"),
        ("fixed", {}, False, "unknown"),
        ("fixed", {"warm_up": 1}, True, "unknown"),
        ("fixed", {"repeats": 2}, True, "mixed"),
        ("fixed", {"primes_cache": True, "repeats": 2}, True, "primed"),
        ("fixed", {"cache_state": "primed"}, False, "primed"),
    ],
)
def test_the_state_of_the_caches_is_worked_out_where_it_can_be(
    prompts_are: str, options: dict[str, Any], is_fresh: bool, state: str
) -> None:
    workload = build_workload_of((1, 2), prompts_are=prompts_are)
    if prompts_are == "unique":
        workload = build_workload_of(Recipe(num_tokens=2))
    bench = Bench(
        target=SimulatedTarget(),
        load=load_memory(workload),
        options=BenchOptions(limits=Limits(), seed=1, **options),
        served=Served(is_fresh=is_fresh),
    )
    assert run_virtual(bench.run(date=""))["manifest"]["cache_state"] == state


def test_priming_sends_the_same_prompts_before() -> None:
    prompts: list[tuple[bool, object]] = []

    class Watched(SimulatedTarget):
        def stream(self, ask, *, left_s):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            prompts.append((ask.is_warm_up, ask.prompt))
            return super().stream(ask, left_s=left_s)

    result = run(Watched(), primes_cache=True)
    first, second = (
        {prompt for is_warm_up, prompt in prompts if is_warm_up is kind} for kind in (True, False)
    )
    assert first == second
    assert result["outcomes"]["sent"] == 24


def test_a_closed_loop_is_told_and_scaled_by_its_requests_in_flight() -> None:
    workload = build_workload(
        Header(name="w", arrivals="closed", concurrency=2),
        [
            WorkloadEntry(index=0, at_s=0.0, prompt=Recipe(num_tokens=5), wanted_tokens=3)
            for _ in range(12)
        ],
    )
    bench = Bench(
        target=SimulatedTarget(rows=10),
        load=load_memory(workload),
        options=BenchOptions(limits=Limits(), seed=1, rate_scale=2.0),
        served=Served(),
    )
    result = run_virtual(bench.run(date=""))
    assert result["max_concurrency"] == 4
    assert max(sample["in_flight"] for sample in result["timeline"]) <= 4
    assert any("closed loop" in warning for warning in result["warnings"])


def test_what_a_reader_must_know_is_warned_of() -> None:
    options = BenchOptions(limits=Limits(), seed=1)
    load = {"arrivals": "open", "dropped_over_context": 0}
    manifest = {"offered_load": load, "cache_state": "cold"}
    good = [build_record([(t + 0.1, 1)], intended_s=float(t)) for t in range(10)]
    assert list(find_warnings([sum_up(good, Limits())], manifest, options)) == []
    late = [build_record([(9.0, 1)], sent_s=0.2, are_tokens_assumed=True)]
    found = list(
        find_warnings([sum_up(late, Limits())], {**manifest, "cache_state": "mixed"}, options)
    )
    for word in ("send lag: p99 is 0.200 s", "drain: 9.0 of 9.0 s", "assumed for 1", "mixed"):
        assert any(word in warning for warning in found), word


def test_a_usage_unlike_the_messages_is_warned_of() -> None:
    options = BenchOptions(limits=Limits(), seed=1)
    load = {"arrivals": "open", "dropped_over_context": 0}
    records = [
        build_record([(t + 0.1, 1)], intended_s=float(t), output_tokens=1000 if t == 3 else None)
        for t in range(10)
    ]
    totals = sum_up(records, Limits())
    found = find_warnings([totals], {"offered_load": load, "cache_state": "cold"}, options)
    assert [warning[:18] for warning in found] == ["usage: of 1 reques"]
    both = Totals()
    both.extend(totals)
    both.extend(totals)
    assert both.num_unequal == 2


def test_progress_counts_what_ended() -> None:
    seen: list[Progress] = []
    bench = sample.build_bench(SimulatedTarget(faults={3: "refused"}), warm_up=2, repeats=2)
    bench.on_progress = seen.append
    run_virtual(bench.run(date=""))
    assert [progress.num_ended for progress in seen] == [1, 2, *range(1, 25), *range(1, 25)]
    assert {progress.phase for progress in seen} == {"warm-up", "repeat 1 of 2", "repeat 2 of 2"}
    assert (seen[-1].num_bad, seen[-1].num_all) == (1, 24)


def test_a_file_is_read_through_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    save_workload(build_workload_of(Recipe(num_tokens=2), Recipe(num_tokens=3)), path)
    load = load_file(path)
    assert (load.num_requests, load.span_s, load.num_recipes, load.num_texts) == (2, 1.0, 2, 0)
    for _ in range(2):  # again and again
        with load.open_entries() as entries:
            assert [entry.at_s for entry in entries] == [0.0, 1.0]
    path.write_text(path.read_text().replace('"prompt_tokens":3', '"prompt_tokens":0'))
    with pytest.raises(WorkloadError):
        load_file(path)


def test_what_the_served_context_cannot_hold_is_dropped_and_counted() -> None:
    """Prompts of 20 to 48 tokens and outputs of 4 to 7."""
    entries = [(20 + 7 * (n % 5), 4 + n % 4) for n in range(24)]
    expected = sum(prompt + output > 40 for prompt, output in entries)
    result = run(SimulatedTarget(max_model_tokens=40), warm_up=3, repeats=2)
    assert result["manifest"]["offered_load"]["dropped_over_context"] == expected > 0
    assert result["outcomes"]["sent"] == 2 * (24 - expected)
    assert any(f"{expected} requests of the workload" in word for word in result["warnings"])
    with pytest.raises(WorkloadError, match="every request of workload 'sample' is longer"):
        run(SimulatedTarget(max_model_tokens=9))


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(WorkloadError, match="no entries"):
        load_memory(build_workload(Header(name="empty"), []))


def test_results_are_read_only_as_such(tmp_path: Path) -> None:
    write_result({"schema_version": 1, "kind": "bench"}, tmp_path / "result.json")
    assert read_result(tmp_path) == read_result(tmp_path / "result.json")
    for text, words in (
        ("{", "is not JSON"),
        ("{}", "is not a result"),
        ("[1]", "is not a result"),
        ('{"schema_version": 99}', "has schema_version 99, but this version reads 1"),
    ):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(ResultError, match=words):
            read_result(tmp_path)
    with pytest.raises(ResultError, match="cannot be read: No such file"):
        read_result(tmp_path / "none.json")


def test_energy_that_is_not_known_is_said_and_not_zero() -> None:
    energy = run(SimulatedTarget())["energy"]
    assert (energy["joules"], energy["per_compliant_token"]) == (None, None)
    assert energy["missing"] == {"all": "the server is elsewhere"}


def test_a_loads_rate_is_that_of_its_arrivals() -> None:
    load: Load = sample.build_load()
    assert load.requests_per_s == pytest.approx(24 / load.span_s)
    assert load_memory(build_workload_of(Recipe(num_tokens=1))).requests_per_s is None
