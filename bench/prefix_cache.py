"""What the prefix cache finds of a trace, against all there is to find, and what it spares.

    python -m bench.prefix_cache mooncake_synthetic_trace.jsonl
    python -m bench.prefix_cache mooncake_synthetic_trace.jsonl --simulated live/step_times.json

The trace is one of Mooncake's (github.com/kvcache-ai/Mooncake: arrivals, lengths and the hashes of
each 512 prompt tokens), its lengths divided by 16. The bound is worked out of its hashes alone: the
tokens of leading blocks that an earlier request had, by all prompt tokens.

1. Live: the first conversations, three requests or more that begin with the same block, of which
   every request fits; one request at a time, with the cache and without, in turns.
2. In virtual time, with room for everything: the whole trace at its own arrivals.

Wanted: the hit rate of 2 within 3 points of the bound. Of 1: a shorter time to the first token.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.replays import (
    LiveMachine,
    VirtualMachine,
    add_machine_options,
    build_load,
    build_options,
    change,
    read_seed,
    read_settings,
)
from jaxserve.config import Config
from jaxserve.measure.limits import read_limits
from jaxserve.measure.load import Load, load_memory
from jaxserve.measure.step_times import ServedTimes, read_step_times
from jaxserve.measure.workload import Recipe, WorkloadEntry
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.importing import Filling, import_trace
from jaxserve.measure.workload.make import ClosedLoop
from jaxserve.measure.workload.scale import Scaling, scale_entries, scaled_header
from jaxserve.measure.workload.traces import MOONCAKE_BLOCK_TOKENS, Counts

WANTED_POINTS: Final = 3.0
ENDLESS: Final = 10**9
MIN_TURNS: Final = 3
NO_LIMITS: Final = read_limits([])
Prompt = tuple[Sequence[object], int, float]  # ids of its blocks, its tokens, tokens of a block


def main() -> int:
    options = read_options()
    seed = read_seed(options)
    config = read_settings(options)
    if options.simulated:
        served = read_step_times(options.simulated)
    else:
        served = measure_live(options, config, seed=seed)
    return 0 if simulate(options, config, served, seed=seed) else 1


# live


def measure_live(options: argparse.Namespace, config: Config, *, seed: int) -> ServedTimes:
    """Prints times to the first token with the cache and without; returns the steps' times."""
    load = read_slice(options, seed=seed)
    with load.open_entries() as entries:
        prompts = [entry.prompt_tokens or 0 for entry in entries]
    print(
        f"live: {load.num_requests} requests of {statistics.median(prompts):.0f} prompt tokens "
        f"(median), {sum(prompts)} in all, {100 * find_bound(read_blocks(load)):.1f} % of them "
        f"seen before; {options.concurrency} at a time"
    )
    print(f"{'cache':>8}{'hit rate':>10}{'ttft p50':>10}{'p95':>8}{'mean':>8}  s")
    machine = LiveMachine(options.model, config)
    ttft_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * options.repeats):
        has_cache = number % 4 in (0, 3)  # on, off, off, on
        result = machine.replay(
            load,
            change(config, "prefix_cache", enabled=has_cache),
            build_options(NO_LIMITS, seed=seed + number),
        )
        found = result["latency"]["ttft"]
        ttft_s[has_cache].append(found["p50"])
        hit_rate = result["tokens"]["hit_rate"]
        share = "–" if hit_rate is None else f"{100 * hit_rate:.1f} %"
        print(
            f"{'on' if has_cache else 'off':>8}{share:>10}{found['p50']:>10.3f}"
            f"{found['p95']:>8.3f}{found['mean']:>8.3f}",
            flush=True,
        )
    on_s, off_s = (statistics.median(ttft_s[has_cache]) for has_cache in (True, False))
    print(f"ttft p50, median of {options.repeats}: {on_s:.3f} s on, {off_s:.3f} s off: "
          f"{on_s / off_s:.2f}x\n")  # fmt: skip
    return machine.read_times()


