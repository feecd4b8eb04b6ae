"""Kills `jaxserve batch` at random places of its output, and compares what it ends with."""

import sys
import tempfile
import time
from pathlib import Path

from tests.cli.batch.killing import KilledBatch


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:]]
    num_lines, num_bad, num_kills, seed = (*numbers, *(10_000, 300, 5, 7)[len(numbers) :])
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        batch = KilledBatch(Path(folder), num_lines=num_lines, num_bad=num_bad, seed=seed)
        num_done = batch.compare(num_kills, print)
    took_s = time.monotonic() - started_s
    print(f"{num_done} kills: each id once, in order, the same tokens; {took_s:.0f} s")
    return 0 if num_done == num_kills else 1


if __name__ == "__main__":
    sys.exit(main())
