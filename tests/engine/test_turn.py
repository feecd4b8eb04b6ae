"""Readers of streams give way to the engine's thread, and are not kept from reading."""

import threading
import time

import pytest

from jaxserve.engine import turn as turns
from jaxserve.engine.turn import Turn

LONG_S = 60.0


def _give_way(turn: Turn) -> threading.Thread:
    thread = threading.Thread(target=turn.give_way, args=(0,), daemon=True)
    thread.start()
    return thread


@pytest.fixture
def turn() -> Turn:
    return Turn()


def test_a_reader_goes_on_while_the_engine_waits(turn: Turn) -> None:
    _give_way(turn).join(LONG_S)
    turn.begin()
    turn.end()
    thread = _give_way(turn)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_reader_waits_until_the_turn_is_over(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_SLEEP_S", LONG_S)
    turn.begin()
    thread = _give_way(turn)
    thread.join(0.05)
    assert thread.is_alive()
    turn.end()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_turn_that_lasts_holds_nobody_up_for_long(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_SLEEP_S", 0.0)
    turn.begin()
    thread = _give_way(turn)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_the_more_is_unread_the_longer_a_reader_is_awake(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MIN_AWAKE_S", LONG_S)
    monkeypatch.setattr(turns, "MAX_SLEEP_S", 0.0)
    since_s = turn._awake_s = time.monotonic() - 2.5 * LONG_S
    turn.begin()
    turn.give_way(2 * turns.BEHIND_TOKENS)
    assert turn._awake_s == since_s
    turn.give_way(2 * turns.BEHIND_TOKENS - 1)
    assert turn._awake_s > since_s


def test_who_slept_just_now_goes_on_though_the_turn_lasts(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MIN_AWAKE_S", 2 * LONG_S)
    monkeypatch.setattr(turns, "MAX_SLEEP_S", 0.0)
    turn._awake_s = -LONG_S * LONG_S
    turn.begin()
    turn.give_way(0)  # a sleep of no time
    monkeypatch.setattr(turns, "MAX_SLEEP_S", LONG_S)
    thread = _give_way(turn)
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
