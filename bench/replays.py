"""Replays one after the other on one model: in this process, or in virtual time."""

import argparse
import asyncio
import copy
import dataclasses
import functools
import itertools
import math
import secrets
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from jaxserve.cli.bench.run import now
from jaxserve.config import Config, load_config
from jaxserve.engine import Engine
from jaxserve.engine.interpreter import tune_interpreter
from jaxserve.engine.machine import read_devices
from jaxserve.engine.start import load_engine
from jaxserve.measure.bench import Bench
from jaxserve.measure.bench_options import BenchOptions, Served
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.load import Load, load_memory
from jaxserve.measure.request_lines import REQUESTS_FILE, RequestWriter
from jaxserve.measure.result import RESULT_FILE, JsonObject, write_result
from jaxserve.measure.simulate import Simulator
from jaxserve.measure.step_times import ServedTimes, read_engine
from jaxserve.measure.targets.base import Ask
from jaxserve.measure.targets.in_process import InProcessTarget
from jaxserve.measure.workload import Header, WorkloadEntry
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.lengths import Uniform
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop, PromptClass, make_entries

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
TTFT_FACTOR, ITL_FACTOR = 4.0, 2.0
UNLOADED_REQUESTS: Final = 24
WINDOW_SAMPLES: Final = 5  # of a timeline, a second each
FULL_BATCHES: Final = 6  # requests of the closed loop that finds the capacity, by rows
STALL_S, MAX_TRIES = 3.0, 3
TenantOf = Callable[[Ask], str]


class Machine(Protocol):
    """What replays a load under a configuration; each replay begins idle, with an empty cache."""

    def replay(
        self,
        load: Load,
        config: Config,
        options: BenchOptions,
        *,
        tenant_of: TenantOf | None = None,
        folder: Path | None = None,
    ) -> JsonObject:
        """Returns the result; `folder` gets it too, and a line a request."""


class LiveMachine:
    """A model that is loaded once. Each replay has an engine of its own on it, which knows the step
    times of those before; so a configuration may differ from the first in all but what the runner
    is made of: model, pool, rows, buckets. A replay during which the machine stood still, as a
    virtual one does while its host is busy, is said and done again.
    """

    def __init__(self, model: str, config: Config) -> None:
        tune_interpreter(config.scheduler.max_seqs)
        self._engine = load_engine(model, config)

    def replay(
        self,
        load: Load,
        config: Config,
        options: BenchOptions,
        *,
        tenant_of: TenantOf | None = None,
        folder: Path | None = None,
    ) -> JsonObject:
        for _ in range(MAX_TRIES):
            engine = self.start(config)
            try:
                bench = Bench(
                    target=InProcessTarget(engine, tenant_of=tenant_of),
                    load=load,
                    options=options,
                    served=Served(
                        config=config.model_dump(mode="json"),
                        hardware={"devices": len(read_devices())},
                        is_fresh=True,
                        is_local=True,
                    ),
                )
                result = _keep(folder, bench, functools.partial(_run, bench))
            finally:
                engine.stop()
            stall_s = find_stall_s(result)
            if stall_s < STALL_S:
                break
            print(f"{load.header.name}: the machine stood still for {stall_s:.1f} s", flush=True)
        return result

    def start(self, config: Config) -> Engine:
        """Returns the next engine, which takes requests; whoever asks stops it."""
        self._engine = self._engine.follow(config)
        self._engine.start()
        return self._engine

    def read_times(self) -> ServedTimes:
        """Returns what is known of steps now."""
        times = read_engine(self._engine, platform=str(read_devices()[0]["platform"]))
        return dataclasses.replace(times, times=copy.deepcopy(times.times))


def _run(bench: Bench) -> JsonObject:
    return asyncio.run(bench.run(date=now()))


def find_stall_s(result: JsonObject) -> float:
    """Returns the longest time that nobody looked at the clock, who does so each second."""
    times = [0.0, *(sample["time_s"] for sample in result["timeline"]), result["duration"]]
    longest_s: float = max(later - before for before, later in itertools.pairwise(times))
    return longest_s


class VirtualMachine:
    """The scheduler in virtual time, by step times that were measured."""

    def __init__(self, served: ServedTimes) -> None:
        self._served = served

    def replay(
        self,
        load: Load,
        config: Config,
        options: BenchOptions,
        *,
        tenant_of: TenantOf | None = None,
        folder: Path | None = None,
    ) -> JsonObject:
        tune_interpreter(config.scheduler.max_seqs)
        simulator = Simulator(
            load=load,
            config=config,
            served=self._served,
            options=options,
            tenant_of=tenant_of,
        )
        return _keep(folder, simulator, lambda: simulator.run(date=now()))


def _keep(
    folder: Path | None, replay: Bench | Simulator, run: Callable[[], JsonObject]
) -> JsonObject:
    if folder is None:
        return run()
    folder.mkdir(parents=True, exist_ok=True)
    with RequestWriter(folder / REQUESTS_FILE) as writer:
        replay.writer = writer
        result = run()
    write_result(result, folder / RESULT_FILE)
    return result


