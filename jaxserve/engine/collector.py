"""Python's garbage collector, in a process that serves or simulates."""

import gc
from typing import Final

# Objects more than there were at the last look. A step of ten thousand rows makes forty thousand,
# which go by themselves two steps later; with Python's 700 every fifth such step would look at
# all that waits, 40 % of the time of scheduling (bench/scheduling.py).
THRESHOLDS: Final = (100_000, 20, 100)


def relax_collector() -> None:
    """Has the collector look for cycles less often; it changes the whole process."""
    gc.set_threshold(*THRESHOLDS)
