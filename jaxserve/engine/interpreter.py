"""How Python runs in a process that serves, replays or simulates."""

import gc
import sys
from typing import Final

# Objects more than there were at the last look. A step of ten thousand rows makes forty thousand,
# which go by themselves two steps later; with Python's 700 every fifth such step would look at
# all that waits, 40 % of the time of scheduling (bench/scheduling.py).
THRESHOLDS: Final = (100_000, 20, 100)
# With Python's 5 ms the engine's thread, back from the device, waits as long for a reader of its
# streams, several times a step (bench/host_loop.py).
SWITCH_S: Final = 0.0002


def tune_interpreter() -> None:
    """Has the collector look for cycles less often, and threads take turns more often.

    It changes the whole process.
    """
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
