"""`jaxserve trace`, and the trace of `jaxserve serve`, on a fake engine."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.engine.start
import jaxserve.server.lifecycle
from jaxserve.cli.main import main
from jaxserve.config import Config
from jaxserve.engine import Engine, gather
from jaxserve.measure.workload import Header, WorkloadEntry, write_workload
from jaxserve.metrics import Metrics
from tests.engines import ask, build_engine
from tests.fakes import EOS_ID, say
from tests.measure.trace_format import check_format


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Has the commands load a fake engine; returns the configurations it was loaded with."""
    configs: list[Config] = []

    def load_engine(name: str, config: Config, **options: Any) -> Engine:  # noqa: ANN401
        configs.append(config)
        engine, _ = build_engine(
            script=say({None: [*b"abcd", EOS_ID]}),
            measure=config.measure,
            clock=time.monotonic,
            chat_template="{% for m in messages %}{{ m.content }}!{% endfor %}",
            metrics=options.get("metrics"),
        )
        return engine

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    return configs


def test_prompts_are_run_and_shown(
    loaded: list[Config], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--chat", "--prompt", "Hi", "--prompt", "Ho", "--quiet"]) == 0
    assert loaded[0].measure.trace_steps == 10_000
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    assert trace["otherData"]["requests"] == 2
    assert "the time went" in (folder / "trace.html").read_text()
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("2 requests, ")
    assert lines[1].startswith("engine thread: ")
    assert lines[2].startswith("device: busy ")
    assert lines[3] == "trace.json trace.html"


def test_so_many_steps_are_kept_as_the_configuration_says(
    loaded: list[Config], folder: Path
) -> None:
    words = ["trace", "--prompt", "Hi", "--set", "measure.trace_steps=2", "--out", "mine.json"]
    assert main(words) == 0
    assert loaded[0].measure.trace_steps == 2
    assert json.loads((folder / "mine.json").read_text())["otherData"]["steps"] <= 2
    assert (folder / "mine.html").exists()


def test_a_workload_is_replayed(loaded: list[Config], folder: Path) -> None:
    """With the lengths that it wants: six tokens, though the model would end before."""
    path = folder / "w.jsonl"
    entries = (
        WorkloadEntry(index=index, at_s=0.0, prompt=(1, 2, 3 + index), wanted_tokens=6)
        for index in range(3)
    )
    write_workload(path, Header(name="w", prompts="fixed"), entries)
    assert main(["trace", "--workload", str(path)]) == 0
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    ends = [event["args"] for event in trace["traceEvents"] if "output_tokens" in event["args"]]
    assert [(end["end"], end["output_tokens"]) for end in ends] == [("max_tokens", 6)] * 3


def test_what_a_server_traced_is_shown(
    loaded: list[Config],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where its engine failed."""

    def serve(
        load_engine: Callable[[], Engine], config: Config, metrics: Metrics, **options: object
    ) -> int:
        engine = load_engine()
        engine.start()
        gather(engine.submit(ask((1, 2), id="its-request")))
        engine.stop()
        return 1

    monkeypatch.setattr(jaxserve.server.lifecycle, "serve", serve)
    assert main(["serve", "--trace-file", "served.json"]) == 70
    check_format(json.loads((folder / "served.json").read_text()))
    capsys.readouterr()
    assert main(["trace", "--trace-file", "served.json"]) == 0
    assert capsys.readouterr().out == "served.html\n"
    assert "its-request" in (folder / "served.html").read_text()


def test_a_server_without_a_trace_keeps_nothing(
    loaded: list[Config], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(
        load_engine: Callable[[], Engine], config: Config, metrics: Metrics, **options: object
    ) -> int:
        assert load_engine().trace is None
        return 0

    monkeypatch.setattr(jaxserve.server.lifecycle, "serve", serve)
    assert main(["serve"]) == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ("trace --prompt a --out no/trace.json", 2, "is in none that exists"),
        ("trace --prompt a --out .", 2, "is a folder"),
        ("trace --prompt a --out trace.html", 2, "give the trace's, such as trace.json"),
        ("trace --prompt a --set measure.phases=false", 2, "measure.phases is false"),
        ("serve --trace-file no/trace.json", 2, "is in none that exists"),
        ("serve --trace-file t.json --set measure.phases=false", 2, "measure.phases is false"),
        ("trace --trace-file none.json", 1, "none.json: No such file"),
        ("trace m.gguf --trace-file none.json", 2, "leave MODEL and --out out"),
        ("trace --workload none.jsonl", 1, "none.jsonl"),
        ("trace --workload none.jsonl --max-tokens 3", 2, "--max-tokens is for --prompt"),
        ("trace --prompt a --max-tokens 90", 1, "max_tokens is 90"),
    ],
)
def test_a_wrong_use_is_one_line(
    words: str, code: int, why: str, loaded: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--log-level", "error"]) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("jaxserve: error: ")
    assert why in last
