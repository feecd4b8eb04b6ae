"""`jaxserve bench sweep`: the highest load that still keeps its promise."""

import argparse
import dataclasses
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.bench.options import (
    LIMITS_HELP,
    add_replay_options,
    check_target,
    read_all_limits,
    read_bench_options,
    read_load,
    read_seed,
)
from jaxserve.cli.bench.progress import BenchProgress
from jaxserve.cli.bench.run import now, open_folder
from jaxserve.cli.bench.session import run_against
from jaxserve.cli.bench.table import summarize_sweep
from jaxserve.cli.workload.options import check
from jaxserve.errors import ConfigError
from jaxserve.measure.bench import Bench
from jaxserve.measure.bench_options import Served
from jaxserve.measure.report import SWEEP_FILE, write_report
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.result import JsonObject, write_result
from jaxserve.measure.sweep import Search, build_sweep, find_highest
from jaxserve.measure.targets import Target

EPILOG: Final = f"""\
examples:
  jaxserve bench sweep --workload w.jsonl --limit ttft=0.5 --limit itl_p95=0.1
  jaxserve bench sweep --rate 1 --limit e2e=10 --attainment 0.9 --resolution 0.1

The workload's rate is scaled: doubled or halved until one point attains and
one does not, then the middle of the two is taken until they are within the
resolution. Prompts are new at each point. DIR gets {SWEEP_FILE}, a page of
figures and a result for each point.

{LIMITS_HELP}
Exit code 1: no load attained it.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "sweep",
        help="find the highest load that still meets the limits",
        description="Find the highest load at which enough requests meet the limits.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_replay_options(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--attainment",
        type=float,
        default=0.95,
        metavar="P",
        help="share of requests that must meet every limit (default: 0.95)",
    )
    group.add_argument(
        "--start", type=float, default=1.0, metavar="X", help="first scale (default: 1)"
    )
    group.add_argument(
        "--resolution",
        type=float,
        default=0.05,
        metavar="R",
        help="relative width of the answer, at most (default: 0.05)",
    )
    group.add_argument(
        "--max-points", type=int, default=16, metavar="N", help="at most (default: 16)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures point by point; returns the exit code."""
    check_target(options)
    search = _read_search(options)
    seed = read_seed(options)
    load = read_load(options, seed=seed)
    limits = read_all_limits(options, load)
    if not limits.common and not limits.classes:
        raise ConfigError("a sweep needs a limit to meet; give --limit, such as --limit ttft=0.5")
    read_bench_options(options, load, seed=seed, rate_scale=search.start)  # before anything runs
    date = now()
    folder = open_folder(options.out or Path(f"sweep-{date[:19].replace(':', '')}"), options)
    results: list[JsonObject] = []
    files: list[str] = []

    async def work(target: Target, served: Served) -> JsonObject:
        async def measure(scale: float) -> float:
            name = f"point-{len(results) + 1:02d}"
            point = read_bench_options(options, load, seed=seed + len(results), rate_scale=scale)
            if served.is_fresh:  # no earlier run, and each point has a seed of its own
                point = dataclasses.replace(point, is_seed_chosen=False)
            with (
                RequestWriter(folder / f"{name}.requests.jsonl") as writer,
                BenchProgress(is_quiet=options.quiet, title=f"scale {scale:.4g}, ") as progress,
            ):
                bench = Bench(
                    target=target,
                    load=load,
                    options=point,
                    served=dataclasses.replace(served, is_fresh=served.is_fresh and not results),
                    writer=writer,
                    on_progress=progress,
                )
                result = await bench.run(date=now())
            write_result(result, folder / f"{name}.json")
            results.append(result)
            files.append(f"{name}.json")
            return float(result["goodput"]["attainment"])

        found = await find_highest(measure, search)
        return build_sweep(results, files, found, search)

    sweep = run_against(options, work)
    write_result(sweep, folder / SWEEP_FILE)
    print(summarize_sweep(sweep))
    page = write_report(folder / SWEEP_FILE)
    print(f"\nwritten   {folder / SWEEP_FILE}, and {len(files)} points beside it")
    print(f"page      {page}; of a point: jaxserve report {folder / files[0]}")
    return exit_codes.OK if sweep["best"] is not None else exit_codes.REFUSED


def _read_search(options: argparse.Namespace) -> Search:
    check("--attainment", options.attainment, low=0.001, high=1)
    check("--start", options.start, low=1e-6, high=1e6)
    check("--resolution", options.resolution, low=0.001, high=1)
    check("--max-points", options.max_points, low=1, high=100)
    return Search(
        attainment=options.attainment,
        start=options.start,
        resolution=options.resolution,
        max_points=options.max_points,
    )
