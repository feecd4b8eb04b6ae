"""`jaxserve buckets`: the programs that a configuration compiles, what each costs, who uses it."""

import argparse
import dataclasses
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from jaxserve.cli import exit_codes
from jaxserve.cli.options import add_model_options, read_config
from jaxserve.cli.progress import START_TITLES, StartProgress
from jaxserve.config import MIB
from jaxserve.errors import NotServingError

if TYPE_CHECKING:
    from jaxserve.engine.program_list import Program, ProgramList

EPILOG: Final = """\
examples:
  jaxserve buckets --dry-run
  jaxserve buckets path/to/model --config configs/cpu.toml
  jaxserve buckets --dry-run --metrics-url http://127.0.0.1:9100

A forward's bucket is DECODE_SEQSxVERIFY_TOKENS+CHUNK_TOKENS, 8x1+256 say: a
step of up to 8 rows of one token beside up to 256 prompt tokens. An output's is
its rows and what its sampler can do. Compiled programs are kept in the cache,
so that a later `jaxserve serve` only reads them. Sizes are set by
buckets.decode_seqs, buckets.chunk_tokens and buckets.chunk_decode_seqs, as
lists or, in a file, as {first = 2, last = 32, ratio = 2}.
"""
TIMEOUT_S: Final = 10.0
NEVER: Final = "never"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Use:
    """What a running server counted of one program; None is not counted for its kind."""

    hits: int
    real_tokens: int | None = None
    padded_tokens: int | None = None


# By kind and bucket.
Uses = Mapping[tuple[str, str], Use]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "buckets",
        help="list and compile the programs of a configuration",
        description="List the programs that serving a model compiles, and compile them:\n"
        "seconds, temporary bytes, and whether the cache had them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, log_level="warning")
    parser.add_argument("--dry-run", action="store_true", help="list only, compile nothing")
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="add what a running server (serve --metrics-port) counted: steps, real and padded "
        "tokens; and mark buckets that were never hit",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Lists, compiles, prints."""
    from jaxserve.engine.program_list import compile_programs, list_programs

    config = read_config(options).config
    uses = None if options.metrics_url is None else read_uses(options.metrics_url)
    if options.dry_run:
        found = list_programs(options.model, config)
    else:
        titles = {"compile": START_TITLES["compile"]}
        with StartProgress(is_quiet=options.quiet, titles=titles) as progress:
            found = compile_programs(options.model, config, progress=progress)
    if options.json:
        print(json.dumps(as_json(found, uses), indent=2))
    else:
        print(as_table(found, uses))
    return exit_codes.OK


def read_uses(url: str) -> Uses:
    """Returns what the server at `url` counted of each forward and output program.

    Raises:
      NotServingError: nobody answers there, or not with jaxserve's metrics.
    """
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{parts.scheme} is neither http nor https")
        if parts.path in ("", "/"):
            parts = parts._replace(path="/metrics")
        with urllib.request.urlopen(parts.geturl(), timeout=TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (OSError, ValueError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        raise NotServingError(
            f"--metrics-url {url}: {reason}; is the server running with --metrics-port?"
        ) from error
    uses = parse_uses(text)
    if not uses:
        raise NotServingError(
            f"--metrics-url {url} has no jaxserve_steps_total; give the /metrics of jaxserve serve"
        )
    return uses


def parse_uses(text: str) -> Uses:
    """Returns the uses in an exposition text; empty where it is no server's of ours."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: dict[tuple[str, str], dict[str, int]] = {}
    wanted = {
        "jaxserve_steps_total": ("forward", "hits"),
        "jaxserve_step_real_tokens_total": ("forward", "real_tokens"),
        "jaxserve_step_padded_tokens_total": ("forward", "padded_tokens"),
        "jaxserve_output_programs_total": ("output", "hits"),
    }
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:  # not such a text at all
        return {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name in wanted and math.isfinite(sample.value):
            kind, field = wanted[sample.name]
            program = counts.setdefault((kind, sample.labels.get("bucket", "")), {"hits": 0})
            program[field] = int(sample.value)
    return {key: Use(**fields) for key, fields in counts.items()}


def as_json(found: "ProgramList", uses: Uses | None) -> dict[str, object]:
    """Returns the object of `--json`; its keys are API."""
    programs = []
    for program in found.programs:
        row: dict[str, object] = {"kind": program.kind, "bucket": program.bucket}
        cost = program.cost
        row |= dataclasses.asdict(cost) if cost else {}
        use = (uses or {}).get((program.kind, program.bucket))
        row |= dataclasses.asdict(use) if use else {}
        programs.append(row)
    return {
        "model": found.model,
        "programs": programs,
        "compile_s": round(found.seconds, 3),
        "others": [list(key) for key in _others(found, uses or {})],
    }


def as_table(found: "ProgramList", uses: Uses | None) -> str:
    """Returns the table for a person: 80 columns at most, a line per program and a sum."""
    is_compiled = any(program.cost for program in found.programs)
    head = ["program"]
    head += ["seconds", "temp MiB", "cached"] if is_compiled else []
    head += ["hits", "real", "padded"] if uses is not None else []
    rows = [head]
    for program in found.programs:
        row = [f"{program.kind} {program.bucket}".rstrip()]
        row += _cost_cells(program) if is_compiled else []
        row += _use_cells(program, uses) if uses is not None else []
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", *_sums(found, uses)])


def _cost_cells(program: "Program") -> list[str]:
    if program.cost is None:
        return ["", "", ""]
    temp = program.cost.temp_bytes
    return [
        f"{program.cost.seconds:.2f}",
        "?" if temp is None else f"{temp / MIB:.1f}",
        "yes" if program.cost.is_cached else "no",
    ]


def _use_cells(program: "Program", uses: Uses) -> list[str]:
    use = uses.get((program.kind, program.bucket))
    if use is None:
        return ["", "", ""]
    tokens = (use.real_tokens, use.padded_tokens)
    return [str(use.hits or NEVER), *("" if number is None else str(number) for number in tokens)]


def _sums(found: "ProgramList", uses: Uses | None) -> Sequence[str]:
    costs = [program.cost for program in found.programs if program.cost]
    num_cached = sum(cost.is_cached for cost in costs)
    line = f"{found.model}: {len(found.programs)} programs"
    if costs:
        line += f", {len(costs) - num_cached} compiled, {num_cached} from the cache"
        line += f"; {found.seconds:.1f} s"
    lines = [line]
    if uses is not None:
        hits = [uses[p.kind, p.bucket].hits for p in found.programs if (p.kind, p.bucket) in uses]
        lines.append(f"{hits.count(0)} of {len(hits)} buckets were never hit")
        others = [" ".join(key) for key in _others(found, uses)]
        if others:
            lines.append(f"the server has others, so its configuration differs: {_few(others)}")
    return lines


def _others(found: "ProgramList", uses: Uses) -> list[tuple[str, str]]:
    """Returns the server's programs that this configuration has not."""
    return sorted(uses.keys() - {(program.kind, program.bucket) for program in found.programs})


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
