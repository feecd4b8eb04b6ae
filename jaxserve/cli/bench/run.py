"""`jaxserve bench run`: one replay, or several, of one load."""

import argparse
import datetime
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.bench.options import (
    LIMITS_HELP,
    add_rate_scale,
    add_replay_options,
    check_target,
    read_bench_options,
    read_load,
    read_seed,
)
from jaxserve.cli.bench.progress import BenchProgress
from jaxserve.cli.bench.session import run_against
from jaxserve.cli.bench.table import summarize
from jaxserve.cli.workload.options import check
from jaxserve.engine.machine import read_devices
from jaxserve.errors import ResultError
from jaxserve.measure.bench import Bench
from jaxserve.measure.bench_options import Served
from jaxserve.measure.report import write_report
from jaxserve.measure.request_lines import REQUESTS_FILE, RequestWriter
from jaxserve.measure.result import RESULT_FILE, JsonObject, write_result
from jaxserve.measure.step_times import STEP_TIMES_FILE, read_engine, write_step_times
from jaxserve.measure.targets import Target
from jaxserve.measure.targets.in_process import InProcessTarget

EPILOG: Final = f"""\
{LIMITS_HELP}
Requests are sent at their times whatever the server does, and latencies count
from those times. DIR gets {RESULT_FILE}, with every figure, its definition and
what was measured on, {REQUESTS_FILE}, a line for each request, and a page of
figures (`jaxserve report`). In process it gets {STEP_TIMES_FILE} too, which
`jaxserve simulate` needs.

Exit code 1: not one request ended as it was asked to.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "run",
        help="replay a load and report its goodput (the default action)",
        description="Replay a load and report its goodput.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_replay_options(parser)
    add_rate_scale(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, writes and shows the result; returns the exit code."""
    check_target(options)
    check("--rate-scale", options.rate_scale, low=1e-6, high=1e6)
    seed = read_seed(options)
    load = read_load(options, seed=seed)
    bench_options = read_bench_options(options, load, seed=seed, rate_scale=options.rate_scale)
    date = now()
    folder = open_folder(options.out or Path(f"bench-{date[:19].replace(':', '')}"), options)

    async def work(target: Target, served: Served) -> JsonObject:
        with (
            RequestWriter(folder / REQUESTS_FILE) as writer,
            BenchProgress(is_quiet=options.quiet) as progress,
        ):
            bench = Bench(
                target=target,
                load=load,
                options=bench_options,
                served=served,
                writer=writer,
                on_progress=progress,
            )
            result = await bench.run(date=date)
        if isinstance(target, InProcessTarget):
            _write_step_times(target, folder)
        return result

    result = run_against(options, work)
    write_result(result, folder / RESULT_FILE)
    print(summarize(result))
    page = write_report(folder / RESULT_FILE)
    print(f"\nwritten   {folder / RESULT_FILE}, {folder / REQUESTS_FILE}")
    print(f"page      {page}")
    return exit_codes.OK if result["outcomes"]["ok"] else exit_codes.REFUSED


def _write_step_times(target: InProcessTarget, folder: Path) -> None:
    """Writes what the engine found out about its steps, for `jaxserve simulate`."""
    found = read_engine(target.engine, platform=str(read_devices()[0]["platform"]))
    if found.times:
        write_step_times(found, folder / STEP_TIMES_FILE)


def now() -> str:
    """Returns the date and time, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def open_folder(folder: Path, options: argparse.Namespace) -> Path:
    """Returns the folder for results, which is there then.

    Raises:
      ResultError: it holds results, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_results = any(folder.glob("*.json"))
    except OSError as error:
        raise ResultError(f"the folder {folder} cannot be made: {error.strerror}") from error
    if has_results and not options.overwrite:
        raise ResultError(f"{folder} holds results already; --overwrite replaces them")
    return folder
