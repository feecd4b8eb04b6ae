"""`jaxserve workload` and `serve` with a recording, as a user sees them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxserve.engine.start
import jaxserve.server.lifecycle
from jaxserve.cli.main import main
from jaxserve.config import Config
from jaxserve.engine import Engine
from jaxserve.measure.workload import Recipe, load_workload
from jaxserve.metrics import Metrics
from tests.engines import ask, build_engine, gather

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.5,4800,10
2023-11-16 18:17:04.5,3200,8
2023-11-16 18:17:14.5,110,0
2023-11-16 18:17:24.5,160,32
"""


def run(*words: object) -> int:
    return main(["workload", *map(str, words)])


def error_of(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> str:
    assert run(*words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("jaxserve: error: ").rstrip()


def test_one_is_made_imported_scaled_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, big, small = tmp_path / "t.csv", tmp_path / "big.jsonl", tmp_path / "small.jsonl"
    trace.write_text(AZURE)
    assert run("import", trace, "--format", "azure", "-o", big) == 0
    whole = load_workload(big)
    line = f"{big}: 3 requests, hash {whole.content_hash[:12]}; 1 dropped: no output\n"
    assert capsys.readouterr().err == line
    steps = ("--window", 20, "--lengths", 16, "--time", 10, "--max-tokens", 250)
    assert run("scale", big, "-o", small, *steps, "--quiet") == 0
    scaled = load_workload(small)
    assert [(e.at_s, e.prompt_tokens, e.wanted_tokens) for e in scaled.entries] == [(10.0, 200, 1)]
    assert {step["of"] for step in scaled.header.lineage} == {whole.content_hash}
    assert capsys.readouterr().err == ""
    assert run("show", small) == 0
    shown = capsys.readouterr().out
    assert scaled.content_hash in shown
    assert "dropped       1 over max tokens" in shown
    assert "then          divide_lengths 16" in shown


def test_what_is_made_is_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    chat = "chat:weight=3,prompt=uniform:5:9,output=7,ttft=0.50,itl_p95=0.1"
    words = ["--requests", 40, "--rate", 2, "--seed", 3, "--class", chat, "--class", "rest"]
    groups = ["--prefix-groups", 2, "--prefix-tokens", 30, "--output-tokens", 4, "--deadline", 2]
    assert run("make", "-o", path, *words, *groups, "--fixed-prompts", "--quiet") == 0
    made = load_workload(path)
    assert made.header.limits == {"chat": ("ttft=0.5", "itl_p95=0.1")}
    assert made.header.prompts == "fixed"
    chats = [e for e in made.entries if e.prompt_class == "chat"]
    rest = [e for e in made.entries if e.prompt_class == "rest"]
    assert len(chats) + len(rest) == 40
    assert len(chats) > len(rest) > 0
    assert {e.prompt_tokens for e in chats} <= set(range(35, 40))
    assert {(e.prompt_tokens, e.wanted_tokens, e.deadline_s) for e in rest} == {(158, 4, 2.0)}
    assert {e.wanted_tokens for e in chats} == {7}
    assert all(isinstance(e.prompt, Recipe) and len(e.prompt.blocks) == 1 for e in made.entries)
    assert run("make", "-o", tmp_path / "again.jsonl", *words, *groups, "--fixed-prompts") == 0
    again = load_workload(tmp_path / "again.jsonl")
    assert again.content_hash == made.content_hash


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_show_is_of_eighty_columns(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.jsonl"
    classes = [word for i in range(14) for word in ("--class", f"{'long' * 9}{i}:deadline={i + 1}")]
    name = "a name that is longer than any line of eighty columns can be, however it is turned"
    run("make", "-o", path, "--requests", 60, "--rate", 1, "--name", name, *classes, "--quiet")
    assert run("show", path, *words) == 0
    shown = capsys.readouterr().out
    if words:
        found = json.loads(shown)
        assert found["content_hash"] == load_workload(path).content_hash
        assert found["name"] == name
        assert found["summary"]["num_requests"] == 60
        assert len(found["summary"]["classes"]) > 12
    else:
        assert max(map(len, shown.splitlines())) <= 80
        assert "classes more; --json has all" in shown
        assert shown.count("\nlonglong") == 12


def test_a_closed_loop_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl"
    assert run("make", "-o", path, "--requests", 3, "--concurrency", 2, "--quiet") == 0
    assert load_workload(path).is_closed_loop
    assert run("show", path) == 0
    assert "closed loop: 2 requests at any time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give --rate (an open loop) or --concurrency (a closed one)"),
        ("--rate 0 --requests 1", "--rate is 0, but must be from 1e-06 to 1e+06"),
        ("--rate nan --requests 1", "--rate is nan, but must be"),
        ("--rate 1", "give --requests: how many, or --duration"),
        ("--concurrency 1", "give --requests: how many"),
        ("--concurrency 1 --requests 1 --rate 1", "--rate is of an open loop, --concurrency of a"),
        ("--concurrency 0 --requests 1", "--concurrency is 0, but must be from 1"),
        ("--concurrency 1 --requests 1 --duration 2", "--duration is of an open loop"),
        ("--arrivals gamma --rate 1 --requests 1", "--arrivals gamma needs a --burstiness"),
        ("--arrivals poisson --burstiness 2 --rate 1", "--burstiness goes with --arrivals gamma"),
        ("--burstiness 2 --requests 1", "--arrivals and --burstiness need a --rate"),
        ("--rate 1 --requests 0", "--requests is 0, but must be from 1"),
        ("--rate 1 --requests 1 --prompt-tokens x", "--prompt-tokens 'x' is no distribution"),
        ("--rate 1 --requests 1 --prefix-groups 2", "--prefix-groups and --prefix-tokens go"),
        ("--rate 1 --requests 1 --zipf 2", "--zipf is of groups; give --prefix-groups too"),
        ("--rate 1 --requests 1 --deadline x", "--deadline is 'x', but must be a number from"),
        ("--rate 1 --requests 1 --priority 1.5", "--priority is '1.5', but must be a whole"),
        ("--rate 1 --requests 1 --class a=b", "--class 'a=b' is not NAME:KEY=VALUE"),
        ("--rate 1 --requests 1 --class a:b", "--class a: 'b' is not KEY=VALUE"),
        (
            "--rate 1 --requests 1 --class a:wieght=3",
            "--class a: wieght is not known; did you mean",
        ),
        ("--rate 1 --requests 1 --class a:weight=0", "--class a: weight is '0', but must be"),
        ("--rate 1 --requests 1 --class a:prompt=0", "--class a: prompt '0' is no distribution"),
        ("--rate 1 --requests 1 --class a:zipf=1,zipf=2", "--class a: zipf is there twice"),
        ("--rate 1 --requests 1 --class a: --class a:", "--class a is there twice; leave one out"),
        ("--rate 1 --requests 1 --class a:ttft=0", "limit 'ttft=0' is not one; write ttft=S"),
    ],
)
def test_wrong_options_of_make_are_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.jsonl"
    assert message in error_of(capsys, "make", "-o", path, *words.split(), code=2)
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to do; give --window, --class, --limit"),
        ("--window 0", "--window is 0, but must be from 1e-06"),
        ("--limit 0", "--limit is 0, but must be from 1"),
        ("--lengths 0", "--lengths is 0, but must be from 1"),
        ("--max-tokens 1", "--max-tokens is 1, but must be from 2"),
        ("--time 0", "--time is 0, but must be from 1e-06"),
        ("--time 2", "a closed loop has no times; leave --window and --time out"),
        ("--window 2", "a closed loop has no times; leave --window and --time out"),
    ],
)
def test_wrong_options_of_scale_are_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.jsonl"
    run("make", "-o", path, "--requests", 3, "--concurrency", 2, "--quiet")
    new = tmp_path / "new.jsonl"
    assert message in error_of(capsys, "scale", path, "-o", new, *words.split(), code=2)
    assert not new.exists()


