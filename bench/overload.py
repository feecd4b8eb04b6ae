"""Goodput at and beyond capacity, by scheduling policy: what was promised is fixed first.

    python -m bench.overload
    python -m bench.overload --policy edf --policy fcfs --load 1 --load 3 --seconds 30
    python -m bench.overload --simulated live/step_times.json --seconds 300 --plot overload.html

Capacity, limits and cells are of one run: the tokens a second with every row busy; ttft within 4
times the unloaded median, and 95 of 100 inter-token times of a request within twice the median with
every row busy. Requests come at a multiple of the capacity, Poisson or in bursts (gamma gaps), the
same for every policy. Each has the deadline that follows from the limits, and the limits are the
server's queue timeout and its target between tokens; a refused one does not come again. What
policies are told beside: `priority` a class, each third of the requests being of one; `fair` a
tenant, likewise. `untold` is fcfs, and nobody tells it limits or deadlines.

Wanted: with edf at the highest load, at least 90 % of the best goodput of any policy at any load.
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from bench.replays import (
    Capacity,
    LiveMachine,
    Machine,
    VirtualMachine,
    add_machine_options,
    build_load,
    build_options,
    change,
    measure_capacity,
    read_seed,
    read_settings,
)
from jaxserve.config import Config
from jaxserve.measure.load import Load
from jaxserve.measure.report.figures import Axis, LineFigure, Rule, Section, Series, Table
from jaxserve.measure.report.page import build_plain_page
from jaxserve.measure.report.scales import nice_top, say, say_share
from jaxserve.measure.result import JsonObject
from jaxserve.measure.step_times import read_step_times
from jaxserve.measure.workload.lengths import Uniform
from jaxserve.measure.workload.make import OpenLoop, PromptClass, make_entries

Policy = Literal["untold", "fcfs", "priority", "fair", "edf"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
BURSTINESS: Final = {"poisson": 1.0, "bursty": 0.25}
LOADS: Final = (0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 3.0)
WANTED: Final = 0.9
PROMPT, OUTPUT = Uniform(low=16, high=64), Uniform(low=24, high=72)
CLASSES: Final = tuple(
    PromptClass(name=name, prompt=PROMPT, output=OUTPUT, priority=priority)
    for priority, name in enumerate(("low", "middle", "high"))
)

Cells = dict[tuple[str, Policy, float], JsonObject]  # by arrivals, policy and load


def main() -> int:
    options = read_options()
    seed = read_seed(options)
    config = read_settings(options)
    machine: Machine
    if options.simulated:
        machine = VirtualMachine(read_step_times(options.simulated))
    else:
        machine = LiveMachine(options.model, config)
    capacity = measure_capacity(machine, config, CLASSES, seed=seed)
    print(capacity, flush=True)
    cells: Cells = {}
    for arrivals in options.arrivals or BURSTINESS:
        for load in options.load or LOADS:
            for policy in options.policy or POLICIES:
                folder = options.out and options.out / f"{arrivals}-{load:g}-{policy}"
                cell = measure(
                    machine, config, capacity, arrivals=arrivals, policy=policy,
                    rate=load * capacity.requests_per_s, seconds=options.seconds, seed=seed,
                    folder=folder,
                )  # fmt: skip
                cells[arrivals, policy, load] = cell
                print(describe(arrivals, policy, load, cell), flush=True)
    holds = tell(cells)
    if options.plot:
        page = build_plain_page("Goodput under overload", [str(capacity)], [build_section(cells)])
        options.plot.write_text(page)
        print(f"page {options.plot}")
    return 0 if holds else 1


def measure(
    machine: Machine,
    config: Config,
    capacity: Capacity,
    *,
    arrivals: str,
    policy: Policy,
    rate: float,
    seconds: float,
    seed: int,
    folder: Path | None,
) -> JsonObject:
    """Returns the result of one cell."""
    load = make_requests(
        capacity, policy, OpenLoop(rate=rate, burstiness=BURSTINESS[arrivals]),
        seconds=seconds, seed=seed,
    )  # fmt: skip
    if policy == "untold":
        config = change(config, "scheduler", policy="fcfs")
    else:
        config = change(config, "scheduler", policy=policy, target_itl_s=capacity.itl_s)
        config = change(config, "limits", queue_timeout_s=capacity.ttft_s)
    longest_s = capacity.deadline_s(OUTPUT.high)
    return machine.replay(
        load,
        config,
        build_options(capacity.limits, seed=seed, max_drain_s=longest_s),
        tenant_of=(lambda ask: ask.prompt_class) if policy == "fair" else None,
        folder=folder,
    )


def make_requests(
    capacity: Capacity, policy: Policy, arrivals: OpenLoop, *, seconds: float, seed: int
) -> Load:
    """Returns the same requests for every policy, with what it is told of them."""
    entries = (
        dataclasses.replace(
            entry,
            priority=entry.priority if policy == "priority" else 0,
            deadline_s=None
            if policy == "untold"
            else round(capacity.deadline_s(entry.wanted_tokens or 1), 6),
        )
        for entry in make_entries(arrivals, CLASSES, seed=seed, duration_s=seconds)
    )
    return build_load("overload", arrivals, entries, seed=seed)


def describe(arrivals: str, policy: Policy, load: float, cell: JsonObject) -> str:
    """Returns a line about one cell."""
    goodput, latency, outcomes = cell["goodput"], cell["latency"], cell["outcomes"]
    met = {limit: share["share"] for limit, share in cell["attainment"]["all"]["limits"].items()}
    shares = " ".join(
        f"{limit.partition('=')[0]} {100 * share:.0f} %" for limit, share in met.items()
    )
    return (
        f"{arrivals:>8} {load:>5g} {policy:>9} goodput {goodput['tokens_per_s']:>6.1f} raw "
        f"{goodput['raw_tokens_per_s']:>6.1f} tokens/s; met by {100 * goodput['attainment']:.0f} % "
        f"({shares}); sent {outcomes['sent']} ok {outcomes['ok']} refused {outcomes['refused']} "
        f"late {outcomes['timed_out'] + outcomes['cancelled']}; ttft p95 "
        f"{latency['ttft']['p95'] or 0:.2f} s, itl p95 {latency['itl']['p95'] or 0:.3f} s"
    )


def goodput(cell: JsonObject) -> float:
    found: float = cell["goodput"]["tokens_per_s"]
    return found


def by_arrivals(cells: Cells) -> Mapping[str, Mapping[tuple[Policy, float], JsonObject]]:
    found: dict[str, dict[tuple[Policy, float], JsonObject]] = collections.defaultdict(dict)
    for (arrivals, policy, load), cell in cells.items():
        found[arrivals][policy, load] = cell
    return found


def tell(cells: Cells) -> bool:
    """Prints the tables; returns whether edf keeps what is wanted of it."""
    holds = True
    for arrivals, some in by_arrivals(cells).items():
        loads = sorted({load for _, load in some})
        policies = list(dict.fromkeys(policy for policy, _ in some))
        best = max(some, key=lambda key: goodput(some[key]))
        print(f"\n{arrivals}: goodput, tokens/s (share of requests that met all limits)")
        print(f"{'policy':>9}" + "".join(f"{f'{load:g}x':>16}" for load in loads))
        for policy in policies:
            row = (some[policy, load] for load in loads)
            print(
                f"{policy:>9}"
                + "".join(
                    f"{goodput(cell):>9.1f} ({100 * cell['goodput']['attainment']:>3.0f}%)"
                    for cell in row
                )
            )
        peak = goodput(some[best])
        print(f"best: {peak:.1f} with {best[0]} at {best[1]:g}x")
        if "edf" in policies:
            share = goodput(some["edf", loads[-1]]) / peak if peak else 0.0
            holds &= share >= WANTED
            print(f"edf at {loads[-1]:g}x: {100 * share:.1f} % of it (wanted: {100 * WANTED:g} %)")
    return holds


def build_section(cells: Cells) -> Section:
    """Returns a figure for each kind of arrivals."""
    figures = []
    for arrivals, some in by_arrivals(cells).items():
        loads = sorted({load for _, load in some})
        policies = list(dict.fromkeys(policy for policy, _ in some))
        peak = max(map(goodput, some.values()))
        figures.append(
            LineFigure(
                key=f"overload-{arrivals}",
                title=f"Goodput by offered load, {arrivals}",
                about="Output tokens per second of requests that met both limits, by the load as a "
                "multiple of the capacity. The upright rule is the capacity.",
                x=Axis(label="offered load / capacity", low=0, high=loads[-1], ticks=loads),
                y=Axis(label="output tokens/s", low=0, high=nice_top(peak)),
                series=[
                    Series(
                        name=policy,
                        points=[(load, goodput(some[policy, load])) for load in loads],
                        shape="dots",
                    )
                    for policy in policies
                ],
                rules=[
                    Rule(label="capacity", value=1.0),
                    Rule(label=f"{100 * WANTED:g} % of the best", value=WANTED * peak, axis="y"),
                ],
                table=Table(
                    head=("load", *policies),
                    rows=[
                        [
                            f"{load:g}",
                            *(
                                f"{say(goodput(some[policy, load]))} tokens/s, "
                                f"{say_share(some[policy, load]['goodput']['attainment'])}"
                                for policy in policies
                            ),
                        ]
                        for load in loads
                    ],
                ),
            )
        )
    return Section(key="overload", title="At and beyond capacity", figures=figures)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload",
        description=(__doc__ or "").partition("\n")[0],
    )
    add_machine_options(parser)
    parser.add_argument(
        "--simulated", type=Path, metavar="STEP_TIMES", help="in virtual time, by these step times"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="(default: all)")
    parser.add_argument(
        "--load", action="append", type=float, metavar="X",
        help=f"times the capacity (default: {', '.join(f'{load:g}' for load in LOADS)})",
    )  # fmt: skip
    parser.add_argument(
        "--arrivals", action="append", choices=tuple(BURSTINESS), help="(default: both)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each cell's arrivals")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keeps every cell's result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes a page with figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
