"""Wakes tasks of event loops from the engine thread."""

import asyncio
import contextlib


class Waker:
    """Wakes the tasks that wait for streams: all of one event loop with one call.

    A call into a loop from another thread writes to a socket, which costs more than all else that a
    token costs here. The engine thread alone uses it, and flushes before it waits for anything.
    """

    def __init__(self) -> None:
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        loop, future = waiter
        self._futures.setdefault(loop, []).append(future)

    def flush(self) -> None:
        if not self._futures:
            return
        waiting, self._futures = self._futures, {}
        for loop, futures in waiting.items():
            # a closed loop has no reader left; its tasks' own ends cancel the requests
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
