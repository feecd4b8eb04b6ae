"""The time to the first token of a long prompt that returns: computed, from the pool, from host.

    python -m bench.host_tier [--model PATH] [--tokens 256 512 1024] [--repeats 7]

One engine, whose pool holds one such prompt and little more. A prompt is asked for, and asked for
again in each of three ways, which take turns: nothing is left of it (the cache was flushed), its
pages are in the pool, or others took the pool since and its pages are in host memory. Prints the
medians and their ratios, and what start-up measured of the copies.
"""

import argparse
import dataclasses
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final, Literal

from bench.replays import DEFAULT_MODEL
from jaxserve.config import Config, load_config
from jaxserve.engine import Delta, Engine, Started
from jaxserve.engine.start import load_engine
from jaxserve.request import GenerationRequest, SamplingParams

MIB: Final = 1 << 20
VOCAB: Final = 40_000  # ordinary tokens
MAX_TOKENS: Final = 2

Way = Literal["computed", "pool", "host"]
WAYS: Final[tuple[Way, ...]] = ("computed", "pool", "host")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Answer:
    """What came of one request."""

    ttft_s: float
    num_cached: int
    token_ids: tuple[int, ...]


class Bench:
    """An engine and its prompts, which are never the same twice unless they are to be."""

    def __init__(self, engine: Engine, *, seed: int) -> None:
        self.engine = engine
        self._rng = random.Random(seed)
        self._page_size = engine.config.kv.page_size

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(1000, VOCAB) for _ in range(num_tokens))

    def ask(self, prompt: Sequence[int]) -> Answer:
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        started_s = time.monotonic()
        ttft_s, num_cached = 0.0, 0
        token_ids: list[int] = []
        for event in self.engine.submit(GenerationRequest(prompt=tuple(prompt), sampling=sampling)):
            if isinstance(event, Started):
                num_cached = event.cached_prompt_tokens
            if isinstance(event, Delta):
                ttft_s = ttft_s or time.monotonic() - started_s
                token_ids += event.token_ids
        return Answer(ttft_s=ttft_s, num_cached=num_cached, token_ids=tuple(token_ids))

    def return_by(self, way: Way, num_tokens: int) -> Answer:
        """Returns the second answer to a new prompt, prepared that way."""
        prompt = self.prompt(num_tokens + 1)  # the last token is computed always
        first = self.ask(prompt)
        match way:
            case "computed":
                self.engine.flush_prefix_cache().result()
            case "host":
                self.push_out()
        second = self.ask(prompt)
        if second.token_ids != first.token_ids:
            sys.exit(f"{way}: {second.token_ids} after {first.token_ids}")
        if (second.num_cached > 0) is (way == "computed"):
            sys.exit(f"{way}: {second.num_cached} of {num_tokens} tokens were cached")
        return second

    def push_out(self) -> None:
        """Has other prompts take every page of the pool."""
        free = (self.engine.num_pages - 1) * self._page_size
        longest = self.engine.model.max_model_tokens - MAX_TOKENS
        while free > 0:
            self.ask(self.prompt(min(longest, max(free, self._page_size))))
            free -= longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("jaxserve.runner.swaps").setLevel(logging.INFO)
    engine = load_engine(options.model, build_config(max(options.tokens)))
    engine.start()
    metrics = engine.metrics
    bench = Bench(engine, seed=options.seed)
    print(f"{'tokens':>7} {'computed':>9} {'pool':>9} {'host':>9}   ms; by computed: pool, host")
    for num_tokens in options.tokens:
        for way in WAYS:  # the first of each is not counted
            bench.return_by(way, num_tokens)
        found: dict[Way, list[float]] = {way: [] for way in WAYS}
        for number in range(options.repeats):
            turns: tuple[Way, ...] = (*WAYS[number % 3 :], *WAYS[: number % 3])
            for way in turns:
                found[way].append(bench.return_by(way, num_tokens).ttft_s)
        medians = {way: statistics.median(seconds) for way, seconds in found.items()}
        cells = " ".join(f"{1000 * medians[way]:9.1f}" for way in WAYS)
        pool, host = (medians[way] / medians["computed"] for way in ("pool", "host"))
        print(f"{num_tokens:7} {cells}   {pool:.3f} {host:.3f}", flush=True)
    for direction in ("out", "in"):
        pages = metrics.value(f"host_tier_pages_{direction}_total")
        num_bytes = metrics.value(f"host_tier_bytes_{direction}_total")
        print(f"pages {direction}: {pages:.0f}, {num_bytes / MIB:.0f} MiB")
    engine.stop()


def build_config(num_tokens: int) -> Config:
    """Returns the defaults with a pool for one prompt of so many tokens, and room in host memory
    for many."""
    page_size = Config().kv.page_size
    num_pages = 1 + -(-(num_tokens + 4 * page_size) // page_size)
    return load_config(
        flags={
            "kv.num_pages": num_pages,
            "model.max_model_tokens": num_tokens + 2 * page_size,
            "scheduler.max_seqs": 4,
            "buckets.decode_seqs": (4,),
            "buckets.chunk_decode_seqs": (4,),
            "host_tier.enabled": True,
        }
    )


if __name__ == "__main__":
    main()
