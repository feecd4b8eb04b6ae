"""Spans on their way out: a bounded queue, and the thread that exports what is in it."""

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from jaxserve.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 512


class SpanQueue[T]:
    """Takes items from any thread without waiting, and hands them on in batches from its own.

    What finds no room, or cannot be exported, is counted and gone: tracing never holds up or ends a
    request. Each item is either exported or dropped, and both are counted.
    """

    def __init__(
        self,
        export: Callable[[Sequence[T]], bool],
        *,
        metrics: Metrics,
        max_items: int,
        interval_s: float,
    ) -> None:
        """Args:
        export: sends a batch; False where that failed. It may take long.
        interval_s: between batches, while there is less than one.
        """
        self._export = export
        self._metrics = metrics
        self._max_items = max_items
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._items: collections.deque[T] = collections.deque()
        self._is_closed = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-spans", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Adds an item; one that finds no room is dropped."""
        with self._changed:
            has_room = not self._is_closed and len(self._items) < self._max_items
            if has_room:
                self._items.append(item)
                if len(self._items) in (1, MAX_BATCH):  # the thread waits for one of them
                    self._changed.notify()
        if not has_room:
            self._drop(1, "queue_full")

    def close(self) -> None:
        """Takes nothing more; the thread exports what there is, and ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @property
    def is_done(self) -> bool:
        """Whether it is closed and everything is exported or dropped."""
        return not self._thread.is_alive()

    def give_up(self) -> int:
        """Drops what is left; returns how much. A batch that is on its way ends as it may."""
        with self._changed:
            num_left = len(self._items)
            self._items.clear()
        self._drop(num_left, "shutdown")
        return num_left

    def _run(self) -> None:
        while batch := self._take():
            is_sent = self._try(batch)
            if is_sent:
                self._metrics.trace_spans_exported.inc(len(batch))
            else:
                self._drop(len(batch), "export_failed")
            if is_sent is self._is_failing:
                self._is_failing = not is_sent
                what = "are exported again" if is_sent else "CANNOT BE EXPORTED and are dropped"
                logger.log(logging.INFO if is_sent else logging.WARNING, "spans %s", what)

    def _try(self, batch: Sequence[T]) -> bool:
        try:
            return self._export(batch)
        except Exception:  # of a library and a network: no request's affair
            logger.debug("an export failed", exc_info=True)
            return False

    def _take(self) -> list[T]:
        """Waits for the next batch; none once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed)
            self._changed.wait_for(
                lambda: len(self._items) >= MAX_BATCH or self._is_closed,
                self._interval_s,
            )
            return [self._items.popleft() for _ in range(min(len(self._items), MAX_BATCH))]

    def _drop(self, count: int, reason: str) -> None:
        if count:
            self._metrics.trace_spans_dropped.labels(reason).inc(count)
