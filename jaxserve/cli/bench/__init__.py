"""`jaxserve bench`: replays, sweeps, and comparisons of their results."""

import argparse
from typing import Final

from jaxserve.cli.bench import compare, run, sweep

ACTIONS: Final = ("run", "sweep", "compare")
EPILOG: Final = """\
examples:
  jaxserve bench --rate 2 --limit ttft=0.5 --limit itl_p95=0.1
  jaxserve bench --workload w.jsonl --limit e2e=10 --repeats 5 --out run1
  jaxserve bench --target grpc://127.0.0.1:50051 --workload w.jsonl \\
      --metrics-url http://127.0.0.1:9100/metrics
  jaxserve bench sweep --workload w.jsonl --limit ttft=0.5 --attainment 0.95
  jaxserve bench compare run1 run2

Without an action it is `run`; `jaxserve bench run --help` has its options. What
the figures mean is in every result, and in docs/measuring.md.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "bench",
        help="replay a workload and count the tokens that kept their promise",
        description="Replay a workload, and count the output tokens of what met its limits.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    run.add_parser(actions)
    sweep.add_parser(actions)
    compare.add_parser(actions)


def with_action(arguments: list[str]) -> list[str]:
    """Returns the arguments of the whole command with the action spelled out: `run` may be left
    out."""
    if arguments[:1] != ["bench"] or (
        arguments[1:2] and arguments[1] in (*ACTIONS, "-h", "--help")
    ):
        return arguments
    return ["bench", "run", *arguments[1:]]