def build_load(
    name: str,
    arrivals: OpenLoop | ClosedLoop,
    entries: Iterable[WorkloadEntry],
    *,
    seed: int,
) -> Load:
    """Returns a load of entries that were made for these arrivals."""
    is_open = isinstance(arrivals, OpenLoop)
    header = Header(
        name=name,
        arrivals="open" if is_open else "closed",
        concurrency=None if isinstance(arrivals, OpenLoop) else arrivals.concurrency,
        seed=seed,
        source="jaxserve/bench",
        parameters={"burstiness": arrivals.burstiness} if isinstance(arrivals, OpenLoop) else {},
    )
    return load_memory(build_workload(header, entries))


def make_load(
    name: str,
    arrivals: OpenLoop | ClosedLoop,
    classes: Sequence[PromptClass],
    *,
    seed: int,
    num_requests: int | None = None,
    duration_s: float = math.inf,
) -> Load:
    """Returns a load of made-up requests; the same arguments give the same ones."""
    entries = make_entries(
        arrivals, classes, seed=seed, num_requests=num_requests, duration_s=duration_s
    )
    return build_load(name, arrivals, entries, seed=seed)


def build_options(limits: Limits, *, seed: int, max_drain_s: float | None = None) -> BenchOptions:
    return BenchOptions(
        limits=limits,
        seed=seed,
        max_drain_s=max_drain_s,
        sampling={"temperature": 0.0},
    )


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Capacity:
    """What a machine does of one kind of request, and what is promised by it.

    Attributes:
      requests_per_s, tokens_per_s: with all rows busy.
      unloaded_ttft_s: median, of one request at a time.
      full_itl_s: median, with all rows busy.
    """

    requests_per_s: float
    tokens_per_s: float
    unloaded_ttft_s: float
    full_itl_s: float

    @property
    def ttft_s(self) -> float:
        """The limit to a first token."""
        return TTFT_FACTOR * self.unloaded_ttft_s

    @property
    def itl_s(self) -> float:
        """The limit between two tokens, for 95 of 100 of a request's."""
        return ITL_FACTOR * self.full_itl_s

    @property
    def limits(self) -> Limits:
        return read_limits([f"ttft={self.ttft_s:.4f}", f"itl_p95={self.itl_s:.4f}"])

    def deadline_s(self, num_tokens: int) -> float:
        """Returns when the last of so many tokens is due that keep the limits."""
        return self.ttft_s + (num_tokens - 1) * self.itl_s

    def __str__(self) -> str:
        return (
            f"capacity {self.requests_per_s:.2f} requests/s, {self.tokens_per_s:.0f} tokens/s; "
            f"unloaded ttft p50 {1e3 * self.unloaded_ttft_s:.0f} ms, full-batch itl p50 "
            f"{1e3 * self.full_itl_s:.0f} ms; limits ttft={self.ttft_s:.3f} "
            f"itl_p95={self.itl_s:.3f}"
        )


def measure_capacity(
    machine: Machine, config: Config, classes: Sequence[PromptClass], *, seed: int
) -> Capacity:
    """Measures one request at a time, then a closed loop that keeps every row busy."""
    rows = config.scheduler.max_seqs
    options = build_options(read_limits([]), seed=seed)
    alone = make_load("alone", ClosedLoop(concurrency=1), _cut(classes), seed=seed,
                      num_requests=UNLOADED_REQUESTS)  # fmt: skip
    full = make_load("full", ClosedLoop(concurrency=rows), classes, seed=seed,
                     num_requests=FULL_BATCHES * rows)  # fmt: skip
    unloaded = machine.replay(alone, config, options)
    loaded = machine.replay(full, config, options)
    tokens_per_s = _steady_rate(loaded, rows)
    with full.open_entries() as entries:
        wanted = [entry.wanted_tokens or 1 for entry in entries]
    return Capacity(
        requests_per_s=tokens_per_s * len(wanted) / sum(wanted),
        tokens_per_s=tokens_per_s,
        unloaded_ttft_s=unloaded["latency"]["ttft"]["p50"],
        full_itl_s=loaded["latency"]["itl"]["p50"],
    )


def _cut(classes: Sequence[PromptClass]) -> list[PromptClass]:
    """Returns the classes with outputs of two tokens: only their first is of interest."""
    return [dataclasses.replace(one, output=Uniform(low=2, high=2)) for one in classes]


def _steady_rate(result: JsonObject, rows: int) -> float:
    """Returns the tokens a second while every row was busy: the median of windows, so that a stall
    of the machine is in none but its own. The first are left out, as all prompts come at once."""
    full = [sample for sample in result["timeline"] if sample["in_flight"] >= rows]
    full = full[len(full) // 4 :]
    rates: list[float] = [
        (last["output_tokens"] - first["output_tokens"]) / (last["time_s"] - first["time_s"])
        for first, last in zip(full, full[WINDOW_SAMPLES:], strict=False)
    ]
    if not rates:
        rates = [result["goodput"]["raw_tokens_per_s"]]
    return statistics.median(rates)


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the model, its configuration and the seed."""
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="may be repeated"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="(default: a fresh one)")


def read_settings(options: argparse.Namespace) -> Config:
    """Returns the configuration that the options give."""
    chosen: dict[str, object] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        chosen[name] = value
    return load_config(options.config, flags=chosen)


def read_seed(options: argparse.Namespace) -> int:
    """Returns the seed, and prints it."""
    seed: int = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}")
    return seed


def change(config: Config, section: str, **values: object) -> Config:
    """Returns the configuration with other values in one section."""
    found = getattr(config, section)
    changed = type(found).model_validate({**found.model_dump(), **values})
    return config.model_copy(update={section: changed})
