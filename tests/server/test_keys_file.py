"""The file of keys: written so that nobody else can, read so that nothing wrong is in force."""

import datetime
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.keys_file import (
    add_key,
    find_exposure,
    make_key,
    read_keys,
    remove_keys,
)

NOW: Final = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
LINE: Final[dict[str, Any]] = {"tenant": "acme", "sha256": "0" * 64}


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    path.chmod(0o600)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    return str(caught.value)


def test_a_key_is_256_random_bits_and_the_file_has_its_digest_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    texts = [make_key("acme", now=NOW) for _ in range(100)]
    assert len({text for text, _ in texts}) == 100
    text, key = texts[0]
    assert text.startswith("jsk_")
    assert len(text) == 4 + 43  # 32 bytes in base64
    add_key(path, key)
    written = path.read_text()
    assert text not in written
    assert text[4:] not in written
    assert hashlib.sha256(text.encode()).hexdigest() in written
    assert read_keys(path) == (key,)


def test_a_file_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        add_key(tmp_path / "keys.jsonl", make_key("acme", now=NOW)[1])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys.jsonl").stat().st_mode) == 0o600
    assert [child.name for child in tmp_path.iterdir()] == ["keys.jsonl"]


def test_lines_are_added_and_taken_out_and_comments_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.jsonl", "# ours", "", LINE, "  # more")
    path.write_text(path.read_text().rstrip("\n"))  # a last line without an end
    made = [make_key("bolt", name=f"n{i}", now=NOW, expires=NOW)[1] for i in range(2)]
    for key in made:
        add_key(path, key)
    assert [key.name for key in read_keys(path)] == ["", "n0", "n1"]
    gone = remove_keys(path, ["0" * 12, made[1].id])
    assert [key.tenant for key in gone] == ["acme", "bolt"]
    assert read_keys(path) == (made[0],)
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# ours", "", "  # more"]


def test_a_key_that_is_not_there_is_not_revoked_and_nothing_else_is(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.jsonl", LINE)
    with pytest.raises(ConfigError, match="has no key 123"):
        remove_keys(path, ["0" * 12, "123"])
    assert len(read_keys(path)) == 1


def test_a_rewritten_file_keeps_who_may_read_it_and_a_link_stays_one(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.jsonl", LINE)
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    add_key(tmp_path / "link", make_key("acme", now=NOW)[1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink()
    assert len(read_keys(path)) == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2: Invalid JSON"),
        ({"tenant": "acme"}, "sha256: Field required"),
        ({**LINE, "sha256": "0" * 63}, "sha256: String should match"),
        ({**LINE, "sha256": "A" * 64}, "sha256: String should match"),
        ({**LINE, "tenant": ""}, "the tenant '' must be"),
        ({**LINE, "tenant": "a b"}, "the tenant 'a b' must be"),
        ({**LINE, "tenant": "other"}, "other is a word of the metrics"),
        ({**LINE, "tenants": "x"}, "tenants: Extra inputs"),
        ({**LINE, "expires": "2026-01-01T00:00:00"}, "expires: Input should have timezone"),
        ({**LINE, "name": "a\nb"}, "the name must be printable"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str | dict[str, Any], what: str) -> None:
    path = write(tmp_path / "keys.jsonl", {**LINE, "sha256": "1" * 64}, line)
    text = problem(path)
    assert "line 2" in text
    assert what in text
    with pytest.raises(ConfigError, match="line 2"):
        add_key(path, make_key("acme", now=NOW)[1])


def test_a_key_that_went_astray_into_the_file_is_not_repeated(tmp_path: Path) -> None:
    text, _ = make_key("acme", now=NOW)
    for line in (text, {**LINE, "sha256": text}, {**LINE, "key": text}):
        assert text not in problem(write(tmp_path / "keys.jsonl", line))


def test_a_key_stands_once(tmp_path: Path) -> None:
    text = problem(write(tmp_path / "keys.jsonl", LINE, {**LINE, "tenant": "bolt"}))
    assert "line 2: the key of line 1 again" in text


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.jsonl", LINE)
    path.chmod(mode)
    assert "can be written by others" in problem(path)
    assert "chmod 600" in problem(path)


@pytest.mark.parametrize(("mode", "is_exposed"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_about(
    tmp_path: Path, mode: int, is_exposed: bool
) -> None:
    path = write(tmp_path / "keys.jsonl", LINE)
    path.chmod(mode)
    assert len(read_keys(path)) == 1
    assert ("can be read by others" in find_exposure(path)) == is_exposed


def test_a_file_that_is_not_there_or_no_text_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in problem(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes").chmod(0o600)
    assert "cannot be read" in problem(tmp_path / "bytes")
