"""Many clients of all kinds at both doors for some minutes; then the books must balance.

    python -m scripts.judges.soak [MODEL] [--minutes 10] [--streams 200] [--seed 1]

Without MODEL: a tiny random one. Exit code 1: a call was lost, something is left, memory grew, or
the metrics are not what the clients saw.
"""

import argparse
import asyncio
import collections
import contextlib
import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from scripts.judges.checks import Checks
from scripts.judges.idle import check_idle
from scripts.judges.load.asks import WORDS, make_golden
from scripts.judges.load.audit import Audit
from scripts.judges.load.books import read_log
from scripts.judges.load.crowd import Crowd
from scripts.judges.load.over_grpc import GrpcClients
from scripts.judges.load.over_http import HttpClients
from scripts.judges.load.server import Served, Taken, serving
from scripts.judges.tiny_model import write_tiny_model

WARM_UP_S: Final = 10.0  # threads and pools that come with the first load are not counted as left
SETTLE_S: Final = 60.0
SLACK_BYTES: Final = 20 << 20
GROWTH: Final = 1.05
# A model of many layers has near ties: another batch's sums are rounded otherwise, and the greedy
# token is another. The tiny model has none in its fixed requests.
NEAR_TIES: Final = 0.05
# Files are looked after by a thread that comes later, and a scrape may not be closed yet.
MORE_THREADS: Final = 2
MORE_FILES: Final = 2


async def play(crowd: Crowd, served: Served, *, streams: int, seconds: float) -> list[Taken]:
    """Has so many clients make calls for so long; returns what the server took, each second."""
    clients = (GrpcClients(crowd), HttpClients(crowd))
    end_s = time.monotonic() + seconds
    taken: list[Taken] = []

    async def work(number: int) -> None:
        door = clients[number % 2]
        tenant = "beta" if number % 5 < 2 else "alpha"
        while time.monotonic() < end_s:
            num_calls = len(crowd.calls)
            await door.act(tenant)
            if any(call.quota or call.reason == "queue_full" for call in crowd.calls[num_calls:]):
                await asyncio.sleep(crowd.rng.uniform(0.02, 0.3))

    async def look() -> None:
        while True:
            taken.append(served.taken())
            crowd.levels.append(crowd.num_open)
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(work(number))
    finally:
        looking.cancel()
        for door in clients:
            await door.close()
    return taken


async def learn_golden(crowd: Crowd) -> None:
    """Learns the outputs of the fixed requests, one after the other."""
    clients = GrpcClients(crowd)
    for number in range(len(WORDS)):
        crowd.golden[number] = await clients.read_stream("alpha", make_golden(number))
    await clients.close()
    assert all(crowd.golden.values()), crowd.faults


async def fill_pools(crowd: Crowd) -> None:
    """Has the threads be there that come with many scrapes at once: in the crowd these are rare."""
    clients = HttpClients(crowd)
    await asyncio.gather(*(clients.scrape("alpha") for _ in range(32)))
    await clients.close()


def check_golden(checks: Checks, crowd: Crowd, *, most: float) -> None:
    """Compares how many fixed requests had another output than alone with the most that may."""
    num = len(crowd.differing)
    seen = crowd.differing[:2] if num > most * crowd.num_golden else ""
    good = crowd.num_golden > 0 and not seen
    checks.holds("the same output as alone", good, seen or f"{num} others of {crowd.num_golden}")


def check_memory(checks: Checks, taken: list[Taken], *, early: float) -> None:
    """Compares the memory at the end with that at a fifth of the time; medians of some seconds."""
    width = max(len(taken) // 40, 2)
    first = int(len(taken) * early)
    before = statistics.median(x.rss_bytes for x in taken[first : first + width])
    after = statistics.median(x.rss_bytes for x in taken[-width:])
    most = max(x.rss_bytes for x in taken)
    good = after <= before * GROWTH + SLACK_BYTES
    seen = f"{before / 2**20:.1f} MiB, then {after / 2**20:.1f}; at most {most / 2**20:.1f}"
    checks.holds("resident memory", good, seen)


def run(options: argparse.Namespace, model: str, served: Served) -> int:
    checks = Checks("soak")
    crowd = Crowd(
        target=served.target,
        http=served.address,
        keys=served.keys,
        model=model,
        mean_tokens=options.mean_tokens,
        rng=random.Random(options.seed),
    )
    asyncio.run(learn_golden(crowd))
    asyncio.run(play(crowd, served, streams=options.streams, seconds=WARM_UP_S))
    asyncio.run(fill_pools(crowd))
    begun = served.wait_idle(SETTLE_S)
    at_first = served.taken()
    crowd.calls.clear()
    crowd.faults.clear()
    crowd.differing.clear()
    crowd.num_golden = 0
    crowd.levels.clear()
    first_byte = served.log.stat().st_size

    taken = asyncio.run(play(crowd, served, streams=options.streams, seconds=60 * options.minutes))
    gc.collect()  # channels that are closed keep their connections until then
    ended = served.wait_idle(SETTLE_S)
    at_last = served.taken()
    show(crowd)
    checks.same("what clients may not see", crowd.faults[:5], [])
    check_golden(checks, crowd, most=NEAR_TIES if options.model else 0.0)
    Audit(
        checks, crowd.calls, read_log(served.log, first_byte=first_byte), begun=begun, ended=ended
    ).run()
    check_idle(checks, ended)
    checks.same("open calls at the end", ended.value("open_calls"), 0.0)
    check_memory(checks, taken, early=0.2)
    first, last = at_first.threads, at_last.threads
    good = last.total() <= first.total() + MORE_THREADS
    seen = f"{first.total()}, {last.total()}; more {dict(last - first)}"
    checks.holds("threads at rest, before and after", good, seen)
    good = at_last.num_files <= at_first.num_files + MORE_FILES
    seen = f"{at_first.num_files}, {at_last.num_files}"
    checks.holds("files at rest, before and after", good, seen)
    checks.same("exit code", served.stop(), 0)
    return checks.end()


def show(crowd: Crowd) -> None:
    """Prints what was done, and how it ended."""
    for kind, number in sorted(crowd.kinds().items()):
        print(f"{number:7d}  {kind}")
    ends = collections.Counter(
        f"{call.door} {call.end or '-'} {call.cut or call.reason}" for call in crowd.calls
    )
    for end, number in sorted(ends.items()):
        print(f"{number:7d}  {end}")
    print(
        f"{len(crowd.calls)} calls, {statistics.mean(crowd.levels):.0f} open on average, "
        f"{max(crowd.levels)} at most; {sum(call.num_tokens for call in crowd.calls)} tokens read"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: a tiny random one")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--mean-tokens", type=int, default=40, help="of an output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the server's log")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = options.model or str(write_tiny_model(Path(folder) / "tiny"))
        served = stack.enter_context(serving([model], streams=options.streams, keep=options.keep))
        return run(options, model, served)


if __name__ == "__main__":
    sys.exit(main())
