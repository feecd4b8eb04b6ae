"""Recordings of a live engine: replayable, without content, bounded, and never in its way."""

import errno
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from jaxserve.errors import ConfigError
from jaxserve.measure.workload import Workload, WorkloadEntry, load_workload, materialize
from jaxserve.measure.workload import record as record_module
from jaxserve.measure.workload.importing import import_workload
from jaxserve.measure.workload.record import Recorder, RecordLimits
from jaxserve.request import FinishReason, GenerationRequest, Request, SamplingParams
from tests.engines import PAGE_SIZE, Clock, ask, build_engine, gather, serve

GENEROUS: Final = RecordLimits(max_entries=100, max_bytes=1 << 20)


def build_recorder(path: Path, **changes: Any) -> Recorder:  # noqa: ANN401
    settings = {"start_s": 1000.0, "page_size": PAGE_SIZE, "source": "a test", "limits": GENEROUS}
    return Recorder(path, **{**settings, **changes})


def request(
    prompt: tuple[int, ...], *, at_s: float = 1000.0, sampling: SamplingParams | None = None
) -> Request:
    return Request(
        id="secret-id",
        prompt=prompt,
        sampling=sampling or SamplingParams(temperature=0.0),
        seed=1,
        max_tokens=30,
        ends_by_context=False,
        stop_ids={2: FinishReason.EOS},
        arrival_s=at_s,
    )


def record_engine(path: Path, asked: list[GenerationRequest], **changes: Any) -> Workload:  # noqa: ANN401
    clock = Clock()
    engine, runner = build_engine(clock=clock)
    recorder = build_recorder(path, start_s=engine.now(), **changes)
    engine.add_tap(recorder.note)
    clock.now_s += 5.0
    with serve(engine, runner):
        for one in asked:
            clock.now_s += 0.25
            gather(engine.submit(one))
    recorder.close()
    return load_workload(path)


A, B, C = (1,) * PAGE_SIZE, (2,) * PAGE_SIZE, (3,) * PAGE_SIZE
PROMPTS: Final = [(*A, *B, 5), (*A, *C, 5, 6), (*A, *B, 9, 9), (7, *A), (1,)]


def shared_tokens(entries: tuple[WorkloadEntry, ...]) -> list[int]:
    """Leading tokens that each entry's made prompt shares with the first one's."""
    made = [materialize(e, vocab_size=5000, special_ids=(), run_salt="s") for e in entries]
    return [
        next((i for i, (a, b) in enumerate(zip(made[0], one, strict=False)) if a != b), len(one))
        for one in made
    ]


def test_a_recording_is_a_workload_of_the_same_arrivals_lengths_and_sharing(
    tmp_path: Path,
) -> None:
    asked = [ask(prompt, max_tokens=3 + i) for i, prompt in enumerate(PROMPTS)]
    recorded = record_engine(tmp_path / "r.jsonl", asked)
    assert [one.at_s for one in recorded.entries] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [one.prompt_tokens for one in recorded.entries] == [len(p) for p in PROMPTS]
    assert [one.wanted_tokens for one in recorded.entries] == [3, 4, 5, 6, 7]
    assert shared_tokens(recorded.entries)[1:] == [PAGE_SIZE, 2 * PAGE_SIZE, 0, 0]
    assert [one.sampling for one in recorded.entries] == [{"temperature": 0.0}] * 5
    header = recorded.header
    assert (header.name, header.prompts, header.source) == ("r", "unique", "a test")
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_recording_replayed_and_recorded_again_is_the_same_load(tmp_path: Path) -> None:
    asked = [ask(prompt, max_tokens=3 + i) for i, prompt in enumerate(PROMPTS)]
    first = record_engine(tmp_path / "a.jsonl", asked)
    again = []
    for one in first.entries:
        prompt = materialize(one, vocab_size=256, special_ids=(), run_salt="run")
        assert one.wanted_tokens is not None
        again.append(ask(prompt, max_tokens=one.wanted_tokens, ignore_eos=True))
    second = record_engine(tmp_path / "b.jsonl", again)
    for before, after in zip(first.entries, second.entries, strict=True):
        assert (before.at_s, before.prompt_tokens) == (after.at_s, after.prompt_tokens)
        assert before.wanted_tokens == after.wanted_tokens
    assert shared_tokens(first.entries) == shared_tokens(second.entries)


