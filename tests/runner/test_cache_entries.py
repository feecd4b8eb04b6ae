"""Cache entries are whole or not there, whatever happened to their files."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.runner.cache_entries import SUFFIX, CacheEntries

VALUE = bytes(range(256))


@pytest.fixture
def entries(tmp_path: Path) -> CacheEntries:
    entries = CacheEntries(tmp_path)
    for key in ("a", "b"):
        entries.put(key, VALUE + key.encode())
    return entries


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_value_comes_back_and_no_other_file_is_left(
    entries: CacheEntries, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (entries.get("a"), entries.get("b")) == (VALUE + b"a", VALUE + b"b")
    assert entries.get("c") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{SUFFIX}", f"b{SUFFIX}"]
    assert warnings_of(caplog) == []


def test_a_damaged_entry_is_not_there_and_is_replaced(
    entries: CacheEntries, tmp_path: Path
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    whole = path.read_bytes()
    damaged = [whole[:n] for n in (0, 1, 20, 32, len(whole) - 1)]
    damaged += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in (0, 100, -2)]
    damaged += [whole + b"x", (tmp_path / f"b{SUFFIX}").read_bytes()]
    for content in damaged:
        path.write_bytes(content)
        assert entries.get("a") is None
        entries.put("a", VALUE)
        assert entries.get("a") == VALUE


def test_what_is_broken_is_said_once(
    entries: CacheEntries, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("a", "b"):
        (tmp_path / f"{key}{SUFFIX}").write_bytes(b"short")
        assert entries.get(key) is None
    (line,) = warnings_of(caplog)
    assert f"a{SUFFIX}" in line
    assert "checksum" in line


def test_an_entry_that_cannot_be_read_is_not_there(
    entries: CacheEntries, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"c{SUFFIX}").mkdir()
    assert entries.get("c") is None
    assert "Is a directory" in warnings_of(caplog)[0]


def test_a_folder_that_cannot_be_written_is_said_once_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = CacheEntries(tmp_path / "gone")
    for key in ("a", "b"):
        entries.put(key, VALUE)
        assert entries.get(key) is None
    (line,) = warnings_of(caplog)
    assert "cannot be kept" in line
    assert "No such file" in line


def test_two_writers_of_a_process_that_meet_at_one_key_both_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, have_written = Path.write_bytes, threading.Barrier(2)

    def write_and_wait(path: Path, content: bytes) -> int:
        count = write(path, content)
        have_written.wait(timeout=60)
        return count

    monkeypatch.setattr(Path, "write_bytes", write_and_wait)
    with ThreadPoolExecutor(2) as pool:  # as of two runners that start together
        for writer in [pool.submit(CacheEntries(tmp_path).put, "a", VALUE) for _ in range(2)]:
            writer.result()
    assert warnings_of(caplog) == []
    assert [path.name for path in tmp_path.iterdir()] == [f"a{SUFFIX}"]
    assert CacheEntries(tmp_path).get("a") == VALUE


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    fresh, old = tmp_path / ".k.1.tmp", tmp_path / ".k.2.tmp"
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    CacheEntries(tmp_path)
    assert sorted(tmp_path.iterdir()) == [fresh]
