"""Wakes tasks of event loops from the engine thread, and says whose turn it is to be given more."""

import asyncio
import contextlib
import math
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

# Of those who wait their turn, in a step. Readers and the engine's thread share one interpreter: a
# message costs as much of it for one token as for four (bench/host_loop.py).
MAX_TURNS: Final = 64
MIN_TURNS: Final = 8  # where the device waits for the host
MAX_HOLD_S: Final = 0.04  # what a turn may be waited for


class Waiter(NamedTuple):
    """A task that waits for a stream. It may have gone: its future is done then."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class HoldsBack(Protocol):
    """Who holds output back until its turn: a stream."""

    def hand_over(self) -> None:
        """Gives its reader what is held back, and leaves; or joins again, where more is to come."""
        ...


class Waker:
    """Has streams hand over what came for them, and wakes the tasks that wait for it: all of one
    event loop with one call, because a call into a loop from another thread writes to a socket,
    which costs more than all else that a token costs here. The engine thread alone uses it, and
    flushes before it waits for anything.

    A start, a stream's first token and an end wait for nobody, nor does what is put where output is
    not taken yet. For the rest there are turns, first come, first served; what comes meanwhile
    makes one message with it. Who follows a growing output is always in turn, also while nothing
    has come. There are fewer turns after a step in which the host was late, and slowly more again:
    so readers have what the engine's thread leaves, and find more in each message. Nothing is held
    back longer than `MAX_HOLD_S`, as far as can be told: the next step is taken to be as long as
    the last one. So with slow steps each has its turn in every one, and who meets a sudden slow one
    has waited for it anyway, by `MAX_HOLD_S` less.
    """

    def __init__(self) -> None:
        self._due: list[Waiter] = []
        self._in_turn: dict[HoldsBack, float] = {}  # since when, in that order
        self._turn_s = -math.inf
        self._num_turns = float(MAX_TURNS)  # of a step

    def wake(self, waiter: Waiter) -> None:
        """Has a task woken by the next flush of any kind."""
        self._due.append(waiter)

    def join(self, holder: HoldsBack, now_s: float) -> None:
        """Gives a turn to who holds something back since now, or since earlier."""
        self._in_turn.setdefault(holder, now_s)

    def rejoin(self, holder: HoldsBack, now_s: float) -> None:
        """Gives another turn to who has had one, behind all others."""
        self._in_turn.pop(holder, None)
        self._in_turn[holder] = now_s

    def leave(self, holder: HoldsBack) -> None:
        """Nothing is held back any more."""
        self._in_turn.pop(holder, None)

    def flush(self) -> None:
        """Has all handed over: nothing more comes for now."""
        for holder in list(self._in_turn):
            holder.hand_over()
        self.flush_due()

    def flush_turns(self, now_s: float, *, is_late: bool = False) -> int:
        """Has those hand over whose turn it is in this step; returns how many are left. To
        be called once a step.

        Args:
          is_late: a step's result was there before it was asked for.
        """
        step_s, self._turn_s = now_s - self._turn_s, now_s
        # down 64 times as fast as up: a late step now and then keeps the number
        num_wanted = self._num_turns + (-4 if is_late else 1 / 16)
        self._num_turns = min(max(num_wanted, MIN_TURNS), MAX_TURNS)
        overdue_s = now_s + step_s - MAX_HOLD_S  # since before then: too long by the next step
        in_turn, num_given = list(self._in_turn.items()), 0
        for holder, since_s in in_turn:
            if num_given >= int(self._num_turns) and since_s >= overdue_s:
                break
            holder.hand_over()
            num_given += 1
        self.flush_due()
        return len(in_turn) - num_given

    def flush_due(self) -> None:
        """Wakes those that wait for no turn."""
        if not self._due:
            return
        due, self._due = self._due, []
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for waiter in due:
            by_loop.setdefault(waiter.loop, []).append(waiter.future)
        for loop, futures in by_loop.items():
            # a closed loop has no reader left; its tasks' own ends cancel the requests
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