def test_no_content_is_in_it_and_its_keys_are_salted(tmp_path: Path) -> None:
    text = "Xyzzy and a long secret text"
    stops = ("Plugh",)
    asked = [ask(text, id="secret-id", stop_strings=stops, logit_bias={77: 1.0}, seed=4242)]
    first = record_engine(tmp_path / "a.jsonl", asked)
    second = record_engine(tmp_path / "b.jsonl", asked)
    keys = [one.prompt.blocks for one in (first.entries[0], second.entries[0])]  # type: ignore[union-attr]
    assert len(keys[0]) == len(text) // PAGE_SIZE
    assert not set(keys[0]) & set(keys[1])
    written = (tmp_path / "a.jsonl").read_text()
    for secret in ("Xyzzy", "secret", "Plugh", "77", "4242", "token_ids", 'text"'):
        assert secret not in re.sub(r"[0-9a-f]{16,}", "", written)
    assert stat.S_IMODE((tmp_path / "a.jsonl").stat().st_mode) == 0o600


def test_a_key_stands_for_all_tokens_before_it(tmp_path: Path) -> None:
    recorded = record_engine(tmp_path / "r.jsonl", [ask((*A, *B)), ask((*C, *B)), ask((*A, *B))])
    first, second, third = (one.prompt.blocks for one in recorded.entries)  # type: ignore[union-attr]
    assert first == third
    assert not set(first) & set(second)


def test_content_is_in_it_where_that_is_asked_for(tmp_path: Path) -> None:
    asked = [ask(prompt) for prompt in PROMPTS]
    recorded = record_engine(tmp_path / "r.jsonl", asked, keeps_content=True)
    assert [one.prompt for one in recorded.entries] == PROMPTS
    assert recorded.header.prompts == "fixed"


def test_requests_are_sorted_by_arrival_whatever_ends_first(tmp_path: Path) -> None:
    recorder = build_recorder(tmp_path / "r.jsonl")
    recorder.note(request((1, 2), at_s=1003.5), 4)
    recorder.note(request((1, 2, 3), at_s=1001.25), 9)
    recorder.close()
    recorded = load_workload(tmp_path / "r.jsonl")
    assert [(e.at_s, e.wanted_tokens) for e in recorded.entries] == [(0.0, 9), (2.25, 4)]


def test_facts_that_change_the_load_are_kept(tmp_path: Path) -> None:
    recorder = build_recorder(tmp_path / "r.jsonl")
    one = request((1,), sampling=SamplingParams(temperature=0.5, top_k=9, ignore_eos=True))
    one.priority, one.deadline_s = 3, 1002.5
    recorder.note(one, 4)
    recorder.note(request((1,)), 0)
    recorder.close()
    first, second = load_workload(tmp_path / "r.jsonl").entries
    assert (first.priority, first.deadline_s) == (3, 2.5)
    assert first.sampling == {"temperature": 0.5, "top_k": 9}
    # it ended before its first token: nobody knows its length
    assert second.wanted_tokens is None
    assert second.sampling == {"temperature": 0.0, "max_tokens": 30}


