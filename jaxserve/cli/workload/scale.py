"""`jaxserve workload scale`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.workload.options import add_output_options, check, report
from jaxserve.errors import ConfigError
from jaxserve.measure.workload import open_workload, write_workload
from jaxserve.measure.workload.scale import Scaling, scale_entries, scaled_header
from jaxserve.measure.workload.traces import Counts

EPILOG: Final = """\
examples:
  jaxserve workload scale azure.jsonl -o small.jsonl --window 600 --lengths 16
  jaxserve workload scale mooncake.jsonl -o slow.jsonl --window 60 \\
      --lengths 16 --time 10 --max-tokens 8192
  jaxserve workload scale mixed.jsonl -o chat.jsonl --class chat --limit 100

The steps are done in this order, whatever that of the options: --window,
--class, --limit, --lengths, --max-tokens, --time. The header of the new file
lists them with the hash of SRC; the new hash is that of the new load.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "scale",
        help="make one of another: a part, slower, shorter",
        description="Make a workload of another: a part of it, slower, or with shorter lengths.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="the workload to read")
    add_output_options(parser)
    parser.add_argument(
        "--window", type=float, metavar="S", help="keep what comes in the first S seconds of SRC"
    )
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        metavar="NAME",
        help="keep this class of prompts; may be repeated",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="keep the first N requests")
    parser.add_argument(
        "--lengths",
        type=int,
        metavar="D",
        help="divide lengths by D: prompts, what they share, and outputs; at least 1 token stays",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="drop, and count, requests with more tokens of prompt and output together",
    )
    parser.add_argument(
        "--time", type=float, metavar="F", help="multiply all times by F: 10 is ten times slower"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Scales it."""
    scaling = _read_scaling(options)
    with open_workload(options.source) as opened:
        assert opened.end is not None
        if scaling.window_s is not None or scaling.time is not None:
            _check_open(opened.header.arrivals)
        counts = Counts()
        header = scaled_header(opened.header, scaling, content_hash=opened.end.content_hash)
        if options.name:
            header = dataclasses.replace(header, name=options.name)
        entries = scale_entries(opened.entries, scaling, counts=counts)
        end = write_workload(
            options.output, header, entries, counts=counts, replace=options.overwrite
        )
    report(options, end)
    return exit_codes.OK


def _read_scaling(options: argparse.Namespace) -> Scaling:
    check("--window", options.window, low=1e-6, high=1e9)
    check("--limit", options.limit, low=1, high=10**8)
    check("--lengths", options.lengths, low=1, high=10**6)
    check("--max-tokens", options.max_tokens, low=2, high=10**9)
    check("--time", options.time, low=1e-6, high=1e6)
    scaling = Scaling(
        window_s=options.window,
        classes=None if options.classes is None else tuple(options.classes),
        limit=options.limit,
        divide_lengths=options.lengths,
        max_tokens=options.max_tokens,
        time=options.time,
    )
    if scaling == Scaling():
        raise ConfigError("nothing to do; give --window, --class, --limit, --lengths, … or --time")
    return scaling


def _check_open(arrivals: str) -> None:
    if arrivals == "closed":
        raise ConfigError("a closed loop has no times; leave --window and --time out")
