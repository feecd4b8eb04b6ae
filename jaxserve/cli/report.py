"""`jaxserve report`: a result as a page."""

import argparse
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.workload.options import add_log_option
from jaxserve.measure.report import write_report
from jaxserve.measure.report.png import check_matplotlib

EPILOG: Final = """\
examples:
  jaxserve report run1
  jaxserve report sweep1/result.json -o sweep1.html --png figures

The page is one file: nothing is loaded from elsewhere, and no script runs. A
PNG is not a picture of the page: matplotlib draws the same data anew, in light
colours (the extra `plots`: pip install 'jaxserve[plots]'). What each figure
says: docs/measuring.md.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "report",
        help="make a page of figures out of a benchmark's result",
        description="Make a page of figures out of the result of `jaxserve bench` or of a sweep.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "result", type=Path, metavar="RESULT", help="its JSON, or the folder that holds it"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: beside the result, by its name: result.html, sweep.html)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="draw each figure as a PNG into this folder too"
    )
    add_log_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page and prints where it is."""
    if options.png is not None:
        check_matplotlib()  # before the work, not after it
    print(write_report(options.result, options.output, png_folder=options.png))
    return exit_codes.OK
