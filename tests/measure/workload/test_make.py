"""Workloads that are made: the distributions asked for, and the same file for a seed for good."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, WorkloadError
from jaxserve.measure.workload import Header, Recipe, WorkloadEntry
from jaxserve.measure.workload.draws import Draws, exp, log
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.lengths import (
    Empirical,
    Lengths,
    Lognormal,
    Uniform,
    describe,
    parse_lengths,
    zipf_weights,
)
from jaxserve.measure.workload.make import (
    ClosedLoop,
    OpenLoop,
    PrefixGroups,
    PromptClass,
    arrival_times,
    make_entries,
)

FIXED = Uniform(low=8, high=8)
PLAIN = PromptClass(prompt=FIXED, output=FIXED)


def gaps_of(loop: OpenLoop, num: int = 5000) -> list[float]:
    times = list(islice(arrival_times(loop, 1), num))
    assert times == sorted(times)
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_their_burstiness(burstiness: float) -> None:
    gaps = gaps_of(OpenLoop(rate=20.0, burstiness=burstiness))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    # of a gamma distribution: deviation / mean = 1 / sqrt(shape)
    assert statistics.stdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_poisson_gaps_are_exponential() -> None:
    gaps = sorted(gaps_of(OpenLoop(rate=1.0)))
    for share in (0.1, 0.5, 0.9, 0.99):
        found = gaps[int(share * len(gaps))]
        assert 1 - math.exp(-found) == pytest.approx(share, abs=0.02)


def test_a_constant_rate_does_not_drift() -> None:
    times = list(islice(arrival_times(OpenLoop(rate=3.0, burstiness=math.inf), 1), 3001))
    assert times[:4] == [0.0, 0.333333, 0.666667, 1.0]
    assert times[-1] == 1000.0


def test_a_closed_loop_has_no_times() -> None:
    made = list(make_entries(ClosedLoop(concurrency=2), [PLAIN], seed=1, num_requests=5))
    assert [entry.at_s for entry in made] == [0.0] * 5


def test_a_duration_ends_it() -> None:
    loop = OpenLoop(rate=10.0)
    made = list(make_entries(loop, [PLAIN], seed=1, duration_s=20.0))
    more = list(make_entries(loop, [PLAIN], seed=1, duration_s=40.0))
    assert made[-1].at_s < 20.0 <= more[len(made)].at_s
    assert more[: len(made)] == made
    few = make_entries(loop, [PLAIN], seed=1, num_requests=3, duration_s=20.0)
    assert list(few) == made[:3]


def lengths_of(lengths: Lengths, num: int = 4000) -> list[int]:
    draws = Draws(7, "test")
    return [lengths.draw(draws) for _ in range(num)]


def test_a_uniform_has_all_its_lengths_and_no_other() -> None:
    counts = Counter(lengths_of(Uniform(low=3, high=6)))
    assert counts.keys() == {3, 4, 5, 6}
    assert min(counts.values()) > 850


def test_a_lognormal_has_its_median_and_its_spread() -> None:
    found = lengths_of(Lognormal(median=200.0, sigma=0.5))
    assert statistics.median(found) == pytest.approx(200, rel=0.05)
    assert statistics.stdev([math.log(length) for length in found]) == pytest.approx(0.5, rel=0.05)
    cut = lengths_of(Lognormal(median=200.0, sigma=0.5, most_tokens=250))
    assert cut == [min(length, 250) for length in found]
    assert min(lengths_of(Lognormal(median=0.5, sigma=3.0))) == 1


def test_an_empirical_gives_the_lengths_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n5\n9\n")
    lengths = parse_lengths(f"file:{path}", "--x")
    assert lengths == Empirical(lengths=(5, 5, 9))
    counts = Counter(lengths_of(lengths))
    assert counts.keys() == {5, 9}
    assert counts[5] / counts[9] == pytest.approx(2, rel=0.1)
    described = describe(lengths, f"file:{path}")
    assert described["lengths"] == "file:lengths.txt"
    assert described["num"] == 3
    for text, message in (("", "is empty"), ("5 x", "its value 2 is 'x'"), ("0", "value 1 is '0'")):
        path.write_text(text)
        with pytest.raises(WorkloadError, match=message):
            parse_lengths(f"file:{path}", "--x")
    with pytest.raises(WorkloadError, match="cannot be read"):
        parse_lengths(f"file:{tmp_path / 'no'}", "--x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", Uniform(low=12, high=12)),
        ("uniform:1:2", Uniform(low=1, high=2)),
        ("lognormal:200:0.5", Lognormal(median=200.0, sigma=0.5)),
        ("lognormal:200:0.5:900", Lognormal(median=200.0, sigma=0.5, most_tokens=900)),
    ],
)
def test_lengths_are_read(text: str, expected: Lengths) -> None:
    assert parse_lengths(text, "--x") == expected


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "x", "uniform", "uniform:3", "uniform:3:2", "uniform:0:2", "file:",
     "uniform:1:2:3", "lognormal:9", "lognormal:9:-1", "lognormal:0:1", "lognormal:nan:1",
     "lognormal:9:1:0", "lognormal:9:1:2:3", "normal:1:2", "12:13"],
)  # fmt: skip
def test_what_are_no_lengths_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--x '.*' is no distribution .* write N, uniform:LOW"):
        parse_lengths(text, "--x")


def make_mixed(seed: int, num: int = 2000) -> list[WorkloadEntry]:
    chat = PromptClass(
        name="chat",
        weight=3.0,
        prompt=Lognormal(median=60.0, sigma=0.6, most_tokens=400),
        output=Uniform(low=4, high=32),
        prefix=PrefixGroups(num_groups=8, num_tokens=50, zipf=1.0),
        deadline_s=5.0,
        priority=2,
    )
    code = PromptClass(name="code", prompt=Uniform(low=200, high=300), output=FIXED)
    loop = OpenLoop(rate=4.0, burstiness=0.5)
    return list(make_entries(loop, [chat, code], seed=seed, num_requests=num))


def keys_of(entry: WorkloadEntry) -> Sequence[str]:
    assert isinstance(entry.prompt, Recipe)
    return entry.prompt.blocks


def test_classes_come_by_weight_each_with_its_own_facts() -> None:
    made = make_mixed(1)
    chat = [entry for entry in made if entry.prompt_class == "chat"]
    code = [entry for entry in made if entry.prompt_class == "code"]
    assert len(chat) + len(code) == len(made)
    assert len(chat) / len(made) == pytest.approx(0.75, abs=0.03)
    assert {(entry.deadline_s, entry.priority) for entry in chat} == {(5.0, 2)}
    assert {(entry.deadline_s, entry.priority) for entry in code} == {(None, 0)}
    assert {entry.wanted_tokens for entry in chat} == set(range(4, 33))
    assert {entry.wanted_tokens for entry in code} == {8}
    assert all(200 <= (entry.prompt_tokens or 0) <= 300 for entry in code)


def test_groups_share_their_prefix_and_are_drawn_by_zipf() -> None:
    made = [entry for entry in make_mixed(1) if entry.prompt_class == "chat"]
    assert all(isinstance(e.prompt, Recipe) and e.prompt.block_tokens == 50 for e in made)
    assert all((entry.prompt_tokens or 0) > 50 for entry in made)
    counts = Counter(keys_of(entry)[0] for entry in made)
    assert counts.keys() == {f"chat/{rank}" for rank in range(8)}
    assert {entry.group for entry in made} == counts.keys()
    weights = zipf_weights(8, 1.0)
    for rank, weight in enumerate(weights):
        share = counts[f"chat/{rank}"] / len(made)
        assert share == pytest.approx(weight / sum(weights), abs=0.03)


def test_a_class_keeps_its_lengths_whatever_else_is_made() -> None:
    alone = PromptClass(name="code", prompt=Uniform(low=200, high=300), output=FIXED)
    made = make_entries(OpenLoop(rate=1.0), [alone], seed=1, num_requests=10)
    code = [entry.prompt_tokens for entry in make_mixed(1) if entry.prompt_class == "code"]
    assert [entry.prompt_tokens for entry in made] == code[:10]


def test_a_seed_makes_the_same_workload_everywhere_and_for_good() -> None:
    made = build_workload(Header(name=""), make_mixed(1))
    expected = "da54f3ebb61dd43196b725e8ff17719d3c3f9bc8208a8f1eb7faaf53e668e475"
    assert made.content_hash == expected
    assert build_workload(Header(name=""), make_mixed(2)).content_hash != made.content_hash


def test_log_and_exp_are_those_of_the_c_library_to_its_last_bits() -> None:
    draws = Draws(3, "test")
    for _ in range(5000):
        x = draws.uniform()
        assert log(x) == pytest.approx(math.log(x), rel=4e-16, abs=1e-300)
        y = 60.0 * x - 30.0
        assert exp(y) == pytest.approx(math.exp(y), rel=5e-16)
    assert (log(1.0), exp(0.0), exp(-1e9)) == (0.0, 1.0, 0.0)
    assert log(2.0**60) == pytest.approx(60 * math.log(2), rel=1e-15)


def test_draws_are_even_and_streams_are_their_own() -> None:
    draws = Draws(0, "a")
    counts = Counter(draws.below(10) for _ in range(20_000))
    assert counts.keys() == set(range(10))
    assert max(counts.values()) - min(counts.values()) < 300
    first, second = Draws(0, "a"), Draws(0, "b")
    assert [first.uniform() for _ in range(3)] != [second.uniform() for _ in range(3)]
