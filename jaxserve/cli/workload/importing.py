"""`jaxserve workload import`."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.workload.options import (
    add_arrival_options,
    add_output_options,
    check,
    read_arrivals,
    report,
)
from jaxserve.errors import ConfigError
from jaxserve.measure.workload import write_workload
from jaxserve.measure.workload.importing import FORMATS, Filling, import_trace, import_workload
from jaxserve.measure.workload.lengths import parse_lengths

OWN: Final = "jaxserve"
EPILOG: Final = """\
formats:
  azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens
  mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids
            (of 512 tokens each: prompts with the same ids share a prefix)
  burstgpt  CSV: Timestamp (s), Request tokens, Response tokens, Log Type
  sharegpt  JSON: [{"conversations": [{"from": "human", "value": …}, …]}]
  vllm      JSON lines: {"prompt": …, "output_tokens": …}
  jaxserve  a workload that was cut (a recording, say), changed, or written by
            hand: what is there gets its count and hash

examples:
  jaxserve workload import --format azure trace.csv -o azure.jsonl
  jaxserve workload import --format sharegpt chats.json -o chats.jsonl \\
      --rate 2 --tokenizer smollm2-135m-instruct --lengths-only
  jaxserve workload import --format vllm prompts.jsonl -o prompts.jsonl \\
      --concurrency 8 --output-tokens 64

Requests without a prompt or an output are dropped and counted. Prompts that SRC
has as texts are the same in every run: a cache may know them from the last one.
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "import",
        help="make one of a trace or of a file of prompts",
        description="Make a workload of a trace or of a file of prompts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="the file to read")
    parser.add_argument(
        "--format",
        choices=(*FORMATS, OWN),
        required=True,
        metavar="FORMAT",
        help=f"one of {', '.join((*FORMATS, OWN))}; see below",
    )
    add_output_options(parser)
    parser.add_argument("--licence", metavar="TEXT", help="of SRC, to be kept in the file")
    group = parser.add_argument_group("arrivals, for files without times")
    add_arrival_options(group)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)"
    )
    group = parser.add_argument_group("lengths, for files of texts")
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="count tokens of texts with this model's tokenizer"
    )
    group.add_argument(
        "--output-tokens", metavar="LENGTHS", help="of outputs that SRC does not tell; see make"
    )
    group.add_argument(
        "--lengths-only",
        action="store_true",
        help="keep no text: prompts of random tokens, as long as the texts by --tokenizer",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Imports it."""
    if options.format == OWN:
        _refuse_filling(options)
        imported = import_workload(options.source)
    else:
        imported = import_trace(options.source, options.format, _read_filling(options))
    header = imported.header
    if options.name or not header.name:
        header = dataclasses.replace(header, name=options.name or options.output.stem)
    if options.licence:
        header = dataclasses.replace(header, licence=options.licence)
    end = write_workload(
        options.output,
        header,
        imported.entries,
        counts=imported.counts,
        replace=options.overwrite,
    )
    report(options, end)
    return exit_codes.OK


def _read_filling(options: argparse.Namespace) -> Filling:
    check("--seed", options.seed, low=0, high=(1 << 64) - 1)
    output = None
    if options.output_tokens is not None:
        output = parse_lengths(options.output_tokens, "--output-tokens")
    arrivals = read_arrivals(options)
    tokenizer = None if options.tokenizer is None else _load_counter(options.tokenizer)
    return Filling(
        arrivals=arrivals,
        output=output,
        count_tokens=tokenizer,
        drops_text=options.lengths_only,
        seed=options.seed,
    )


def _refuse_filling(options: argparse.Namespace) -> None:
    given = {
        "--rate": options.rate,
        "--arrivals": options.arrivals,
        "--burstiness": options.burstiness,
        "--concurrency": options.concurrency,
        "--tokenizer": options.tokenizer,
        "--output-tokens": options.output_tokens,
        "--lengths-only": options.lengths_only or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} is of other formats: a workload has its own; leave it out")


def _load_counter(model: str) -> Callable[[str], int]:
    from jaxserve.checkpoint.registry import find_model  # it brings jax

    tokenizer = find_model(model).load_header().tokenizer
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
