"""Whether the simulator foresees live runs of three workloads, its times fitted on another one.

    python -m bench.simulation --out runs
    python -m bench.simulation --reuse runs

Fitted on `mixed`: closed loops that keep every row busy, of short requests and of all lengths, and
an open one in bursts, so that every program runs, at several lengths of its longest sequence. Then
`chat` (short prompts, Poisson), `summaries` (long prompts, short outputs, Poisson) and `assistants`
(four shared beginnings, in bursts) at 0.5, 0.8 and 1.2 times their capacity, which the simulator
says, each several times live. Limits are 4 times the unloaded ttft and 4 times the full batch's
inter-token time, as simulated: a step beside a whole chunk takes two to three times as long as one
without, so at 2 times goodput is all or nothing, by a few steps of a run. A prediction is the
median of simulations that differ in their jitter.

Wanted: goodput, p95 ttft and p95 inter-token time within 15 % of the live runs' median at 0.5 and
0.8; at 1.2 between their least and their most, 15 % allowed.

`--reuse` simulates again what a folder keeps the live runs of, for work on the simulator.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.replays import (
    Capacity,
    LiveMachine,
    VirtualMachine,
    add_machine_options,
    build_options,
    make_load,
    measure_capacity,
    read_seed,
    read_settings,
)
from jaxserve.config import Config
from jaxserve.measure.limits import read_limits
from jaxserve.measure.load import Load
from jaxserve.measure.result import RESULT_FILE, JsonObject, read_result
from jaxserve.measure.step_times import STEP_TIMES_FILE, read_step_times, write_step_times
from jaxserve.measure.workload.lengths import Lognormal, Uniform
from jaxserve.measure.workload.make import OpenLoop, PrefixGroups, PromptClass

PLAN_FILE: Final = "plan.json"
LOADS: Final = (0.5, 0.8, 1.2)
OVERLOAD: Final = 1.0  # above it a queue grows, and three live runs may differ much
WANTED: Final = 0.15
FIT_LOAD: Final = 0.9
NUM_SIMULATIONS: Final = 5
ITL_LIMIT: Final = 2.0  # times that of the capacity's limits, which is twice a full batch's


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Kind:
    """One kind of requests, and how they come."""

    classes: tuple[PromptClass, ...]
    burstiness: float = 1.0


FITTED: Final = Kind(
    classes=(
        PromptClass(
            prompt=Lognormal(median=80, sigma=0.8, most_tokens=400), output=Uniform(low=8, high=64)
        ),
    ),
    burstiness=0.5,
)
SHORT: Final = (PromptClass(prompt=Uniform(low=8, high=40), output=Uniform(low=8, high=40)),)
KINDS: Final = {
    "chat": Kind(
        classes=(
            PromptClass(
                prompt=Lognormal(median=40, sigma=0.6, most_tokens=160),
                output=Uniform(low=24, high=72),
            ),
        )
    ),
    "summaries": Kind(
        classes=(PromptClass(prompt=Uniform(low=160, high=400), output=Uniform(low=12, high=32)),)
    ),
    "assistants": Kind(
        classes=(
            PromptClass(
                prompt=Uniform(low=16, high=48),
                output=Uniform(low=16, high=48),
                prefix=PrefixGroups(num_groups=4, num_tokens=128),
            ),
        ),
        burstiness=0.4,
    ),
}
FIGURES: Final = {  # name → where it is in a result
    "goodput": ("goodput", "tokens_per_s"),
    "ttft p95": ("latency", "ttft", "p95"),
    "itl p95": ("latency", "itl", "p95"),
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Cell:
    """One workload at one load."""

    kind: str
    load: float
    rate: float
    seconds: float
    seed: int
    ttft_s: float
    itl_s: float

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.load:g}"

    def build_load(self) -> Load:
        kind = KINDS[self.kind]
        arrivals = OpenLoop(rate=self.rate, burstiness=kind.burstiness)
        return make_load(self.name, arrivals, kind.classes, seed=self.seed, duration_s=self.seconds)

    def limits(self) -> list[str]:
        return [f"ttft={self.ttft_s:.4f}", f"itl_p95={self.itl_s:.4f}"]


def main() -> int:
    options = read_options()
    folder = options.reuse or options.out
    config = read_settings(options)
    if not options.reuse:
        run_live(options, config, folder)
    cells = [Cell(**found) for found in json.loads((folder / PLAN_FILE).read_text())]
    machine = VirtualMachine(read_step_times(folder / STEP_TIMES_FILE))
    print(f"\n{'':>16}{'':>10}{'live':>9}{'least':>9}{'most':>9}{'simulated':>11}{'ratio':>7}")
    holds = True
    for cell in cells:
        load = cell.build_load()
        live = [read_result(path) for path in sorted(folder.glob(f"{cell.name}/*/{RESULT_FILE}"))]
        for result in live:
            if result["manifest"]["workload"]["hash"] != load.content_hash:
                raise SystemExit(f"{folder} keeps runs of another load than {cell.name} is now")
        foreseen = [
            simulate(machine, config, cell, load, number) for number in range(NUM_SIMULATIONS)
        ]
        holds &= tell(cell, live, foreseen)
    return 0 if holds else 1


def run_live(options: argparse.Namespace, config: Config, folder: Path) -> None:
    """Fits the step times, and keeps them and every live run."""
    seed = read_seed(options)
    folder.mkdir(parents=True, exist_ok=True)
    machine = LiveMachine(options.model, config)
    began_s = time.monotonic()
    short = measure_capacity(machine, config, SHORT, seed=seed)
    fitted = measure_capacity(machine, config, FITTED.classes, seed=seed)
    print(f"short: {short}\nmixed: {fitted}", flush=True)
    arrivals = OpenLoop(rate=FIT_LOAD * fitted.requests_per_s, burstiness=FITTED.burstiness)
    load = make_load("mixed", arrivals, FITTED.classes, seed=seed, duration_s=options.fit_seconds)
    machine.replay(load, config, build_options(fitted.limits, seed=seed), folder=folder / "mixed")
    served = machine.read_times()
    write_step_times(served, folder / STEP_TIMES_FILE)
    cells = plan_cells(
        options, config, VirtualMachine(read_step_times(folder / STEP_TIMES_FILE)), seed
    )
    plan = [dataclasses.asdict(cell) for cell in cells]
    (folder / PLAN_FILE).write_text(json.dumps(plan, indent=1) + "\n")
    for number in range(options.repeats):  # each round has all cells: a drift spreads over them
        for cell in cells:
            result = machine.replay(
                cell.build_load(),
                config,
                build_options(read_limits(cell.limits()), seed=seed + number),
                folder=folder / cell.name / str(number),
            )
            print(f"{time.monotonic() - began_s:>6.0f} s  {cell.name} {number + 1}: "
                  f"{describe(result)}", flush=True)  # fmt: skip


def plan_cells(
    options: argparse.Namespace, config: Config, machine: VirtualMachine, seed: int
) -> list[Cell]:
    """Returns what is measured; capacities and limits are as simulated."""
    cells = []
    for name in options.kind or KINDS:
        found: Capacity = measure_capacity(machine, config, KINDS[name].classes, seed=seed)
        print(f"{name}: {found}", flush=True)
        cells += [
            Cell(
                kind=name, load=load, rate=load * found.requests_per_s, seconds=options.seconds,
                seed=seed, ttft_s=round(found.ttft_s, 4), itl_s=round(ITL_LIMIT * found.itl_s, 4),
            )
            for load in options.load or LOADS
        ]  # fmt: skip
    return cells


def simulate(
    machine: VirtualMachine, config: Config, cell: Cell, load: Load, number: int
) -> JsonObject:
    options = build_options(read_limits(cell.limits()), seed=cell.seed + number)
    return machine.replay(load, config, options)


def tell(cell: Cell, live: Sequence[JsonObject], foreseen: Sequence[JsonObject]) -> bool:
    """Prints a row a figure; returns whether all are as wanted."""
    holds = True
    for name, path in FIGURES.items():
        values = [read(result, path) for result in live]
        middle, low, high = statistics.median(values), min(values), max(values)
        value = statistics.median(read(result, path) for result in foreseen)
        if cell.load > OVERLOAD:
            is_in = low * (1 - WANTED) <= value <= high * (1 + WANTED)
        else:
            is_in = abs(value / middle - 1) <= WANTED if middle else not value
        holds &= is_in
        ratio = f"{value / middle:.2f}" if middle else "–"
        print(
            f"{cell.name:>16}{name:>10}{middle:>9.3f}{low:>9.3f}{high:>9.3f}{value:>11.3f}"
            f"{ratio:>7}  {'in' if is_in else 'OUT'}",
            flush=True,
        )
    return holds


def describe(result: JsonObject) -> str:
    return ", ".join(f"{name} {read(result, path):.3f}" for name, path in FIGURES.items())


def read(result: JsonObject, path: Sequence[str]) -> float:
    found: Any = result
    for key in path:
        found = found[key]
    return 0.0 if found is None else float(found)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation", description=(__doc__ or "").partition("\n")[0]
    )
    add_machine_options(parser)
    parser.add_argument("--out", type=Path, default=Path("simulation-runs"), metavar="DIR",
                        help="keeps the live runs (default: %(default)s)")  # fmt: skip
    parser.add_argument("--reuse", type=Path, metavar="DIR", help="of an earlier --out")
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), help="(default: all)")
    parser.add_argument("--load", action="append", type=float, metavar="X", help="(default: "
                        f"{', '.join(f'{load:g}' for load in LOADS)})")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="live, of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each (default: 45)")
    parser.add_argument("--fit-seconds", type=float, default=90.0, help="(default: 90)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
