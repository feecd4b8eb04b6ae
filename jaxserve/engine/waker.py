"""Wakes tasks of event loops from the engine thread."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Final

# Of those who wait their turn, in a step. Readers and the engine's thread share one interpreter: a
# message costs as much of it for one token as for four (bench/host_loop.py).
MAX_WAKES: Final = 64
MIN_WAKES: Final = 8  # where the device waits for the host
MAX_HOLD_S: Final = 0.04  # what a turn may be waited for


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    """A task that waits for a stream. It may have gone: its future is done then.

    Attributes:
      is_due: woken, or by the next flush.
    """

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    is_due: bool = False


class Waker:
    """Wakes the tasks that wait for streams: all of one event loop with one call.

    A call into a loop from another thread writes to a socket, which costs more than all else that a
    token costs here. The engine thread alone uses it, but for `join`, and flushes before it waits
    for anything.

    Who waits for a start or an end is woken by the next flush. Who waits for more of the same has
    turns, first come, first served, and finds there what has come meanwhile: one message. There are
    fewer turns in each step in which the host was late, and more again in each in which it was not:
    so readers have what the engine's thread leaves, and soon find more in each message. From the
    first flush that might have been its own nobody waits longer than `MAX_HOLD_S`, as far as can be
    told: the next step is taken to be as long as the last one. So with slow steps each has a turn
    in every one, and who meets a sudden slow one has waited for it anyway, by `MAX_HOLD_S` less.

    Attributes:
      is_crowded: more wanted a turn in the last step than it has, and steps are short.
    """

    def __init__(self) -> None:
        self.is_crowded = False
        self._due: list[Waiter] = []
        self._new: collections.deque[Waiter] = collections.deque()  # since the last flush
        self._in_turn: dict[Waiter, float] = {}  # since when, in that order
        self._turn_s = -math.inf
        self._num_turns = MAX_WAKES  # of a step

    def wake(self, waiter: Waiter) -> None:
        """Has a task woken by the next flush of any kind."""
        if not waiter.is_due:
            waiter.is_due = True
            self._in_turn.pop(waiter, None)
            self._due.append(waiter)

    def join(self, waiter: Waiter) -> None:
        """Has a task woken in its turn; any thread may call it, while there are flushes to come."""
        self._new.append(waiter)

    def flush(self) -> None:
        """Wakes all: nothing more comes for now."""
        self._take_new(self._turn_s)
        for waiter in list(self._in_turn):
            self.wake(waiter)
        self.is_crowded = False
        self.flush_due()

    def flush_turns(self, now_s: float, *, is_late: bool = False) -> int:
        """Wakes those that are due, and those whose turn it is in this step; returns how many are
        left waiting. To be called once a step.

        Args:
          is_late: a step's result was there before it was asked for.
        """
        step_s, self._turn_s = now_s - self._turn_s, now_s
        # down four times as fast as up: one late step in five keeps the number
        num_wanted = self._num_turns + (-4 if is_late else 1)
        self._num_turns = min(MAX_WAKES, max(MIN_WAKES, num_wanted))
        overdue_s = now_s + step_s - MAX_HOLD_S  # since before then: too long by the next step
        self._take_new(now_s)
        num_turns = 0
        for waiter, since_s in list(self._in_turn.items()):
            if num_turns >= self._num_turns and since_s >= overdue_s:
                break
            num_turns += not waiter.future.done()
            self.wake(waiter)
        is_held = bool(self._in_turn) or num_turns > self._num_turns
        self.is_crowded = is_held and step_s <= MAX_HOLD_S
        self.flush_due()
        return len(self._in_turn)

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

    def _take_new(self, now_s: float) -> None:
        for _ in itertools.repeat(None, len(self._new)):  # others may join meanwhile
            waiter = self._new.popleft()
            if not waiter.is_due:
                self._in_turn[waiter] = now_s


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
