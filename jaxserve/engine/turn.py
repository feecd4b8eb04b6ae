"""Who goes first where the engine's thread and the readers of streams want the interpreter."""

import threading
import time
from typing import Final

MAX_SLEEP_S: Final = 0.005  # however long a turn takes: what Python lets a thread have at once
MIN_AWAKE_S: Final = 0.001  # between two sleeps: readers get on where the engine never rests
BEHIND_TOKENS: Final = 32  # unread: with each so many more a reader is awake as long again


class Turn:
    """The engine's thread has its turn from one wait for the device to the next.

    CPython gives its lock in turns to all who want it. Beside readers who always have something to
    do a step would take twice its time, and the device, whose next step it is to launch, would
    wait. So a reader gives way before each event, and does its work while the engine waits. The
    more it has not read, the less it gives way: the engine gets slower before readers are lost.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._is_over.set()
        self._awake_s = 0.0  # since when the readers' thread is; of several threads the last one's

    def begin(self) -> None:
        """The engine's thread has something to do."""
        self._is_over.clear()

    def end(self) -> None:
        """It is about to wait."""
        self._is_over.set()

    def give_way(self, num_unread: int) -> None:
        """Returns when the turn is over, or after `MAX_SLEEP_S`; at once to who slept just now.

        Args:
          num_unread: tokens of the stream that its reader has not taken.
        """
        if self._is_over.is_set():
            return
        min_awake_s = MIN_AWAKE_S * (1 + num_unread // BEHIND_TOKENS)
        if time.monotonic() - self._awake_s < min_awake_s:
            return
        self._is_over.wait(MAX_SLEEP_S)
        self._awake_s = time.monotonic()
