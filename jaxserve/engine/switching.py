"""How long a thread keeps the interpreter when others want it, in a process that serves."""

import sys
from typing import Final

# With Python's 5 ms the engine's thread, back from the device, waits as long for a reader of its
# streams, several times a step (bench/host_loop.py).
SWITCH_S: Final = 0.0002


def quicken_switching() -> None:
    """Has threads take turns more often; it changes the whole process."""
    sys.setswitchinterval(SWITCH_S)
