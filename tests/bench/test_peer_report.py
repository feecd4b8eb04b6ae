"""What `bench.peers` makes of its samples: medians, ratios, tables, verdicts, cautions."""

import pytest

from bench.peer import report
from bench.peer.report import Findings, Sample
from bench.peer.variants import OURS
from jaxserve.measure.report.figures import Table

PEER = "llama.cpp BF16"


def sample(
    variant: str, seconds: float, *, num_seqs: int = 8, others: float = 0.0, round_: int = 0
) -> Sample:
    return Sample(
        variant=variant, num_seqs=num_seqs, round=round_, seconds=seconds, num_tokens=100,
        others=others,
    )  # fmt: skip


def test_a_median_is_of_tokens_per_second() -> None:
    samples = [sample(PEER, seconds) for seconds in (4.0, 2.0, 100.0)]
    assert report.find_medians(samples) == {(PEER, 8): 200.0}


def test_sizes_are_kept_apart() -> None:
    samples = [sample(PEER, 1.0, num_seqs=1), sample(PEER, 1.0, num_seqs=8)]
    assert report.find_medians(samples) == {(PEER, 1): 100.0, (PEER, 8): 800.0}


def test_a_ratio_is_this_engines_by_the_peers() -> None:
    medians = report.find_medians([sample(OURS, 2.0), sample(PEER, 4.0)])
    assert report.find_ratio(medians, PEER, 8) == 2.0


def test_without_this_engine_there_is_no_ratio() -> None:
    medians = report.find_medians([sample(PEER, 4.0)])
    assert report.find_ratio(medians, PEER, 8) is None
    assert [line for line, holds in report.judge(medians) if holds] == []
    assert "8 seqs: not measured beside llama.cpp BF16 (wanted: 1)" in dict(report.judge(medians))


def test_what_is_wanted_is_judged_by_the_share() -> None:
    ours = sample(OURS, 1.0, num_seqs=32)
    for seconds, holds in ((0.86, True), (0.84, False)):
        peer = sample("OpenVINO GenAI bfloat16", seconds, num_seqs=32)
        *others, (line, found) = report.judge(report.find_medians([ours, peer]))
        assert found is holds
        assert line.startswith("32 seqs: 0.8")
        assert not any(holds for _, holds in others)


def test_the_table_has_a_row_for_each_variant_and_gaps_where_nothing_was_measured() -> None:
    found = Findings(variants=[OURS, PEER], samples=[sample(OURS, 2.0), sample(PEER, 4.0)])
    found.samples.append(sample(OURS, 1.0, num_seqs=1))
    found.memory[PEER] = 300 * 2**20, 200 * 2**20
    found.first_tokens[PEER] = [True, True, False, True]
    table = report.build_throughput(found)
    assert list(table.head) == ["", "1 seq", "8 seqs", "start MiB", "serving MiB", "first token"]
    assert list(table.rows[0]) == [OURS, "100.0 (1.00×)", "400.0 (1.00×)", "–", "–", "–"]
    assert list(table.rows[1]) == [PEER, "–", "200.0 (2.00×)", "300", "200", "75 %"]


def test_a_table_as_text_is_aligned() -> None:
    table = Table(head=("", "a"), rows=[("long name", "1"), ("x", "22")])
    assert report.tell(table) == "            a\nlong name   1\nx          22"


def test_batches_beside_which_others_ran_are_told() -> None:
    found = Findings(samples=[sample(OURS, 1.0, others=0.04), sample(PEER, 1.0, others=0.3)])
    (caution,) = report.find_cautions(found)
    assert caution.startswith("1 of 2 batches")
    assert "30 % (llama.cpp BF16)" in caution


@pytest.mark.parametrize(("lossy", "count"), [(set(), 1), ({PEER}, 0)])
def test_other_first_tokens_are_told_unless_weights_are_lossy(lossy: set[str], count: int) -> None:
    found = Findings(first_tokens={PEER: [True, False]}, lossy=lossy)
    assert len(report.find_cautions(found)) == count


def test_the_page_names_what_is_absent_and_why() -> None:
    found = Findings(
        variants=[OURS],
        samples=[sample(OURS, 1.0)],
        absent={"vllm": "no wheel for this Python"},
        unreplayed={"transformers": "no server <of its own>"},
    )
    page = report.build_page(found, ["two cores"])
    assert "Not shown: vllm: no wheel for this Python" in page
    assert "Not shown: transformers: no server &lt;of its own&gt;" in page


def test_a_replay_is_a_row() -> None:
    times = {"p50": 0.1, "p95": None}
    found = Findings()
    found.replays[PEER] = {
        "peak_bytes": 2**30,
        "result": {
            "goodput": {"tokens_per_s": 90.0, "raw_tokens_per_s": 100.0, "attainment": 0.9},
            "latency": {"ttft": times, "itl": times},
            "outcomes": {"ok": 9, "sent": 10},
        },
    }
    (row,) = report.build_replays(found).rows
    assert list(row) == [
        PEER, "90.0", "100.0", "90 %", "9 of 10", "100", "–", "100", "–", "1024",
    ]  # fmt: skip
