"""How Python runs in a process that serves, replays or simulates."""

import gc
import sys
from typing import Final

# Objects more than there were at the last look. A step of ten thousand rows makes forty thousand,
# which go by themselves two steps later; with Python's 700 every fifth such step would look at
# all that waits, 40 % of the time of scheduling (bench/scheduling.py). Whole looks are as often as
# is worth it: of 200 clients that come and go, 50,000 objects a minute are seen by no other.
THRESHOLDS: Final = (100_000, 10, 5)
# With Python's 5 ms the engine's thread, back from the device, waits as long for a reader of its
# streams, several times a step (bench/host_loop.py).
SWITCH_S: Final = 0.0002


def tune_interpreter() -> None:
    """Has the collector look for cycles less often, and threads take turns more often.

    It changes the whole process.
    """
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)


def settle_heap() -> None:
    """Has the collector pass over all that is there now, for good: what a start has made stays, and
    a whole look at it would hold a step up by 0.1 s."""
    gc.collect()
    gc.freeze()
