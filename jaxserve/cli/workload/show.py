"""`jaxserve workload show`."""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.workload.options import add_log_option, check
from jaxserve.measure.statistics import Distribution
from jaxserve.measure.workload import Header, WorkloadEnd, open_workload
from jaxserve.measure.workload.summary import BUSY_S, Rates, Sharing, Summary, summarize

WIDTH: Final = 80
LABEL: Final = 14
NUM_CLASSES: Final = 12
PAGE_SIZE: Final = 16  # kv.page_size
EPILOG: Final = """\
examples:
  jaxserve workload show w.jsonl
  jaxserve workload show w.jsonl --json | jq .content_hash

The hit rate is the most that a prefix cache could give: one that forgets
nothing, of pages of --page-size tokens. Prompts are made anew in each run, so
that nothing is found from the run before, unless the file says "fixed".
"""


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "show",
        help="say what is in one",
        description="Check a workload and say what is in it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="FILE", help="the workload")
    parser.add_argument(
        "--page-size",
        type=int,
        default=PAGE_SIZE,
        metavar="N",
        help="tokens of a page that is shared whole (default: %(default)s, as kv.page_size)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_log_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Reads all of it and prints."""
    check("--page-size", options.page_size, low=1, high=1 << 20)
    with open_workload(options.source) as opened:
        summary = summarize(opened.header, opened.entries, page_size=options.page_size)
    assert opened.end is not None
    if options.json:
        print(json.dumps(as_json(opened.header, opened.end, summary), indent=2))
    else:
        print("\n".join(as_lines(opened.header, opened.end, summary)))
    return exit_codes.OK


def as_json(header: Header, end: WorkloadEnd, summary: Summary) -> dict[str, object]:
    """Returns the object of `--json`; its keys are API."""
    return {
        "content_hash": end.content_hash,
        **dataclasses.asdict(header),
        "counts": dict(end.counts),
        "summary": dataclasses.asdict(summary),
    }


def as_lines(header: Header, end: WorkloadEnd, summary: Summary) -> Iterator[str]:
    """Yields lines for a person, of 80 columns at most."""
    yield _line("name", header.name)
    yield _line("hash", end.content_hash)
    yield _line("source", header.source)
    yield _line("licence", header.licence or "not stated")
    for step in header.lineage:
        yield _line("then", f"{step.get('step')} {_plain(step.get('value'))}")
    for reason, count in sorted(end.counts.items()):
        yield _line("dropped", f"{count} {reason.replace('_', ' ')}")
    yield _line("requests", str(summary.num_requests))
    if summary.num_texts:
        yield _line("", f"{summary.num_texts} with a text, whose length is not known here")
    if summary.num_open_ended:
        yield _line("", f"{summary.num_open_ended} whose end is left to the model")
    yield from _arrival_lines(header, summary.rates)
    yield _line("prompts", _prompts(header))
    yield _line("sharing", _sharing(summary.sharing))
    yield ""
    yield from _table(_length_rows(summary))
    if set(summary.classes) != {""}:
        yield ""
        yield from _table(_class_rows(header, summary))
        if len(summary.classes) > NUM_CLASSES:
            yield f"and {len(summary.classes) - NUM_CLASSES} classes more; --json has all"


def _arrival_lines(header: Header, rates: Rates | None) -> Iterator[str]:
    if rates is None:
        yield _line("arrivals", f"closed loop: {header.concurrency} requests at any time")
        return
    yield _line("arrivals", f"open loop: over {rates.duration_s:.1f} s, {_per_s(rates)}")
    if rates.burstiness is not None:
        yield _line("", f"burstiness {rates.burstiness:.2f} (1 is Poisson, below it bursts)")
    yield _line("", f"busiest {BUSY_S:g} s: {rates.busiest_requests} requests")
    if rates.prompt_tokens_per_s is not None and rates.output_tokens_per_s is not None:
        prompt, output = rates.prompt_tokens_per_s, rates.output_tokens_per_s
        yield _line("load", f"{prompt:.1f} prompt tokens/s, {output:.1f} output tokens/s")


def _per_s(rates: Rates) -> str:
    if rates.requests_per_s is None:
        return "all at once"
    return f"{rates.requests_per_s:.3g} requests/s"


def _prompts(header: Header) -> str:
    if header.prompts == "unique":
        return "unique: made anew in each run"
    return "fixed: the same in every run, so that a cache may know them"


def _sharing(sharing: Sharing) -> str:
    if sharing.hit_rate is None:
        return "not known: a text's tokens are not known here"
    if not sharing.shared_tokens:
        return f"none, at pages of {sharing.page_size} tokens"
    return (
        f"at most {sharing.hit_rate:.1%} of prompt tokens, in {sharing.num_sharing} requests "
        f"(pages of {sharing.page_size})"
    )


def _length_rows(summary: Summary) -> Iterator[Sequence[str]]:
    yield ("tokens", "mean", "min", "p50", "p90", "p99", "max", "total")
    prompt, output = summary.prompt_tokens, summary.output_tokens
    yield ("prompt", *_cells(prompt), str(summary.total_prompt_tokens))
    yield ("output", *_cells(output), str(summary.total_output_tokens))


def _cells(lengths: Distribution) -> Sequence[str]:
    if lengths.mean is None:
        return ("-",) * 6
    values = (lengths.min, lengths.p50, lengths.p90, lengths.p99, lengths.max)
    return (f"{lengths.mean:.1f}", *(f"{value:.0f}" for value in values if value is not None))


def _class_rows(header: Header, summary: Summary) -> Iterator[Sequence[str]]:
    yield ("class", "requests", "prompt p50", "output p50", "deadline s", "priority", "limits")
    for name, one in list(summary.classes.items())[:NUM_CLASSES]:
        medians = (one.prompt_tokens.p50, one.output_tokens.p50)
        yield (
            _shorten(name or "(none)", 16),
            str(one.num_requests),
            *("-" if median is None else f"{median:.0f}" for median in medians),
            _few(["-" if value is None else f"{value:g}" for value in one.deadlines_s]),
            _few([str(value) for value in one.priorities]),
            str(len(header.limits.get(name, ()))),
        )


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        cells = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _line(label: str, text: str) -> str:
    return f"{label:{LABEL}}{_shorten(' '.join(text.split()), WIDTH - LABEL)}".rstrip()


def _few(words: Sequence[str]) -> str:
    return _shorten(words[0] if len(words) == 1 else f"{words[0]}…{words[-1]}", 12)


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
