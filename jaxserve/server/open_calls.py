"""How many calls are open over all doors: their bound, and the wait for the last to end."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

from prometheus_client import Gauge

from jaxserve.config import LimitsSection
from jaxserve.errors import QueueFullError

BUSY_RETRY_S: Final = 1.0


class OpenCalls:
    """Counts from when a call came until it is answered. For one event loop."""

    def __init__(self, limits: LimitsSection, level: Gauge | None = None) -> None:
        """Args:
        level: shows the count.
        """
        self._level = level
        self._limit = limits.max_open_calls
        self._count = 0
        self._num_taken = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def count(self) -> int:
        return self._count

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts a call while the block runs, whether or not it has a place."""
        self._count += 1
        self._show()
        self._is_idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            self._show()
            if self._count == 0:
                self._is_idle.set()

    def _show(self) -> None:
        if self._level is not None:
            self._level.set(self._count)

    @contextlib.contextmanager
    def taking_place(self) -> Iterator[None]:
        """Takes one of `limits.max_open_calls` places while the block runs.

        For calls that were let in: what needs no key, or has none, takes no place from them.

        Raises:
          QueueFullError: all are taken.
        """
        if self._num_taken >= self._limit:
            raise QueueFullError(
                f"{self._limit} calls are open, which is the limit (limits.max_open_calls); "
                "try again later",
                retry_after_s=BUSY_RETRY_S,
            )
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns when no call is open, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
