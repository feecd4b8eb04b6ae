"""One engine in a process of its own, behind a line protocol.

The first answer is {"ready": {name: version}}. Then each line of stdin is an
order {"prompts": [[ids], …], "num_tokens": n}, and each answer {"seconds": s, "output_ids": [[ids],
…]}. What libraries print goes to stderr. Adapters run under other interpreters than ours: nothing
here or in them needs more than the standard library and the engine itself.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h: what a process gets when its parent ends
Prompts = Sequence[Sequence[int]]
# Greedy output ids of all prompts, each exactly so many tokens whatever they are.
Generate = Callable[[Prompts, int], Sequence[Sequence[int]]]
# Loads what the options say; returns how to generate, and the versions that tell what runs.
Start = Callable[[dict[str, Any]], tuple[Generate, dict[str, str]]]


def num_threads() -> int:
    """Returns one thread for each core that this process was given."""
    return len(os.sched_getaffinity(0))


def serve_orders(start: Start) -> None:
    """Answers orders until stdin ends; the one argument of the command is the options as JSON."""
    # One that stands still does not see that stdin has ended.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    generate, versions = start(json.loads(sys.argv[1]))
    answer({"ready": versions})
    for line in sys.stdin:
        order = json.loads(line)
        began = time.perf_counter()
        output_ids = generate(order["prompts"], order["num_tokens"])
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "output_ids": [list(map(int, ids)) for ids in output_ids]})
