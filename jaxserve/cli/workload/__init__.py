"""`jaxserve workload`: files that say which requests come when."""

import argparse
from typing import Final

from jaxserve.cli.workload import importing, make, scale, show

EPILOG: Final = """\
examples:
  jaxserve workload make -o w.jsonl --requests 200 --rate 2 \\
      --prompt-tokens lognormal:200:0.8:1500 --output-tokens uniform:16:128
  jaxserve workload import --format azure trace.csv -o azure.jsonl
  jaxserve workload scale azure.jsonl -o small.jsonl --window 600 --lengths 16
  jaxserve workload show small.jsonl

A workload is a file of JSON lines: a header, an entry for each request, and the
hash of the load that they are (docs/measuring.md). No command changes a file
that is there, unless --overwrite says so.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "workload",
        help="make, import, scale and show workloads",
        description="Make, import, scale and show workloads: which requests come when.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make.add_parser(actions)
    importing.add_parser(actions)
    scale.add_parser(actions)
    show.add_parser(actions)
