"""`jaxserve simulate`: from files to a result, a page and an exit code."""

import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.measure.step_times import write_step_times
from tests.measure.test_simulate import fixed_times, served

SETTINGS = (
    "scheduler.max_seqs=2", "kv.page_size=4", "kv.num_pages=17", "buckets.decode_seqs=[2]",
    "buckets.chunk_tokens=[8]", "buckets.chunk_decode_seqs=[2]", "buckets.chunk_tile=4",
)  # fmt: skip


def simulate(folder: Path, *more: str) -> int:
    path = folder / "step_times.json"
    if not path.exists():
        write_step_times(served(fixed_times()), path)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    files = ["--step-times", str(path), "--out", str(folder / "out")]
    return main(["simulate", *files, "--seed", "5", "--quiet", *settings, *more])


LOAD = ("--rate", "0.2", "--num-requests", "20", "--prompt-tokens", "6", "--output-tokens", "3")


def test_a_simulation_leaves_what_a_benchmark_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, *LOAD, "--limit", "ttft=20") == 0
    shown = capsys.readouterr().out
    assert "jaxserve simulated: tiny" in shown
    assert "20 sent: 20 ok" in shown
    out = tmp_path / "out"
    result = json.loads((out / "result.json").read_text())
    assert result["goodput"]["compliant_tokens"] == 60
    assert len((out / "requests.jsonl").read_text().splitlines()) == 20
    assert (out / "result.html").exists()


def test_results_are_not_overwritten_unasked_and_requests_are_left_out_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, *LOAD, "--no-requests") == 0
    assert not (tmp_path / "out" / "requests.jsonl").exists()
    assert simulate(tmp_path, *LOAD) == 1
    assert "--overwrite replaces them" in capsys.readouterr().err
    assert simulate(tmp_path, *LOAD, "--overwrite", "--no-jitter") == 0


def test_nothing_that_ended_as_asked_is_exit_code_1(tmp_path: Path) -> None:
    assert simulate(tmp_path, *LOAD, "--timeout", "0.5") == 1


def test_a_load_of_which_nothing_fits_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, *LOAD[:-4], "--prompt-tokens", "600", "--output-tokens", "3") == 1
    error = capsys.readouterr().err
    assert "every request of workload" in error
    assert "served context of 64 tokens" in error


def test_a_file_that_is_missing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--step-times", str(tmp_path / "no.json"), "--rate", "1"]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("jaxserve: error: step times")
