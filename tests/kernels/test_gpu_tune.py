"""The tuner, tried on a CPU: which cuts it tries and leaves out, and what it writes.

Its times are made up here, but in the one run that only has to come to its end.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention.launch import Cut, Cuts
from jaxserve.runner.launch_table import LaunchTable, read_launch_table, write_launch_table
from scripts import gpu_attention, gpu_tune
from scripts.gpu_attention import Shape, Workload
from scripts.gpu_tune import Job, build_entry, find_candidates, plan, sift

DECODE = Job(impl="triton_interpret", kind="decode", shape=Shape(heads=(8, 2), head_dim=16))
CHUNK = dataclasses.replace(DECODE, kind="chunk")
MOSAIC = dataclasses.replace(DECODE, impl="mosaic", shape=Shape(heads=(32, 8), head_dim=128))
TRY = "--model tiny --impl triton_interpret --rows 2 --kv-len 40 --max-cuts 2"


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "MAX_LAYERS", 2)
    monkeypatch.setattr(gpu_attention, "LONGEST_CHECKED", 80)
    monkeypatch.setattr(gpu_tune, "NUM_RUNS", 2)
    monkeypatch.setattr(gpu_tune, "NUM_LAST_RUNS", 2)


def run_main(arguments: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_tune", *arguments.split(), "--output", str(output)])
    return gpu_tune.main()


def give_times(monkeypatch: pytest.MonkeyPatch, *rounds: float) -> None:
    """Has the second cut take so much of the first one's time, round by round; others twice it."""
    left = list(rounds)

    def time_in_turn(
        job: Job, cuts: Sequence[Cut], workload: Workload, *, num_runs: int
    ) -> list[float]:
        return [1.0, left.pop(0), *[2.0] * (len(cuts) - 2)]

    monkeypatch.setattr(gpu_tune, "time_in_turn", time_in_turn)


@pytest.mark.parametrize("job", [DECODE, CHUNK, MOSAIC], ids=str)
def test_every_candidate_is_one_that_the_table_may_hold(job: Job) -> None:
    cuts = find_candidates(job)
    assert cuts[0] == plan(job)
    assert len(cuts) == len(set(cuts)) > 20
    for cut in cuts:
        assert build_entry(job, cut, 0.5).cut == cut
    num_pairs = 4 * job.num_queries
    assert max(cut.rows for cut in cuts) == max(num_pairs, 64 if job is MOSAIC else 16)


def test_a_cut_that_is_wrong_or_refused_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuts = find_candidates(DECODE)[:3]

    def check(impl: str, shape: Shape, *, cuts: Cuts) -> float:
        if cuts.decode == refused:
            raise ShapeError("too many of them")
        return {wrong: 0.5, nan: float("nan")}.get(cuts.decode or right, 0.001)

    right, wrong, refused, nan = cuts[0], cuts[1], cuts[2], find_candidates(DECODE)[3]
    monkeypatch.setattr(gpu_attention, "check", check)
    assert list(sift(DECODE, [*cuts, nan])) == [right]
    told = capsys.readouterr().out
    assert "wrong by 5.0e-01" in told
    assert "too many of them" in told


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_it_runs_to_its_end_on_a_cpu(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "launches.json"
    assert run_main(f"{TRY} --kind chunk --kv-dtype {kv_dtype}", output, monkeypatch) == 0
    assert read_launch_table(output).version == 1


def test_what_is_faster_twice_is_written_and_other_entries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "launches.json"
    other = build_entry(MOSAIC, plan(MOSAIC), 0.5)
    stale = build_entry(DECODE, find_candidates(DECODE)[9], 0.9)
    write_launch_table(LaunchTable(entries=(other, stale)), output)
    give_times(monkeypatch, 0.5, 0.75)
    assert run_main(f"{TRY} --kind decode", output, monkeypatch) == 0
    entries = {entry.place: entry for entry in read_launch_table(output).entries}
    found = entries.pop(stale.place)
    assert list(entries) == [other.place]
    assert found.cut == find_candidates(DECODE)[1]
    assert (found.device, found.impl, found.num_shared) == ("cpu", "triton", 4)
    assert found.time_ratio == pytest.approx(0.75)  # of the last round, not of the luckiest


@pytest.mark.parametrize("rounds", [(0.99,), (0.5, 0.99)], ids=["never", "once"])
def test_what_is_not_faster_twice_is_not_written_and_an_old_entry_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: tuple[float, ...]
) -> None:
    output = tmp_path / "launches.json"
    write_launch_table(
        LaunchTable(entries=(build_entry(DECODE, find_candidates(DECODE)[1], 0.9),)), output
    )
    give_times(monkeypatch, *rounds)
    assert run_main(f"{TRY} --kind decode", output, monkeypatch) == 0
    assert json.loads(output.read_text()) == {"version": 1, "entries": []}


def test_where_the_formula_fails_its_entry_stays_and_the_tuner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "launches.json"
    table = LaunchTable(entries=(build_entry(DECODE, find_candidates(DECODE)[1], 0.9),))
    write_launch_table(table, output)
    monkeypatch.setattr(gpu_attention, "check", lambda *_, **__: 0.5)
    assert run_main(f"{TRY} --kind decode", output, monkeypatch) == 1
    assert read_launch_table(output) == table


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--impl triton_interpret", "name the table to write, --output FILE"),
        ("--impl triton --output x", "--impl triton_interpret or mosaic_interpret"),
        ("--impl triton_interpret --output not/there.json", "there is no folder not"),
        ("--impl triton_interpret --output x --rows 0", "--rows: 0 is not at least 1"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_is(
    arguments: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_tune", *arguments.split()])
    with pytest.raises(SystemExit):
        gpu_tune.main()
    assert told in capsys.readouterr().err
