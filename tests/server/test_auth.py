"""Keys: what is let in, and that everything else hears the same."""

import contextlib
import datetime
import hmac
from typing import Final

import pytest

from jaxserve.errors import UnauthenticatedError
from jaxserve.metrics import Metrics
from jaxserve.server.auth import ANONYMOUS, Authenticator, Tenant
from jaxserve.server.keys_file import Key, make_key

NOW: Final = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
HOUR: Final = datetime.timedelta(hours=1)


class Wall:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime.datetime:
        return self.now


def build(*keys: Key, wall: Wall | None = None) -> tuple[Authenticator, Metrics]:
    metrics = Metrics()
    return Authenticator(keys, metrics=metrics, now=wall or Wall()), metrics


def test_a_key_tells_its_tenant() -> None:
    text, key = make_key("acme", now=NOW)
    other_text, other = make_key("bolt", now=NOW)
    authenticator, metrics = build(key, other)
    assert authenticator.authenticate(f"Bearer {text}") == Tenant(name="acme", key_id=key.id)
    assert authenticator.authenticate(f"bearer  {other_text} ").name == "bolt"
    assert metrics.value("auth_failures_total") == 0


def test_without_a_keys_file_everyone_is_one_tenant() -> None:
    authenticator = Authenticator(None, metrics=Metrics())
    assert authenticator.is_open
    for header in (None, "", "Bearer x", "nonsense"):
        assert authenticator.authenticate(header) is ANONYMOUS


def test_an_empty_keys_file_lets_nobody_in() -> None:
    authenticator, _ = build()
    assert not authenticator.is_open
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate("Bearer ")


def test_whatever_is_wrong_the_answer_is_the_same() -> None:
    wall = Wall()
    text, key = make_key("acme", now=NOW)
    old_text, old = make_key("acme", now=NOW, expires=NOW + HOUR)
    authenticator, metrics = build(key, old, wall=wall)
    assert authenticator.authenticate(f"Bearer {old_text}").name == "acme"
    wall.now += HOUR
    headers = [
        None, "", "Bearer", "Bearer ", text, f"Basic {text}", f"Bearer {text}x", f"Bearer x{text}",
        f"Bearer {text[:-1]}", f"Bearer {text.upper()}", f"Bearer {key.sha256}", f"Bearer {key.id}",
        f"Bearer {old_text}", f"Bearer {text} {text}", "Bearer \ud800", "Bearer \0", "B" * 100_000,
        f"Bearer {text}{' ' * 5000}",
    ]  # fmt: skip
    answers = set()
    for header in headers:
        with pytest.raises(UnauthenticatedError) as caught:
            authenticator.authenticate(header)
        answers.add((str(caught.value), caught.value.reason, caught.value.field))
    assert len(answers) == 1
    value = metrics.value
    assert value("auth_failures_total", reason="missing") == 2
    assert value("auth_failures_total", reason="expired") == 1
    assert value("auth_failures_total") == len(headers)


def test_each_answer_costs_the_same_whatever_is_presented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One keyed digest and one comparison in constant time, of texts of one length."""
    calls: list[tuple[str, int, int]] = []
    compare, keyed = hmac.compare_digest, hmac.digest

    def watched_compare(a: str, b: str) -> bool:
        calls.append(("compare", len(a), len(b)))
        return compare(a, b)

    def watched_keyed(key: bytes, text: bytes, name: str) -> bytes:
        calls.append(("keyed", len(key), len(text)))
        return keyed(key, text, name)

    text, key = make_key("acme", now=NOW)
    authenticator, _ = build(key, *(make_key("bolt", now=NOW)[1] for _ in range(20)))
    monkeypatch.setattr(hmac, "compare_digest", watched_compare)
    monkeypatch.setattr(hmac, "digest", watched_keyed)
    seen = []
    for header in (f"Bearer {text}", "Bearer wrong", None, f"Bearer {text[:-1]}"):
        calls.clear()
        with contextlib.suppress(UnauthenticatedError):
            authenticator.authenticate(header)
        seen.append(list(calls))
    assert seen == [[("keyed", 32, 64), ("compare", 64, 64)]] * 4


def test_the_place_of_a_key_in_the_table_is_a_secret_of_the_process() -> None:
    _, key = make_key("acme", now=NOW)
    first, second = build(key)[0], build(key)[0]
    assert first._keys is not None
    assert second._keys is not None
    assert first._keys.keys() != second._keys.keys()
    assert key.sha256.encode() not in first._keys
    assert bytes.fromhex(key.sha256) not in first._keys


def test_keys_that_are_replaced_hold_from_the_next_call_on() -> None:
    text, key = make_key("acme", now=NOW)
    new_text, new = make_key("acme", now=NOW)
    authenticator, _ = build(key)
    authenticator.replace([new])
    assert authenticator.authenticate(f"Bearer {new_text}").name == "acme"
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate(f"Bearer {text}")
    assert authenticator.num_keys == 1


def test_an_expired_key_is_in_the_log_by_its_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    text, key = make_key("acme", now=NOW, expires=NOW)
    authenticator, _ = build(key)
    for _ in range(3):
        with pytest.raises(UnauthenticatedError):
            authenticator.authenticate(f"Bearer {text}")
    assert caplog.text.count(key.id) == 1, "a client that goes on trying does not fill the log"
    assert text not in caplog.text