def test_files_that_will_not_do_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, new = tmp_path / "w.jsonl", tmp_path / "new.jsonl"
    assert "cannot be read: No such file" in error_of(capsys, "show", path, code=1)
    path.write_text('{"prompt": "a"}\n')
    assert "line 1: it has no jaxserve_workload" in error_of(capsys, "show", path, code=1)
    for words, message, code in (
        (("import", path, "--format", "jaxserve"), "line 1: it has no jaxserve_workload", 1),
        (("import", path, "--format", "azure"), "line 1: it has no column TIMESTAMP", 1),
        (("import", path, "--format", "vllm"), "vllm has no arrivals; give --rate", 2),
        (("import", path, "--format", "jaxserve", "--rate", 2), "--rate is of other formats", 2),
        (("import", path, "--format", "vllm", "--rate", 2), "has no output length", 2),
    ):
        assert message in error_of(capsys, *words, "-o", new, code=code)
    prompts = ("import", path, "--format", "vllm", "--rate", 2, "--output-tokens", 3)
    assert "is there already; --overwrite" in error_of(capsys, *prompts, "-o", path, code=1)
    assert run(*prompts, "-o", path, "--overwrite", "--quiet") == 0
    assert load_workload(path).entries[0].prompt == "a"


def test_a_workload_that_was_changed_by_hand_can_be_taken_in(tmp_path: Path) -> None:
    path, new = tmp_path / "w.jsonl", tmp_path / "new.jsonl"
    run("make", "-o", path, "--requests", 3, "--rate", 2, "--quiet")
    path.write_text(path.read_text().replace('"wanted_tokens":64', '"wanted_tokens":65'))
    assert run("show", path) == 1
    words = ("--format", "jaxserve", "--name", "mine", "--licence", "MIT", "--quiet")
    assert run("import", path, "-o", new, *words) == 0
    taken = load_workload(new)
    assert (taken.name, taken.header.licence) == ("mine", "MIT")
    assert {one.wanted_tokens for one in taken.entries} == {65}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Has `serve` load a small engine and be asked one thing, instead of listening."""
    engines: list[Engine] = []

    def load_engine(name: str, config: Config, *, metrics: Metrics) -> Engine:
        engines.append(build_engine(metrics=metrics)[0])
        return engines[0]

    def serve(
        load: Callable[[], Engine], config: Config, metrics: Metrics, **options: object
    ) -> int:
        engine = load()
        engine.start()
        gather(engine.submit(ask((1, 2, 3), max_tokens=4)))
        engine.stop()
        return 0

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    monkeypatch.setattr(jaxserve.server.lifecycle, "serve", serve)
    return engines


def serve_with(*sets: str) -> int:
    return main(["serve", *(word for text in sets for word in ("--set", text))])


def test_serve_records_only_where_the_configuration_says_so(
    served: list[Engine], tmp_path: Path
) -> None:
    assert serve_with() == 0
    assert served[0]._loop.taps == []
    served.clear()
    path = tmp_path / "r.jsonl"
    assert serve_with(f"measure.record_path={path}") == 0
    recorded = load_workload(path)
    assert [(e.prompt_tokens, e.wanted_tokens) for e in recorded.entries] == [(3, 4)]
    assert recorded.header.source == "recorded by jaxserve serve: bytes"
    served.clear()
    content = tmp_path / "content.jsonl"
    assert serve_with(f"measure.record_path={content}", "measure.record_content=true") == 0
    assert load_workload(content).entries[0].prompt == (1, 2, 3)


def test_a_recording_that_cannot_be_is_refused_before_the_model_is_loaded(
    served: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.jsonl").write_text("precious")
    assert serve_with(f"measure.record_path={tmp_path / 'r.jsonl'}") == 2
    assert "is there already; move it" in capsys.readouterr().err
    assert serve_with("measure.record_content=true") == 2
    assert "measure.record_content needs measure.record_path" in capsys.readouterr().err
    assert served == []