def test_a_request_that_was_given_up_has_the_tokens_it_got(tmp_path: Path) -> None:
    engine, runner = build_engine()
    recorder = build_recorder(tmp_path / "r.jsonl")
    engine.add_tap(recorder.note)
    runner.gate.clear()
    with serve(engine, runner):
        stream = engine.submit(ask((1, 2, 3), max_tokens=20))
        stream.cancel()
        runner.gate.set()
        num_tokens = len(gather(stream).token_ids)
    recorder.close()
    (one,) = load_workload(tmp_path / "r.jsonl").entries
    assert num_tokens < 20
    assert (one.prompt_tokens, one.wanted_tokens) == (3, num_tokens or None)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RecordLimits(max_entries=3, max_bytes=1 << 20), "over_record_max_entries"),
        (RecordLimits(max_entries=100, max_bytes=600), "over_record_max_bytes"),
    ],
)
def test_a_recording_is_bounded_and_says_what_it_left_out(
    limits: RecordLimits, reason: str, tmp_path: Path
) -> None:
    recorder = build_recorder(tmp_path / "r.jsonl", limits=limits)
    for index in range(20):
        recorder.note(request((1, 2), at_s=1000.0 + index), 4)
    end = recorder.close()
    assert end is not None
    assert 0 < end.num_entries < 20
    assert end.counts == {reason: 20 - end.num_entries}
    assert len(load_workload(tmp_path / "r.jsonl").entries) == end.num_entries


@pytest.fixture
def stuck_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until it is told to."""
    go_on = threading.Event()
    write = Recorder._try_to_write

    def wait_and_write(recorder: Recorder, line: bytes) -> bool:
        assert go_on.wait(30)
        return write(recorder, line)

    monkeypatch.setattr(Recorder, "_try_to_write", wait_and_write)
    yield go_on
    go_on.set()


def test_the_engine_never_waits_for_a_slow_disk(
    stuck_disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "MAX_QUEUED", 2)
    engine, runner = build_engine()
    recorder = build_recorder(tmp_path / "r.jsonl")
    engine.add_tap(recorder.note)
    with serve(engine, runner):
        for _ in range(8):
            gather(engine.submit(ask((1, 2, 3), max_tokens=2)))  # while the writer is stuck
    stuck_disk.set()
    end = recorder.close()
    assert end is not None
    assert 2 <= end.num_entries <= 3  # those that waited, and perhaps one in hand
    assert end.counts == {"writer_too_slow": 8 - end.num_entries}


class FullDisk:
    """A file on a disk that fills up in the middle of a line."""

    def __init__(self, file: Any, room: int) -> None:  # noqa: ANN401
        self._file = file
        self._room = room

    def write(self, line: bytes) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = line[: self._room]
        self._room -= len(part)
        return int(self._file.write(part))

    def truncate(self, size: int) -> int:
        return int(self._file.truncate(size))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_a_full_disk_costs_lines_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_private = record_module._open_private

    def open_full(path: Path) -> FullDisk:
        return FullDisk(open_private(path), room=450)

    monkeypatch.setattr(record_module, "_open_private", open_full)
    recorder = build_recorder(tmp_path / "r.jsonl")
    for _ in range(10):
        recorder.note(request((1, 2)), 4)
    end = recorder.close()
    assert end is not None
    assert end.num_entries > 0
    assert end.counts == {"write_failed": 10 - end.num_entries}
    assert len(load_workload(tmp_path / "r.jsonl").entries) == end.num_entries


def test_a_server_that_was_killed_leaves_what_can_be_imported(tmp_path: Path) -> None:
    recorder = build_recorder(tmp_path / "r.jsonl")
    for index in range(3):
        recorder.note(request((1, 2), at_s=1001.0 + index), 4)
    recorder._queue.put(None)
    recorder._thread.join()  # and never closed
    raw = tmp_path / "r.jsonl.recording"
    raw.write_bytes(raw.read_bytes()[:-5])
    imported = import_workload(raw)
    assert [one.at_s for one in imported.entries] == [0.0, 1.0]
    assert imported.counts == {"cut": 1}


def test_nothing_asked_is_no_file(tmp_path: Path) -> None:
    assert build_recorder(tmp_path / "r.jsonl").close() is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"record_path .* is there already; move it"):
        build_recorder(path)
    path.rename(tmp_path / "r.jsonl.recording")
    with pytest.raises(ConfigError, match="a recording that another server writes or that was"):
        build_recorder(path)
    with pytest.raises(ConfigError, match="its folder is not there; make it"):
        build_recorder(tmp_path / "none" / "r.jsonl")
