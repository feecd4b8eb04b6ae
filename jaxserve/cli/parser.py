"""The parser of all commands."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Final, override

import jaxserve
from jaxserve.cli import (
    batch,
    bench,
    buckets,
    cache,
    chat,
    config,
    convert,
    generate,
    health,
    info,
    keys,
    report,
    serve,
    simulate,
    trace,
    workload,
)
from jaxserve.cli.usage import CommandParser

DESCRIPTION: Final = """\
A measured serving runtime for language models on one node.

  jaxserve generate --chat --prompt "Name three rivers."
  jaxserve serve --port 50051
"""
EPILOG: Final = """\
Exit codes: 0 done; 1 the input, the model or the machine will not do; 2 wrong
usage or configuration; 3 a batch is complete, but some of its lines failed;
70 internal error; 130 interrupted; 141 the reader of the output went away.
Errors are one line on stderr.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets `run` and `log_level`."""
    parser = _Parser(
        prog="jaxserve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    kind: type[argparse.ArgumentParser] = CommandParser
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=kind
    )
    generate.add_parser(commands)
    chat.add_parser(commands)
    batch.add_parser(commands)
    serve.add_parser(commands)
    keys.add_parser(commands)
    health.add_parser(commands)
    convert.add_parser(commands)
    config.add_parser(commands)
    buckets.add_parser(commands)
    cache.add_parser(commands)
    info.add_parser(commands)
    workload.add_parser(commands)
    bench.add_parser(commands)
    simulate.add_parser(commands)
    report.add_parser(commands)
    trace.add_parser(commands)
    return parser


class _Parser(CommandParser):
    """Knows that an action may be left out."""

    @override
    def parse_args(  # type: ignore[override]  # into a namespace of its own alone
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_args(bench.with_action(given))


def _version() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    jax = importlib.metadata.version("jax")
    return f"jaxserve {jaxserve.__version__} (jax {jax}, Python {python})"
