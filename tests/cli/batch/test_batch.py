"""`jaxserve batch` on a fake engine: lines in, lines out, and going on after an interruption."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.engine.start
from jaxserve.cli.batch import job as batch_job
from jaxserve.cli.batch.lines import RawLines
from jaxserve.cli.batch.output import OutputFile
from jaxserve.cli.batch.progress import BatchProgress, Counts, format_time
from jaxserve.cli.main import main
from jaxserve.config import Config
from jaxserve.engine import Engine
from tests.cli.batch.files import BAD, good, outcome, read, write
from tests.engines import build_engine
from tests.fakes import expected_output


class Batches:
    """Runs `jaxserve batch` in a folder.

    Attributes:
      num_loads: engines that were loaded.
      num_prompts: requests that reached an engine, over all runs.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.partial, self.job = folder / "out.jsonl.partial", folder / "out.jsonl.job"
        self.engines: list[Engine] = []
        self.model: dict[str, Any] = {}
        monkeypatch.setattr(jaxserve.engine.start, "load_engine", self._load)

    def _load(self, name: str, config: Config, *, progress: object = None) -> Engine:
        engine, _ = build_engine(num_pages=60, bounds=config.limits)
        engine.model = dataclasses.replace(engine.model, **self.model)
        engine.config = engine.config.model_copy(update={"kv": config.kv})
        self.engines.append(engine)
        return engine

    def run(self, *words: str) -> int:
        return main(["batch", "-i", str(self.source), "-o", str(self.out), "--quiet", *words])

    @property
    def num_asked(self) -> float:
        return sum(engine.metrics.value("requests_submitted_total") for engine in self.engines)

    def left(self) -> set[str]:
        return {path.name for path in self.out.parent.iterdir()} - {"in.jsonl"}


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(tmp_path, monkeypatch)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a run end after some lines: as ctrl-C does, or with half of the next line written."""

    def set_up(num_lines: int, *, error: BaseException | None = None, torn: bool = False) -> None:
        append, close = OutputFile.append, OutputFile.close
        seen: list[bytes] = []

        def stop(self: OutputFile, line: bytes) -> None:
            if len(seen) == num_lines:
                monkeypatch.setattr(OutputFile, "append", append)
                monkeypatch.setattr(OutputFile, "close", close)
                if torn:
                    os.write(self._fd, line[: len(line) // 2])
                raise error or KeyboardInterrupt
            seen.append(line)
            append(self, line)

        monkeypatch.setattr(OutputFile, "append", stop)
        if torn:  # as a process that is killed leaves it
            monkeypatch.setattr(OutputFile, "close", lambda self: os.close(self._fd))

    return set_up


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_line_of_each_form_is_answered_in_order(batches: Batches) -> None:
    chat = {"custom_id": "d", "method": "POST", "url": "/v1/chat/completions"}
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        good("b", [1, 2], temperature=0, ignore_eos=True),
        {"prompt": [3, 4], "max_tokens": 3, "temperature": 0, "return_token_ids": True},
        {"id": 7, "prompt": [[5], [6]], "max_tokens": 2, "return_token_ids": True},
        chat | {"body": {"messages": messages, "max_tokens": 2}},
        {"custom_id": "a", "prompt": "x", "model": "smollm2-135m-instruct"},
    ]
    write(batches.source, lines)
    del lines[3]["body"]["max_tokens"]
    assert batches.run() == 3, "the engine of the test has no chat template"
    answers = read(batches.out)
    assert [answer["custom_id"] for answer in answers] == ["b", "line-2", "7", "d", "a"]
    first = answers[0]
    assert list(first) == ["id", "custom_id", "response", "error"]
    assert first["id"].startswith("batch_req_")
    assert list(first["response"]) == ["status_code", "request_id", "body"]
    assert (first["response"]["status_code"], first["error"]) == (200, None)
    assert len({answer["response"]["request_id"] for answer in answers}) == 5
    body = first["response"]["body"]
    expected = expected_output([1, 2], batches_params(ignore_eos=True), 4)
    assert body["choices"][0]["token_ids"] == expected
    assert body["model"] == "bytes"
    assert len(answers[2]["response"]["body"]["choices"]) == 2
    assert answers[3]["response"]["body"]["error"]["code"] == "no_chat_template"
    assert answers[3]["response"]["status_code"] == 400
    assert answers[3]["error"]["line"] == 4
    assert batches.left() == {"out.jsonl"}


def batches_params(**changes: Any) -> Any:  # noqa: ANN401
    from jaxserve.request import SamplingParams

    return SamplingParams(temperature=0.0, **changes)


def test_one_error_for_each_bad_line_and_the_others_go_on(batches: Batches) -> None:
    lines = [part for n, (bad, _) in enumerate(BAD) for part in (good(f"g{n}"), bad)]
    write(batches.source, [*lines, good("g0"), good("last")])
    assert batches.run() == 3
    answers = read(batches.out)
    assert len(answers) == len(lines) + 2
    for n, (_, said) in enumerate(BAD):
        fine, answer = answers[2 * n], answers[2 * n + 1]
        assert (fine["custom_id"], fine["error"]) == (f"g{n}", None)
        error = answer["error"]
        assert said in error["message"]
        assert list(error) == ["message", "type", "param", "code", "line"]
        assert error["line"] == 2 * n + 2
        assert error["type"] == "invalid_request_error"
        if answer["response"] is not None:
            assert answer["response"]["body"]["error"] == {
                key: value for key, value in error.items() if key != "line"
            }
            assert answer["response"]["status_code"] in (400, 404)
    repeated, last = answers[-2:]
    assert "custom_id 'g0' stands on line 1 already" in repeated["error"]["message"]
    assert repeated["custom_id"] is None, "each id comes once"
    assert last["error"] is None


def test_an_input_of_windows_with_a_mark_and_blank_lines(batches: Batches) -> None:
    line = json.dumps(good("a"))
    batches.source.write_bytes(f"\ufeff{line}\r\n\r\n  \r\n{{}}\r\n".encode())
    assert batches.run() == 3
    fine, bad = read(batches.out)
    assert (fine["custom_id"], fine["error"]) == ("a", None)
    assert bad["error"]["line"] == 4, "blank lines count as lines, and have no answer"


def test_the_last_line_needs_no_newline_and_an_empty_input_is_complete(batches: Batches) -> None:
    batches.source.write_text(json.dumps(good("a")))
    assert batches.run() == 0
    assert len(read(batches.out)) == 1
    for empty in (b"", b"\n \n", b"\xef\xbb\xbf\n"):
        batches.source.write_bytes(empty)
        assert batches.run("--overwrite") == 0
        assert batches.out.read_bytes() == b""
    assert len(batches.engines) == 1, "nothing to answer, nothing to load"


def test_long_lines_are_read_and_longer_ones_are_passed_over(batches: Batches) -> None:
    million = "x" * 1_000_000
    lines = [good("a", user=million), good("b", user="y" * 3_000_000), good("c")]
    write(batches.source, lines)
    assert batches.run("--set", "limits.max_message_bytes=2000000") == 3
    first, second, third = read(batches.out)
    assert (first["error"], third["error"]) == (None, None)
    assert "longer than 2000000 bytes (limits.max_message_bytes)" in second["error"]["message"]
    assert second["error"]["line"] == 2


def test_memory_holds_one_line_of_an_input() -> None:
    sizes: list[int] = []

    class Counting(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            content = super().readline(size)
            sizes.append(len(content))
            return content

    content = b"a" * 10_000_000 + b"\nb\n" + b"c" * 100 + b"\n" + b"d" * 101
    raws = list(RawLines(Counting(content), max_bytes=100))
    assert [(raw.number, raw.content and raw.content[:1]) for raw in raws] == [
        (1, None), (2, b"b"), (3, b"c"), (4, None),
    ]  # fmt: skip
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("num_done", [0, 1, 17])
def test_an_interrupted_run_goes_on_where_it_stopped(
    num_done: int, torn: bool, batches: Batches, stop_after: Callable[..., None]
) -> None:
    lines: list[dict[str, Any] | bytes] = []
    lines += [good(f"g{n}", [n], max_tokens=1 + n % 5) for n in range(30)]
    lines[5:5] = [bad for bad, _ in BAD]
    write(batches.source, lines)
    assert batches.run() == 3
    whole = [outcome(answer) for answer in read(batches.out)]
    batches.out.unlink()
    batches.engines.clear()
    stop_after(num_done, torn=torn)
    assert batches.run() == 130
    assert batches.left() == ({"out.jsonl.partial", "out.jsonl.job"} if num_done or torn else set())
    kept = batches.partial.read_bytes() if num_done or torn else b""
    assert kept.count(b"\n") == num_done
    assert torn == (bool(kept) and not kept.endswith(b"\n"))
    batches.engines.clear()
    assert batches.run() == 3
    assert [outcome(answer) for answer in read(batches.out)] == whole
    assert batches.out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1]), "not done again"
    num_left = sum(n >= num_done for n, line in enumerate(lines) if isinstance(line, dict))
    assert batches.num_asked == num_left
    assert batches.left() == {"out.jsonl"}


def test_only_what_was_not_computed_is_computed(
    batches: Batches, stop_after: Callable[..., None]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(20)])
    stop_after(12)
    assert batches.run() == 130
    batches.engines.clear()
    assert batches.run() == 0
    assert batches.num_asked == 8


def test_tokens_follow_from_the_runs_seed_and_the_id_alone(batches: Batches) -> None:
    lines = [good(f"g{n}", [9], temperature=1.0, ignore_eos=True) for n in range(6)]
    lines += [good("own", [9], temperature=1.0, seed=5, ignore_eos=True)]

    def answers(*words: str, order: int = 1) -> dict[str, object]:
        write(batches.source, lines[::order])
        batches.out.unlink(missing_ok=True)
        assert batches.run(*words) == 0
        return {answer["custom_id"]: outcome(answer) for answer in read(batches.out)}

    first = answers()
    assert answers(order=-1) == first, "neither on the order nor on the neighbours"
    other = answers("--seed", "1")
    assert [name for name in first if first[name] == other[name]] == ["own"]
    assert len({str(first[f"g{n}"]).partition("choices")[0] for n in range(6)}) == 6


def test_a_changed_input_is_not_resumed(
    batches: Batches, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [good(f"g{n}") for n in range(9)]
    write(batches.source, lines)
    stop_after(4)
    batches.run()
    for change in ([*lines, good("more")], lines[:-1], [good("g0", "ho"), *lines[1:]]):
        write(batches.source, change)
        assert batches.run() == 1
        assert "cannot be resumed: the input has changed" in error_of(capsys)
    write(batches.source, lines)
    assert batches.run("--seed", "3") == 1
    assert "--seed was 0 and is 3" in error_of(capsys)
    assert batches.partial.read_bytes().count(b"\n") == 4, "nothing is lost"
    batches.model = {"dtype": "bfloat16"}
    assert batches.run() == 1
    assert "the model's dtype was '' and is 'bfloat16'" in error_of(capsys)
    batches.model = {}
    assert batches.run() == 0


def test_overwrite_gives_up_what_belongs_to_another_input_and_resumes_its_own(
    batches: Batches, stop_after: Callable[..., None]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    stop_after(4)
    batches.run()
    write(batches.source, [good(f"h{n}") for n in range(9)])
    stop_after(5)
    assert batches.run("--overwrite") == 130
    batches.engines.clear()
    assert batches.run("--overwrite") == 0
    assert batches.num_asked == 4
    assert [answer["custom_id"] for answer in read(batches.out)] == [f"h{n}" for n in range(9)]


def test_an_input_that_changes_while_it_is_read_is_no_result(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    read_lines = batch_job.read_lines

    def change(*arguments: Any) -> Iterator[object]:  # noqa: ANN401
        write(batches.source, [good(f"h{n}") for n in range(9)])
        return read_lines(*arguments)

    monkeypatch.setattr("jaxserve.cli.batch.command.read_lines", change)
    assert batches.run() == 1
    assert "has changed while it was read" in error_of(capsys)
    assert not batches.out.exists()


def test_a_complete_output_is_only_replaced_on_request(
    batches: Batches, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    batches.out.write_text("mine\n")
    assert batches.run() == 1
    assert "is there already; --overwrite replaces it" in error_of(capsys)
    assert (batches.out.read_text(), batches.left()) == ("mine\n", {"out.jsonl"})
    assert batches.engines == []
    stop_after(4)
    assert batches.run("--overwrite") == 130
    assert batches.out.read_text() == "mine\n", "it is replaced at the end, and at once"
    assert batches.run() == 0, "to go on needs no word of its own"
    assert len(read(batches.out)) == 9
    assert batches.run() == 1


@pytest.mark.parametrize("was_there", [False, True])
def test_killed_between_its_last_two_steps_it_is_complete(
    was_there: bool, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(batches.source, [good("a"), b"bad"])
    if was_there:
        batches.out.write_text("older\n")

    class KilledError(BaseException):
        pass

    def die(*_: object) -> None:
        raise KilledError

    words = ["--overwrite"] if was_there else []
    with monkeypatch.context() as patched:  # before the rename
        patched.setattr(os, "rename", _rename_but(".partial", die))
        patched.setattr(OutputFile, "close", lambda self: os.close(self._fd))
        with pytest.raises(KilledError):
            batches.run(*words)
    assert batches.left() >= {"out.jsonl.partial", "out.jsonl.job"}
    with monkeypatch.context() as patched:  # after it
        patched.setattr(OutputFile, "_tidy", die)
        patched.setattr(OutputFile, "close", lambda self: os.close(self._fd))
        with pytest.raises(KilledError):
            batches.run()
    assert batches.left() == {"out.jsonl", "out.jsonl.job"}
    assert len(batches.engines) == 1, "all lines were done: nothing was loaded"
    assert batches.run() == 3
    assert len(batches.engines) == 1
    assert batches.left() == {"out.jsonl"}
    assert [answer["custom_id"] for answer in read(batches.out)] == ["a", None]


def _rename_but(suffix: str, fail: Callable[..., None]) -> Callable[..., None]:
    rename = os.rename

    def wrapped(source: Path, target: Path) -> None:
        if str(source).endswith(suffix):
            fail()
        rename(source, target)

    return wrapped


def test_a_partial_file_that_is_not_its_own_is_left_alone(
    batches: Batches, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    batches.partial.write_text("notes\n")
    assert batches.run() == 1
    assert "cannot be resumed: it has no .job file beside it" in error_of(capsys)
    assert batches.left() == {"out.jsonl.partial"}
    batches.partial.unlink()
    stop_after(4)
    batches.run()
    done = batches.partial.read_bytes().splitlines(keepends=True)
    batches.partial.write_bytes(b"".join([done[1], done[0], *done[2:]]))
    assert batches.run() == 1
    assert "line 1 of the .partial file is not the answer to line 1" in error_of(capsys)
    batches.partial.write_bytes(b"".join(done) + b"\0" * 4096)  # as a power failure leaves it
    assert batches.run() == 0
    assert len(read(batches.out)) == 9


def test_two_processes_never_write_one_output(
    batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good("a")])
    with batches.partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert batches.run() == 1
        assert "another process writes" in error_of(capsys)
        assert batches.engines == []
    assert batches.run() == 0


@pytest.mark.parametrize(
    ("source", "out", "said"),
    [
        ("none.jsonl", "out.jsonl", "the input {}/none.jsonl cannot be read: No such file"),
        (".", "out.jsonl", "the input {} cannot be read: Is a directory"),
        ("in.jsonl", "no/out.jsonl", "cannot write {}/no/out.jsonl.partial: No such file"),
        ("in.jsonl", ".", "the output {} is a folder"),
        ("in.jsonl", "fifo", "the output {}/fifo is a pipe or a device"),
        ("in.jsonl", "in.jsonl", "the input is {}/in.jsonl itself"),
        ("out.jsonl.partial", "out.jsonl", "the input is {}/out.jsonl.partial itself"),
    ],
)
def test_files_that_will_not_do_are_named_before_anything_is_loaded(
    source: str, out: str, said: str, batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good("a")])
    folder = batches.source.parent
    if source.endswith(".partial"):
        write(batches.partial, [good("a")])
    os.mkfifo(folder / "fifo")
    assert main(["batch", "-i", str(folder / source), "-o", str(folder / out), "--quiet"]) == 1
    assert said.format(folder) in error_of(capsys)
    assert batches.engines == []


@pytest.mark.parametrize(
    ("out", "said"), [("", "the output has no name"), (".", "the output . is a folder")]
)
def test_an_output_that_has_no_name_is_one_line(
    out: str, said: str, batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good("a")])
    assert main(["batch", "-i", str(batches.source), "-o", out, "--quiet"]) == 1
    assert said in error_of(capsys)


def test_a_link_is_followed_and_stays(batches: Batches) -> None:
    write(batches.source, [good("a")])
    target = batches.out.with_name("elsewhere.jsonl")
    batches.out.symlink_to(target)
    assert batches.run() == 0
    assert batches.out.is_symlink()
    assert len(read(target)) == 1


def test_another_kind_of_cached_numbers_is_another_run(
    batches: Batches, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    stop_after(4)
    batches.run()
    assert batches.run("--set", "kv.dtype=float32") == 1
    assert "the model's kv_dtype was '' and is 'float32'" in error_of(capsys)


def test_a_full_disk_keeps_what_is_done(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    write_all, seen = os.write, []

    def fill(fd: int, content: memoryview) -> int:
        seen.append(fd)
        if len(seen) == 6:
            return write_all(fd, content[:10])
        if len(seen) == 7:
            raise OSError(28, "No space left on device")
        return write_all(fd, content)

    with monkeypatch.context() as patched:
        patched.setattr("jaxserve.cli.batch.output.os.write", fill)
        assert main(["batch", "-i", str(batches.source), "-o", str(batches.out)]) == 1
    last, error = capsys.readouterr().err.strip().splitlines()[-2:]
    assert last.startswith("failed after 5 of 9 lines; run it again to go on from ")
    assert error.endswith("out.jsonl.partial: No space left on device")
    assert len(read(batches.partial)) == 5, "the torn line is cut off"
    assert batches.run() == 0
    assert len(read(batches.out)) == 9


def test_an_engine_that_fails_keeps_what_is_done(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(60)])
    launches: list[object] = []

    def fail(plan: object) -> None:
        launches.append(plan)
        if len(launches) == 30:
            raise ZeroDivisionError("planted")

    def load(*_: object, **__: object) -> Engine:
        return build_engine(num_pages=60, on_launch=fail)[0]

    with monkeypatch.context() as patched:
        patched.setattr(jaxserve.engine.start, "load_engine", load)
        assert batches.run() == 70
    assert re.search("the engine (has )?failed", error_of(capsys))
    assert batches.run() == 0
    assert [answer["custom_id"] for answer in read(batches.out)] == [f"g{n}" for n in range(60)]


@contextlib.contextmanager
def piped(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has stdin be no regular file."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    with os.fdopen(reader, "r") as stdin, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        yield


def test_stdin_and_stdout_work_and_cannot_be_resumed(
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = b"".join(json.dumps(good(f"g{n}")).encode() + b"\n" for n in range(9))
    with piped(content, monkeypatch):
        assert main(["batch", "-i", "-", "-o", "-", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"g{n}" for n in range(9)]
    words = ["batch", "-i", "-", "-o", str(batches.out), "--quiet"]
    stop_after(4)
    for extra, code in (((), 130), ((), 1), (("--overwrite",), 0)):
        with piped(content, monkeypatch):
            assert main([*words, *extra]) == code
    assert "a stream cannot be read twice" in capsys.readouterr().err
    assert len(read(batches.out)) == 9


def test_a_file_as_stdin_is_resumed(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, stop_after: Callable[..., None]
) -> None:
    write(batches.source, [good(f"g{n}") for n in range(9)])
    stop_after(4)
    for code in (130, 0):
        with batches.source.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["batch", "-i", "-", "-o", str(batches.out), "--quiet"]) == code
    assert batches.num_asked < 18
    assert len(read(batches.out)) == 9


def test_the_last_word_says_what_came_of_it_and_how_to_go_on(
    batches: Batches, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good("a"), b"bad", good("b")])
    words = ["batch", "-i", str(batches.source), "-o", str(batches.out)]
    stop_after(2)
    assert main(words) == 130
    assert error_of(capsys) == (
        "stopped after 2 of 3 lines, 1 of them failed; "
        f"run it again to go on from {batches.partial}"
    )
    assert main(words) == 3
    assert error_of(capsys).startswith("done: 3 of 3 lines, 1 of them failed · 4 tokens in 0:0")


def test_progress_is_a_line_now_and_then_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, counts = [100.0], Counts(num_earlier=10, num_lines=10)
    with BatchProgress(counts, num_all=100, is_quiet=False, clock=lambda: now[0]) as progress:
        for n in range(1, 31):
            now[0] += 1.0
            counts.num_lines, counts.num_tokens = 10 + n, 20 * n
            counts.num_failed = n // 15
            progress.show()
    assert capsys.readouterr().err.splitlines() == [
        "20/100 lines · 20 tokens/s · 1:20 left",
        "30/100 lines · 1 failed · 20 tokens/s · 1:10 left",
        "40/100 lines · 2 failed · 20 tokens/s · 1:00 left",
    ]
    assert [format_time(s) for s in (0, 59.6, 3599, 3600, 36_000)] == [
        "0:00", "1:00", "59:59", "1:00:00", "10:00:00",
    ]  # fmt: skip


def test_prompts_are_in_no_log(
    batches: Batches, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batches.source, [good("a", "secret"), good("b", "secret" * 100), b'{"prompt": "secret'])
    with caplog.at_level("DEBUG", logger="jaxserve"):
        batches.run("--log-level", "debug")
    assert "secret" not in caplog.text
    assert "secret" not in capsys.readouterr().err
    assert tempfile.gettempdir() in str(batches.out) or batches.out.exists()