def read_slice(options: argparse.Namespace, *, seed: int) -> Load:
    """Returns the requests of the first conversations that fit, in the trace's order."""
    conversations: dict[str, list[WorkloadEntry]] = collections.defaultdict(list)
    for entry in scale_trace(options):
        assert isinstance(entry.prompt, Recipe)
        if entry.prompt.blocks:
            conversations[entry.prompt.blocks[0]].append(entry)
    chosen: list[WorkloadEntry] = []
    for conversation in conversations.values():
        sizes = [(entry.prompt_tokens or 0) + (entry.wanted_tokens or 0) for entry in conversation]
        if len(sizes) >= MIN_TURNS and max(sizes) <= options.max_tokens:
            chosen += conversation
        if len(chosen) >= options.num_requests:
            break
    chosen.sort(key=lambda entry: entry.index)
    entries = [dataclasses.replace(entry, at_s=0.0) for entry in chosen]
    arrivals = ClosedLoop(concurrency=options.concurrency)
    return build_load("mooncake's first", arrivals, entries, seed=seed)


# in virtual time


def simulate(
    options: argparse.Namespace, config: Config, served: ServedTimes, *, seed: int
) -> bool:
    """Prints the hit rate and its bound; returns whether they are close."""
    imported = import_trace(options.trace, "mooncake", Filling())
    scaling = Scaling(divide_lengths=options.divide)
    header = scaled_header(imported.header, scaling, content_hash="")
    load = load_memory(build_workload(header, scale_trace(options)))
    machine = VirtualMachine(served)
    result = machine.replay(
        load,
        give_room(config, load),
        dataclasses.replace(build_options(NO_LIMITS, seed=seed), timeout_s=float(ENDLESS)),
    )
    bound = find_bound(read_trace(options.trace))
    hit_rate: float = result["tokens"]["hit_rate"]
    outcomes, tokens = result["outcomes"], result["tokens"]
    print(f"in virtual time: {outcomes['sent']} requests, {outcomes['ok']} ok, {tokens['prompt']} "
          f"prompt tokens, {result['server']['preemptions']:g} preemptions")  # fmt: skip
    points = 100 * (hit_rate - bound)
    print(f"hit rate {100 * hit_rate:.2f} %, the trace's own reuse {100 * bound:.2f} %: "
          f"{points:+.2f} points (wanted: within {WANTED_POINTS:g})")  # fmt: skip
    return abs(points) <= WANTED_POINTS


def give_room(config: Config, load: Load) -> Config:
    """Returns the configuration with room for every token of the load, in pool and queue."""
    with load.open_entries() as entries:
        sizes = [(entry.prompt_tokens or 0) + (entry.wanted_tokens or 0) for entry in entries]
    pages = sum(size // config.kv.page_size + 2 for size in sizes)
    config = change(config, "kv", num_pages=1 + pages)
    config = change(config, "model", max_model_tokens=max(sizes) + 1)
    return change(
        config, "limits",
        max_waiting_requests=ENDLESS, max_waiting_tokens=ENDLESS, queue_timeout_s=float(ENDLESS),
    )  # fmt: skip


def find_bound(prompts: Iterable[Prompt]) -> float:
    """Returns the share of prompt tokens in leading blocks that an earlier request had."""
    seen: set[object] = set()
    num_tokens = num_known = 0.0
    for ids, length, block_tokens in prompts:
        num_blocks = next((place for place, id in enumerate(ids) if id not in seen), len(ids))
        num_known += min(num_blocks * block_tokens, length)
        num_tokens += length
        seen.update(ids)
    return num_known / num_tokens


def read_trace(path: Path) -> list[Prompt]:
    """Returns the prompts as the trace has them, in the order in which they come."""
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: float(row["timestamp"]))
    return [(row["hash_ids"], row["input_length"], MOONCAKE_BLOCK_TOKENS) for row in rows]


def read_blocks(load: Load) -> Iterator[Prompt]:
    with load.open_entries() as entries:
        for entry in entries:
            recipe = entry.prompt
            assert isinstance(recipe, Recipe)
            yield recipe.blocks, recipe.num_tokens, recipe.block_tokens


def scale_trace(options: argparse.Namespace) -> Sequence[WorkloadEntry]:
    imported = import_trace(options.trace, "mooncake", Filling())
    scaling = Scaling(divide_lengths=options.divide)
    return list(scale_entries(imported.entries, scaling, counts=Counts()))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefix_cache",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="a trace of Mooncake's")
    add_machine_options(parser)
    parser.add_argument("--simulated", type=Path, metavar="STEP_TIMES", help="only in virtual time")
    parser.add_argument("--divide", type=int, default=16, help="lengths by this")
    parser.add_argument("--num-requests", type=int, default=40, help="of the live slice")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a request of it")
    parser.add_argument("--concurrency", type=int, default=1, help="live requests at a time")
    parser.add_argument("--repeats", type=int, default=3, help="live, of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
