"""Who waits for a turn."""

from jaxserve.engine.waker import Waker


def num_in_turn(waker: Waker) -> int:
    return len(waker._in_turn)
