"""`jaxserve bench`: its options, what it writes and prints, and its exit codes."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.checkpoint.registry
import jaxserve.engine.start
from jaxserve.cli.bench import with_action
from jaxserve.cli.bench.progress import BenchProgress
from jaxserve.cli.bench.table import summarize, summarize_sweep
from jaxserve.cli.main import main
from jaxserve.config import Config
from jaxserve.engine import Engine
from jaxserve.measure.bench import Progress
from tests.engines import build_engine
from tests.fakes import say
from tests.measure import sample

SIMPLE = ["--rate", "200", "--num-requests", "8", "--prompt-tokens", "6", "--output-tokens", "4"]


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


class Header:
    identity = "ab" * 32


class Source:
    def load_header(self) -> Header:
        return Header()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config]]:
    """Has the command load a fake engine; returns what was asked for."""
    calls: list[tuple[str, Config]] = []

    def load_engine(name: str, config: Config, *, progress: object = None) -> Engine:
        calls.append((name, config))
        script = say({None: b"abcdefghij" * 4})
        return build_engine(script=script, clock=time.monotonic)[0]

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    monkeypatch.setattr(jaxserve.checkpoint.registry, "find_model", lambda name: Source())
    return calls


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip().splitlines()[-1]


def bench(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *SIMPLE, "--out", str(folder), "--quiet", *more])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return code, result


def test_a_run_writes_its_result_and_its_requests_and_prints_a_table(
    engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    code, result = bench(
        folder, "--limit", "ttft=30", "--limit", "itl_p95=30", "--repeats", "2", "--warm-up", "3",
        "--seed", "5",
    )  # fmt: skip
    assert code == 0
    assert result["outcomes"]["ok"] == 16
    assert result["goodput"]["label"] == "goodput (no quality gate)"
    assert result["goodput"]["tokens_per_s"] > 0
    manifest = result["manifest"]
    assert manifest["bundle_digest"] == "ab" * 32
    assert manifest["limits"] == {"all": ["itl_p95=30", "ttft=30"], "classes": {}}
    assert manifest["hardware"]["cores"]
    assert (manifest["cache_state"], manifest["seed"], manifest["warm_up"]) == ("cold", 5, 3)
    assert "cache_dir" not in manifest["config"]["runner"]
    assert result["server"]["after"]["output_tokens_total"] == (16 + 3) * 4
    assert result["server"]["delta"]["output_tokens_total"] == 16 * 4
    lines = (folder / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 16 + 3
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "goodput (no quality gate)" in captured.out
    assert "16 sent: 16 ok" in captured.out


def test_results_are_not_overwritten_unasked(
    engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path)[0] == 0
    capsys.readouterr()
    assert main(["bench", *SIMPLE, "--out", str(tmp_path)]) == 1
    assert "holds results already; --overwrite replaces them" in error_of(capsys)
    assert bench(tmp_path, "--overwrite")[0] == 0


def test_where_nothing_ended_well_the_exit_code_says_so(engines: list[Any], tmp_path: Path) -> None:
    code, result = bench(tmp_path, "--top-p", "5")
    assert (code, result["outcomes"]["refused"]) == (1, 8)
    assert result["goodput"]["tokens_per_s"] == 0
    assert result["latency"]["ttft"]["mean"] is None


def test_what_the_engine_is_made_of_is_the_configurations(
    engines: list[tuple[str, Config]], tmp_path: Path
) -> None:
    bench(tmp_path, "--set", "scheduler.max_seqs=3", "some/model")
    name, config = engines[0]
    assert (name, config.scheduler.max_seqs) == ("some/model", 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "ftp://x"], "is not in-process, grpc://HOST:PORT, grpcs://HOST:PORT or http"),
        (["--target", "grpc://x:1", "--dtype", "float32"], "--dtype has no meaning for --target"),
        (["--target", "grpc://x:1", "--extras", "vllm"], "--extras has no meaning"),
        (["--target", "grpc://x:1", "--ca-file", "x"], "--ca-file has no meaning"),
        (["--target", "grpcs://x:1", "--ca-file", "/no/file"], "--ca-file /no/file: No such file"),
        (["--target", "grpcs://x:1", "--api-key-env", "NOBODY"], "--api-key-env NOBODY"),
        (["--model-name", "m"], "--model-name has no meaning for --target in-process"),
        (["--limit", "speed=1"], "limit 'speed=1' is not one; write ttft=S"),
        (["--limit", "chta:ttft=1"], "is for prompt class 'chta', but the load's classes are none"),
        (["--repeats", "0"], "--repeats is 0, but must be from 1"),
        (["--warm-up", "9"], "--warm-up is 9, but must be from 0 to 8"),
        (["--workload", "w.jsonl"], "--num-requests and --workload both say what to send"),
        (["--rate-scale", "0"], "--rate-scale is 0"),
        (["--prompt-tokens", "0"], "is no distribution of lengths"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_runs(
    engines: list[Any], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *SIMPLE, *arguments]) == 2
    assert words in error_of(capsys)
    assert engines == []


def test_a_bench_of_nothing_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "give --workload FILE, or --rate R" in error_of(capsys)


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SIMPLE, "--out", str(tmp_path), "--target", "http://127.0.0.1:1/v1"]
    assert main(["bench", *arguments]) == 1
    assert "http://127.0.0.1:1/v1/models does not list models" in error_of(capsys)


def test_two_runs_are_compared_or_refused_with_what_differs(
    engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, more in zip(folders, ([], [], ["--limit", "ttft=9"]), strict=True):
        bench(folder, "--seed", "1", "--repeats", "2", *more)
    for folder in folders:  # a fake engine has no jax
        result = json.loads((folder / "result.json").read_text())
        result["manifest"]["jax_version"] = "0.12.0"
        (folder / "result.json").write_text(json.dumps(result))
    capsys.readouterr()
    one, other, limited = map(str, folders)
    assert main(["bench", "compare", one, other]) == 0
    assert "B / A" in capsys.readouterr().out
    assert main(["bench", "compare", one, limited]) == 1
    assert "cannot be compared: limits:" in error_of(capsys)
    assert main(["bench", "compare", one, limited, "--force"]) == 0
    captured = capsys.readouterr()
    assert "! not the same: limits:" in captured.err
    assert "goodput" in captured.out
    assert main(["bench", "compare", one, str(tmp_path / "none")]) == 1
    assert "cannot be read" in error_of(capsys)


def test_a_sweep_writes_its_points(
    engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    code = main(
        ["bench", "sweep", *SIMPLE, "--out", str(folder), "--quiet", "--limit", "ttft=60",
         "--max-points", "2"]
    )  # fmt: skip
    assert code == 0
    sweep = json.loads((folder / "sweep.json").read_text())
    assert [point["rate_scale"] for point in sweep["points"]] == [1.0, 2.0]
    for point in sweep["points"]:
        assert (folder / point["file"]).exists()
    captured = capsys.readouterr()
    assert "highest load that attained 95 %: scale 2 (none failed)" in captured.out
    assert len(engines) == 1


def test_only_a_sweeps_first_point_meets_a_fresh_engine(engines: list[Any], tmp_path: Path) -> None:
    load = [*SIMPLE[:2], "--requests", *SIMPLE[3:], "--quiet"]
    common = ["--quiet", "--limit", "ttft=60", "--max-points", "2", "--seed", "1"]
    states = []
    for name, more in (("new", []), ("same", ["--fixed-prompts"])):
        file, folder = str(tmp_path / f"{name}.jsonl"), tmp_path / name
        assert main(["workload", "make", "-o", file, *load, *more]) == 0
        assert main(["bench", "sweep", "--workload", file, "--out", str(folder), *common]) == 0
        results = [json.loads((folder / f"point-0{n}.json").read_text()) for n in (1, 2)]
        states.append([result["manifest"]["cache_state"] for result in results])
    assert states == [["cold", "cold"], ["cold", "unknown"]]


def test_a_sweep_needs_a_limit_and_fails_where_no_load_attains(
    engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sweep", *SIMPLE]) == 2
    assert "a sweep needs a limit to meet" in error_of(capsys)
    arguments = [*SIMPLE, "--out", str(tmp_path), "--quiet", "--limit", "ttft=1e-9"]
    assert main(["bench", "sweep", *arguments, "--start", "1000", "--max-points", "2"]) == 1
    assert "no load attained 95 %" in capsys.readouterr().out


def test_the_action_may_be_left_out() -> None:
    assert with_action(["bench", "--rate", "1"]) == ["bench", "run", "--rate", "1"]
    assert with_action(["bench"]) == ["bench", "run"]
    assert with_action(["bench", "m.gguf"]) == ["bench", "run", "m.gguf"]
    for arguments in (["bench", "sweep"], ["bench", "--help"], ["generate", "--rate"], []):
        assert with_action(arguments) == arguments


def test_tables_fit_eighty_columns() -> None:
    result = json.loads(sample.RESULT.read_text())
    result["warnings"] = ["drain: " + "many words " * 20]
    result["manifest"]["workload"]["name"] = "a-name-that-is-far-too-long-for-a-line-of-a-table"
    result["attainment"]["classes"] = {
        f"a-long-class-{n}": result["attainment"]["all"] for n in range(9)
    }
    for text in (summarize(result), summarize_sweep(json.loads(sample.SWEEP.read_text()))):
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_progress_elsewhere_than_on_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 0.0, 5.0, 10.0, 12.0])
    with BenchProgress(is_quiet=False, clock=lambda: next(times)) as show:
        for num_ended in range(1, 5):
            show(
                Progress(
                    phase="repeat 1 of 1", num_ended=num_ended, num_all=4, num_bad=1, num_tokens=60
                )
            )
    assert capsys.readouterr().err.splitlines() == [
        "repeat 1 of 1: 3/4 requests · 1 not ok · 6 tokens/s",
        "repeat 1 of 1: 4/4 requests · 1 not ok · 5 tokens/s",
    ]


def test_progress_counts_a_phases_time_from_the_end_of_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 10.0, 12.0])
    with BenchProgress(is_quiet=False, clock=lambda: next(times)) as show:
        for phase in ("warm-up", "repeat 1 of 1"):
            show(Progress(phase=phase, num_ended=1, num_all=1, num_bad=0, num_tokens=60))
    assert capsys.readouterr().err.splitlines() == [
        "warm-up: 1/1 requests · 6 tokens/s",
        "repeat 1 of 1: 1/1 requests · 30 tokens/s",
    ]
