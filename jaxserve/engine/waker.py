"""Wakes tasks of event loops from the engine thread."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import Final

# Of those who wait their turn, in a step. Readers and the engine's thread share one interpreter: a
# message costs as much of it for one token as for four (bench/host_loop.py).
MAX_WAKES: Final = 64
MAX_HOLD_S: Final = 0.02  # what a turn may be waited for


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    """A task that waits for a stream. It may have gone: its future is done then."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Waker:
    """Wakes the tasks that wait for streams: all of one event loop with one call.

    A call into a loop from another thread writes to a socket, which costs more than all else that a
    token costs here. The engine thread alone uses it, and flushes before it waits for anything.

    Who waits for a start or an end is woken by the next flush. Who waits for more of the same has
    turns, first come, first served, and finds there what has come meanwhile: one message. Nobody is
    left waiting for a turn longer than `MAX_HOLD_S`, as far as can be told: the next step is taken
    to be as long as the last one. So with slow steps each has a turn in every one, and who meets
    a sudden slow one has waited for it anyway, by `MAX_HOLD_S` less.
    """

    def __init__(self) -> None:
        self._due: dict[Waiter, None] = {}
        self._in_turn: dict[Waiter, float] = {}  # since when there is something for them
        self._turn_s = -math.inf

    @property
    def num_in_turn(self) -> int:
        return len(self._in_turn)

    def wake(self, waiter: Waiter) -> None:
        """Has a task woken by the next flush of any kind."""
        self._in_turn.pop(waiter, None)
        self._due[waiter] = None

    def wake_in_turn(self, waiter: Waiter, since_s: float) -> None:
        """Has a task woken in its turn.

        Args:
          since_s: when there was something for it; never before that of an earlier call.
        """
        self._in_turn[waiter] = since_s

    def flush(self) -> None:
        """Wakes all: nothing more comes for now."""
        self._due.update(dict.fromkeys(self._in_turn))
        self._in_turn.clear()
        self.flush_due()

    def flush_turns(self, now_s: float) -> int:
        """Wakes those that are due, and those whose turn it is in this step; returns how many are
        left waiting. To be called once a step."""
        step_s, self._turn_s = now_s - self._turn_s, now_s
        overdue_s = now_s + step_s - MAX_HOLD_S  # since before then: too long by the next step
        num_turns = 0
        for waiter, since_s in list(self._in_turn.items()):
            if num_turns >= MAX_WAKES and since_s >= overdue_s:
                break
            num_turns += not waiter.future.done()
            self.wake(waiter)
        self.flush_due()
        return len(self._in_turn)

    def flush_due(self) -> None:
        """Wakes those that wait for no turn."""
        due, self._due = self._due, {}
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
