"""`jaxserve workload make`."""

import argparse
import dataclasses
import math
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.workload.classes import KEYS, ClassWords, read_classes
from jaxserve.cli.workload.options import (
    add_arrival_options,
    add_output_options,
    check,
    read_arrivals,
    report,
)
from jaxserve.errors import ConfigError
from jaxserve.measure.workload import Header, write_workload
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop, make_entries

EPILOG: Final = f"""\
examples:
  jaxserve workload make -o w.jsonl --requests 200 --rate 2 --prompt-tokens 128
  jaxserve workload make -o bursts.jsonl --duration 300 --rate 2 \\
      --burstiness 0.25 --prompt-tokens lognormal:200:0.8:1500
  jaxserve workload make -o shared.jsonl --requests 500 --rate 4 \\
      --prefix-groups 16 --prefix-tokens 512 --zipf 1 --prompt-tokens 64
  jaxserve workload make -o mixed.jsonl --requests 500 --rate 4 \\
      --class chat:weight=3,prompt=uniform:50:200,ttft=0.5,itl_p95=0.1 \\
      --class batch:prompt=1000,output=200,deadline=60,priority=-1
  jaxserve workload make -o closed.jsonl --requests 200 --concurrency 8

Lengths are N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX], or file:PATH, a
file with one length a line, drawn from at random. A group's prefix comes before
the tokens of --prompt-tokens. Prompts are random tokens of the served model,
made anew in each run, so that no cache knows them, unless --fixed-prompts.

A class is NAME:KEY=VALUE,… with the keys {", ".join(KEYS[:4])},
{", ".join(KEYS[4:])}, and limits that `jaxserve bench`
judges it by. What it does not set, the options set for all.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "make",
        help="make one out of a seed",
        description="Make a workload out of a seed: the same file on every machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_output_options(parser)
    parser.add_argument("--requests", type=int, metavar="N", help="how many")
    parser.add_argument(
        "--duration", type=float, metavar="S", help="seconds of arrivals; or until --requests"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another makes another (default: 0)"
    )
    parser.add_argument(
        "--fixed-prompts", action="store_true", help="the same prompts in every run of it"
    )
    add_arrival_options(parser.add_argument_group("arrivals"))
    group = parser.add_argument_group("requests")
    group.add_argument("--prompt-tokens", metavar="LENGTHS", help="(default: 128)")
    group.add_argument("--output-tokens", metavar="LENGTHS", help="(default: 64)")
    group.add_argument("--prefix-groups", metavar="N", help="groups that share a prefix")
    group.add_argument("--prefix-tokens", metavar="N", help="tokens of each group's prefix")
    group.add_argument(
        "--zipf", metavar="S", help="group r is drawn as often as 1/r^S (default: 0, all alike)"
    )
    group.add_argument("--deadline", metavar="S", help="seconds from the intended start")
    group.add_argument("--priority", metavar="N", help="higher runs first (default: 0)")
    group.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,…",
        help="one class of prompts; may be repeated",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes it."""
    arrivals = read_arrivals(options)
    if arrivals is None:
        raise ConfigError("give --rate (an open loop) or --concurrency (a closed one)")
    check("--requests", options.requests, low=1, high=10**8)
    check("--duration", options.duration, low=1e-3, high=1e9)
    check("--seed", options.seed, low=0, high=(1 << 64) - 1)
    if options.requests is None and (options.duration is None or _is_closed(arrivals)):
        raise ConfigError(
            "give --requests: how many" + ", or --duration" * (not _is_closed(arrivals))
        )
    if options.duration is not None and _is_closed(arrivals):
        raise ConfigError("--duration is of an open loop: a closed one takes as long as it takes")
    classes = read_classes(options.classes, ClassWords.of_options(options))
    header = Header(
        name=options.name or options.output.stem,
        arrivals="closed" if isinstance(arrivals, ClosedLoop) else "open",
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        prompts="fixed" if options.fixed_prompts else "unique",
        seed=options.seed,
        source="jaxserve workload make",
        parameters=_describe(arrivals, options) | {"classes": classes.parameters},
        limits=classes.limits,
    )
    entries = make_entries(
        arrivals,
        classes.classes,
        seed=options.seed,
        num_requests=options.requests,
        duration_s=math.inf if options.duration is None else options.duration,
    )
    report(options, write_workload(options.output, header, entries, replace=options.overwrite))
    return exit_codes.OK


def _is_closed(arrivals: OpenLoop | ClosedLoop) -> bool:
    return isinstance(arrivals, ClosedLoop)


def _describe(arrivals: OpenLoop | ClosedLoop, options: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = dict(dataclasses.asdict(arrivals))
    if isinstance(arrivals, OpenLoop) and math.isinf(arrivals.burstiness):
        found["burstiness"] = "constant"
    if options.requests is not None:
        found["requests"] = options.requests
    if options.duration is not None:
        found["duration_s"] = options.duration
    return found
