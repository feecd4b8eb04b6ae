"""`jaxserve bench compare`: two results of the same thing, as ratios."""

import argparse
import sys
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.bench.table import summarize_changes
from jaxserve.cli.workload.options import add_log_option
from jaxserve.errors import ResultError
from jaxserve.measure.compare import compare, find_config_changes, find_differences
from jaxserve.measure.result import read_result

EPILOG: Final = """\
examples:
  jaxserve bench compare before after
  jaxserve bench compare before/result.json after/result.json --force

Workload, bundle, hardware, jax, limits, sampling, offered load, timeouts and
the caches' state at the start must be the same, and known; else nothing is
compared, with exit code 1. Of a server elsewhere `bench run` knows bundle and
hardware only by MODEL or --bundle-digest, and --hardware. --force compares all
the same, and says what differs. Intervals need repeats on both sides; without
them a ratio says little.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "compare",
        help="say by how much two results differ, if they are of the same thing",
        description="Say by how much result B differs from result A.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("old", type=Path, metavar="A", help="a folder of `bench run`, or its file")
    parser.add_argument("new", type=Path, metavar="B", help="likewise")
    parser.add_argument(
        "--force", action="store_true", help="compare what differs too, and say what that is"
    )
    add_log_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compares, or refuses; returns the exit code."""
    old, new = read_result(options.old), read_result(options.new)
    changes = compare(old, new)
    differences = find_differences(old, new)
    if differences and not options.force:
        listed = "; ".join(map(str, differences))
        fix = "--force does it all the same"
        if any(difference.is_unknown for difference in differences):
            fix = f"`jaxserve bench run --help` has what tells of a server elsewhere; {fix}"
        raise ResultError(f"these two cannot be compared: {listed}; {fix}")
    for difference in differences:
        print(f"! not the same: {difference}", file=sys.stderr)
    print(summarize_changes(changes, find_config_changes(old, new)))
    return exit_codes.OK
