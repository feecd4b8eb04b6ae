"""Whether scraping the metrics costs throughput: one load, with 0 and with 1,000 scrapes meanwhile.

    .venv/bin/python bench/metrics_scrape.py
    .venv/bin/python bench/metrics_scrape.py --repeats 6 --seqs 16 --tokens 256

On two cores the defaults take about ten minutes. Scrapes take a processor's time (docs/metrics.md),
so on a CPU backend give the load a minute or so; with nothing else on the machine, or the noise is
that of the others.

One engine in this process with the endpoint of `jaxserve serve --metrics-port`, and eight scrapers
in another process of the same machine. A repeat runs the load once without and once with scrapes,
spread over it; which comes first alternates. The noise is how far runs of one kind lie apart: the
ratio of the means says something only where it is farther from 1 than the noise.
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from jaxserve import LLM
from jaxserve.config import MetricsSection, load_config
from jaxserve.request import SamplingParams
from jaxserve.server.metrics_http import MetricsEndpoint

NUM_SCRAPES = 1000
PROMPT_LEN = 32
NUM_SCRAPERS = 8  # at once
SLACK = 0.9  # of the load's time: all scrapes are over before it is


def main() -> int:
    options = read_options()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with (
        LLM(options.model, load_config(options.config)) as llm,
        MetricsEndpoint(llm.engine.metrics, MetricsSection(port=0)) as endpoint,
    ):
        scraper = context.Process(target=scrape_on_demand, args=(endpoint.port, there), daemon=True)
        scraper.start()
        load = Load(llm, num_seqs=options.seqs, num_tokens=options.tokens)
        seconds = load.run()  # programs and caches are warm
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * options.repeats):
            is_scraped = number % 4 in (1, 2)  # without, with, with, without
            if is_scraped:
                here.send(SLACK * seconds / NUM_SCRAPES)
            started_s = time.monotonic()
            taken_s = load.run()
            rates[is_scraped].append(load.num_tokens / taken_s)
            if is_scraped:
                tell_scrapes(here.recv(), started_s=started_s, ended_s=started_s + taken_s)
            print(f"{'with' if is_scraped else 'none':4} {rates[is_scraped][-1]:8.1f} tokens/s")
        here.send(None)
        scraper.join()
    return report(rates)


class Load:
    """The same greedy requests each time."""

    def __init__(self, llm: LLM, *, num_seqs: int, num_tokens: int) -> None:
        self.num_tokens = num_seqs * num_tokens
        self._llm = llm
        self._prompts = [
            [(n * 37 + place * 11) % 1000 + 5 for place in range(PROMPT_LEN)]
            for n in range(num_seqs)
        ]
        self._params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run(self) -> float:
        """Returns the seconds it took."""
        started_s = time.monotonic()
        done = self._llm.generate(self._prompts, self._params)
        seconds = time.monotonic() - started_s
        assert sum(len(one.token_ids) for one in done) == self.num_tokens
        return seconds


def scrape_on_demand(port: int, orders: Connection) -> None:
    """The scraper's process: for each interval it is sent, sends the start and end of each scrape
    and the bytes that came; a scrape that fails ends it."""
    with ThreadPoolExecutor(NUM_SCRAPERS) as pool:
        while (interval_s := orders.recv()) is not None:
            started_s = time.monotonic()
            due_s = [started_s + number * interval_s for number in range(NUM_SCRAPES)]
            orders.send(list(pool.map(lambda at_s: scrape(port, at_s), due_s)))


def scrape(port: int, at_s: float) -> tuple[float, float, int]:
    """Returns when it began and ended, and its bytes. By hand: a client library's work would take
    as much of this machine as the answer does."""
    time.sleep(max(0.0, at_s - time.monotonic()))
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    if not (answer.startswith(b"HTTP/1.0 200 ") and answer.endswith(b"\n")):
        raise RuntimeError(f"a scrape failed: {answer[:80]!r}")
    return begun_s, time.monotonic(), len(answer)


def tell_scrapes(
    scrapes: list[tuple[float, float, int]], *, started_s: float, ended_s: float
) -> None:
    times_ms = [1000 * (end_s - begun_s) for begun_s, end_s, _ in scrapes]
    num_meanwhile = sum(begun_s >= started_s and end_s <= ended_s for begun_s, end_s, _ in scrapes)
    print(
        f"     {len(scrapes)} scrapes, {num_meanwhile} of them during the load, none failed; "
        f"median {statistics.median(times_ms):.1f} ms, most {max(times_ms):.1f} ms, "
        f"{scrapes[-1][2] / 1024:.0f} KiB"
    )


def report(rates: dict[bool, list[float]]) -> int:
    """Prints the ratio and the noise; returns the exit code."""
    means = {kind: statistics.mean(some) for kind, some in rates.items()}
    ratio = means[True] / means[False]
    noise = max(max(some) / min(some) - 1 for some in rates.values())
    error = sum(
        (statistics.stdev(some) / statistics.mean(some)) ** 2 / len(some) for some in rates.values()
    )
    print(
        f"tokens/s without {means[False]:.1f}, with {NUM_SCRAPES} scrapes {means[True]:.1f}: "
        f"ratio {ratio:.3f} ± {error**0.5:.3f} (standard error); "
        f"runs of one kind differ by up to {100 * noise:.1f} %"
    )
    is_within = abs(ratio - 1) <= noise
    print("within the noise" if is_within else "NOT within the noise")
    return 0 if is_within else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--repeats", type=int, default=4, help="runs of each kind (even, ≥ 2)")
    parser.add_argument("--seqs", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
