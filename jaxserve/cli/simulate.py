"""`jaxserve simulate`: what a benchmark would find, by the real scheduler in virtual time."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.bench.options import (
    LIMITS_HELP,
    add_judging_options,
    add_load_options,
    add_output_options,
    add_rate_scale,
    read_bench_options,
    read_load,
    read_seed,
)
from jaxserve.cli.bench.progress import BenchProgress
from jaxserve.cli.bench.run import now, open_folder
from jaxserve.cli.bench.table import summarize
from jaxserve.cli.options import add_config_options, read_config
from jaxserve.cli.workload.options import check
from jaxserve.config import Config
from jaxserve.engine.interpreter import tune_interpreter
from jaxserve.measure.bench_options import LAG_BOUND_S, BenchOptions
from jaxserve.measure.load import Load
from jaxserve.measure.report import write_report
from jaxserve.measure.request_lines import REQUESTS_FILE, RequestWriter
from jaxserve.measure.result import RESULT_FILE, JsonObject, write_result
from jaxserve.measure.step_times import STEP_TIMES_FILE, ServedTimes, read_step_times
from jaxserve.measure.targets.base import Ask

TENANTS: Final[Mapping[str, Callable[[Ask], str]]] = {"class": lambda ask: ask.prompt_class}
EPILOG: Final = f"""\
examples:
  jaxserve bench --workload w.jsonl --out live
  jaxserve simulate --workload w.jsonl --step-times live/{STEP_TIMES_FILE} \\
      --set scheduler.max_seqs=64 --limit ttft=0.5

Requests go through the scheduler and the page pool that serve, on a device that
takes the time which the file says. Nothing is computed, so that a million of
them take minutes. What is no part of it: tokenizing, transport, and outputs
that end by themselves.

{LIMITS_HELP}"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "simulate",
        help="replay a workload in virtual time, with measured step times",
        description="Replay a workload in virtual time, with measured step times, and report it\n"
        "as `jaxserve bench` does.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load_options(parser)
    group = parser.add_argument_group("simulating")
    group.add_argument(
        "--step-times",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"{STEP_TIMES_FILE} of an in-process `jaxserve bench`",
    )
    group.add_argument(
        "--no-jitter",
        action="store_true",
        help="steps take what the fit says, not more or less as the measured ones did",
    )
    group.add_argument(
        "--tenants-by",
        choices=tuple(TENANTS),
        help="each prompt class is a tenant (default: there are none)",
    )
    add_judging_options(group)
    add_rate_scale(group)
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of made-up arrivals and of the jitter (default: a fresh one)",
    )
    add_config_options(parser, log_level="warning")
    add_output_options(parser)
    parser.add_argument(
        "--no-requests", action="store_true", help=f"no {REQUESTS_FILE}, a line a request"
    )
    parser.set_defaults(
        run=run, warm_up=0, prime=False, max_send_lag=LAG_BOUND_S, cache_state=None,
        temperature=0.0, top_k=None, top_p=None, min_p=None, lengths="exact",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Simulates, writes and shows the result; returns the exit code."""
    check("--rate-scale", options.rate_scale, low=1e-6, high=1e6)
    config = read_config(options).config
    tune_interpreter(config.scheduler.max_seqs)
    served = read_step_times(options.step_times)
    seed = read_seed(options)
    load = read_load(options, seed=seed)
    bench_options = read_bench_options(options, load, seed=seed, rate_scale=options.rate_scale)
    date = now()
    folder = open_folder(options.out or Path(f"simulation-{date[:19].replace(':', '')}"), options)
    result = _simulate(options, load, bench_options, served=served, config=config, folder=folder)
    write_result(result, folder / RESULT_FILE)
    print(summarize(result))
    page = write_report(folder / RESULT_FILE)
    print(f"\nwritten   {folder / RESULT_FILE}")
    print(f"page      {page}")
    return exit_codes.OK if result["outcomes"]["ok"] else exit_codes.REFUSED


def _simulate(
    options: argparse.Namespace,
    load: Load,
    bench_options: BenchOptions,
    *,
    served: ServedTimes,
    config: Config,
    folder: Path,
) -> JsonObject:
    from jaxserve.measure.simulate import Simulator

    simulator = Simulator(
        load=load,
        config=config,
        served=served,
        options=bench_options,
        has_jitter=not options.no_jitter,
        tenant_of=TENANTS[options.tenants_by] if options.tenants_by else None,
    )
    with BenchProgress(is_quiet=options.quiet) as progress:
        simulator.on_progress = progress
        if options.no_requests:
            return simulator.run(date=now())
        with RequestWriter(folder / REQUESTS_FILE) as writer:
            simulator.writer = writer
            return simulator.run(date=now())
