"""How Python runs in a process that serves, replays or simulates."""

import gc
import sys
from typing import Final

# Objects more than there were at the last look. A step of ten thousand rows makes forty thousand,
# which go by themselves two steps later; with Python's 700 every fifth such step would look at all
# that waits, 40 % of the time of scheduling (bench/scheduling.py). Yet calls leave cycles with
# gRPC's memory in them, and with 100,000 a server of many short calls grew by 8 MiB a minute.
MIN_OBJECTS: Final = 10_000
OBJECTS_PER_ROW: Final = 10
OLDER: Final = (10, 5)  # looks of a younger generation for one of the next
# With Python's 5 ms the engine's thread, back from the device, waits as long for whoever holds the
# interpreter; with 0.2 ms changing threads takes more than waiting (bench/host_loop.py).
SWITCH_S: Final = 0.002


def tune_interpreter(max_seqs: int) -> None:
    """Has the collector look for cycles less often, and threads take turns more often.

    It changes the whole process.

    Args:
      max_seqs: rows of a step, at most.
    """
    gc.set_threshold(max(MIN_OBJECTS, OBJECTS_PER_ROW * max_seqs), *OLDER)
    sys.setswitchinterval(SWITCH_S)


def settle_heap() -> None:
    """Has the collector pass over all that is there now, for good: what a start has made stays, and
    a whole look at it would hold a step up by 0.1 s."""
    gc.collect()
    gc.freeze()
