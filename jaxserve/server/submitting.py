"""Hands requests to the engine from the event loop, in a thread where that takes long."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Cancellable(Protocol):
    """A stream, or several."""

    def cancel(self) -> None: ...


async def run_in_thread[T](threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """Returns what `call` returns; the log's lines of it carry what the caller's do."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(threads, context.run, call)


async def submit_in_thread[T](
    threads: ThreadPoolExecutor, submit: Callable[[], T], *, stream_of: Callable[[T], Cancellable]
) -> T:
    """Returns what `submit` returns. A stream that comes too late, the call being gone, is ended.

    Args:
      stream_of: finds the stream in what `submit` returns.
    """
    context = contextvars.copy_context()
    submitted = asyncio.get_running_loop().run_in_executor(threads, context.run, submit)

    def give_up(submitted: asyncio.Future[T]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            stream_of(submitted.result()).cancel()

    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        # the thread cannot be stopped: give up its stream when it has one
        submitted.add_done_callback(give_up)
        raise
