"""`jaxserve keys`: the key is shown once, and lists never show it."""

import datetime
import json
from pathlib import Path

import pytest

from jaxserve.cli.keys import read_expiry
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.auth import Authenticator
from jaxserve.server.keys_file import read_keys

NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)


def new(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["keys", "new", "--file", str(path), "--tenant", "acme", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.strip()


def test_a_new_key_is_printed_once_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.jsonl"
    key = new(path, capsys, "--name", "a laptop")
    authenticator = Authenticator(read_keys(path), metrics=Metrics())
    assert authenticator.authenticate(f"Bearer {key}").name == "acme"
    assert main(["keys", "list", "--file", str(path)]) == 0
    out = capsys.readouterr().out
    assert key not in out
    assert key[4:] not in out
    assert out.splitlines()[1].split()[1] == "acme"
    assert out.splitlines()[1].split()[-3:] == ["never", "a", "laptop"]


def test_a_revoked_key_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.jsonl"
    key, kept = new(path, capsys), new(path, capsys)
    main(["keys", "list", "--file", str(path), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [row["tenant"] for row in listed] == ["acme", "acme"]
    assert main(["keys", "revoke", "--file", str(path), listed[0]["id"]]) == 0
    assert capsys.readouterr().out == f"revoked {listed[0]['id']} of acme\n"
    authenticator = Authenticator(read_keys(path), metrics=Metrics())
    assert authenticator.authenticate(f"Bearer {kept}").name == "acme"
    assert key not in path.read_text()
    assert authenticator.num_keys == 1


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys.jsonl")
    for words, what in (
        (["list", "--file", path], "No such file"),
        (["new", "--file", path, "--tenant", "a b"], "the tenant 'a b'"),
        (["new", "--file", path, "--tenant", "a", "--expires", "soon"], "neither a time such as"),
        (["new", "--file", f"{path}/x", "--tenant", "a"], "cannot be"),
        (["revoke", "--file", path, "x"], "No such file"),
    ):
        assert main(["keys", *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert what in line
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("12h", NOW + datetime.timedelta(hours=12)),
        ("30d", NOW + datetime.timedelta(days=30)),
        ("2027-01-31", datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC)),
        ("2027-01-31T12:00+01:00", datetime.datetime(2027, 1, 31, 11, tzinfo=datetime.UTC)),
    ],
)
def test_a_key_may_end(text: str, when: datetime.datetime) -> None:
    assert read_expiry(text, NOW) == when


@pytest.mark.parametrize("text", ["", "0d", "-1d", "1w", "2026-11-29", "2026-13-01"])
def test_an_end_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires"):
        read_expiry(text, NOW)
