"""Tables, verdicts and a page of what was measured."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.peer.variants import OURS
from jaxserve.measure.report.figures import BarFigure, BarRow, Section, Table
from jaxserve.measure.report.page import build_plain_page
from jaxserve.measure.report.scales import nice_top

NOISY: Final = 0.05  # of the cores, had by anything else while a batch ran
SAME_WEIGHTS: Final = 0.7  # of prompts, at least, whose first token is ours, if not lossy
# What this engine is to reach: sequences, of whom, and which share of their tokens a second.
WANTED: Final = (
    (1, "vLLM bfloat16", 1.0),
    (8, "llama.cpp BF16", 1.0),
    (32, "vLLM bfloat16", 1.0),
    (32, "llama.cpp BF16", 1.0),
    (32, "OpenVINO GenAI bfloat16", 0.85),
)
MIB: Final = 2**20

Medians = Mapping[tuple[str, int], float]  # output tokens/s by variant and sequences


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Sample:
    """One batch of one variant.

    Attributes:
      num_seqs, num_tokens: of the batch, and of each sequence's output.
      others: share of the cores that anything else had.
    """

    variant: str
    num_seqs: int
    round: int
    seconds: float
    num_tokens: int
    others: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_seqs * self.num_tokens / self.seconds


@dataclasses.dataclass(slots=True, kw_only=True)
class Findings:
    """All that one run of the benchmark has found.

    Attributes:
      variants: names, in the order in which they are shown.
      first_tokens: by variant, of each prompt whether the first token is this engine's.
      lossy: variants whose weights hold less, so that their tokens may differ.
      memory: by variant, the most bytes until it could be asked, and since.
      absent: by variant or engine, why it is missing.
      replays: by variant, what `jaxserve bench` found, and `peak_bytes` of the server.
      unreplayed: by variant, why it has no replay.
    """

    variants: list[str] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    versions: dict[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    first_tokens: dict[str, list[bool]] = dataclasses.field(default_factory=dict)
    lossy: set[str] = dataclasses.field(default_factory=set)
    memory: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    replays: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    unreplayed: dict[str, str] = dataclasses.field(default_factory=dict)


def find_medians(samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """Returns the median output tokens/s of each variant at each number of sequences."""
    rates: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        rates.setdefault((sample.variant, sample.num_seqs), []).append(sample.tokens_per_s)
    return {key: statistics.median(values) for key, values in rates.items()}


def find_ratio(medians: Medians, variant: str, num_seqs: int) -> float | None:
    """Returns this engine's tokens/s by a variant's: above 1, this engine is the faster."""
    ours, theirs = medians.get((OURS, num_seqs)), medians.get((variant, num_seqs))
    return None if ours is None or theirs is None else ours / theirs


def find_agreement(found: Findings) -> dict[str, float]:
    """Returns the share of prompts, by variant, whose first token is this engine's."""
    return {variant: statistics.mean(same) for variant, same in found.first_tokens.items()}


def build_throughput(found: Findings) -> Table:
    """Returns medians of output tokens/s, this engine's by them, memory and agreement."""
    medians = find_medians(found.samples)
    all_seqs = sorted({num_seqs for _, num_seqs in medians})
    head = ["", *(f"{n} seq" if n == 1 else f"{n} seqs" for n in all_seqs)]
    head += ["start MiB", "serving MiB", "first token"]
    agreement = find_agreement(found)
    rows = []
    for variant in found.variants:
        cells = [_say_rate(medians, variant, num_seqs) for num_seqs in all_seqs]
        memory = found.memory.get(variant)
        peaks = [f"{peak / MIB:.0f}" for peak in memory] if memory else ["–", "–"]
        share = agreement.get(variant)
        rows.append([variant, *cells, *peaks, "–" if share is None else f"{100 * share:.0f} %"])
    return Table(head=head, rows=rows)


def _say_rate(medians: Medians, variant: str, num_seqs: int) -> str:
    rate, ratio = medians.get((variant, num_seqs)), find_ratio(medians, variant, num_seqs)
    if rate is None:
        return "–"
    return f"{rate:.1f}" if ratio is None else f"{rate:.1f} ({ratio:.2f}×)"


def build_replays(found: Findings) -> Table:
    """Returns what the replays gave; times in milliseconds."""
    head = ("", "goodput tokens/s", "raw tokens/s", "met all limits", "ok of sent", "ttft p50",
            "ttft p95", "itl p50", "itl p95", "server MiB")  # fmt: skip
    rows = []
    for variant, replayed in found.replays.items():
        result = replayed["result"]
        goodput, latency, outcomes = result["goodput"], result["latency"], result["outcomes"]
        times = [latency[kind][point] for kind in ("ttft", "itl") for point in ("p50", "p95")]
        rows.append([
            variant,
            f"{goodput['tokens_per_s']:.1f}",
            f"{goodput['raw_tokens_per_s']:.1f}",
            f"{100 * goodput['attainment']:.0f} %",
            f"{outcomes['ok']} of {outcomes['sent']}",
            *("–" if time is None else f"{1e3 * time:.0f}" for time in times),
            f"{replayed['peak_bytes'] / MIB:.0f}",
        ])  # fmt: skip
    return Table(head=head, rows=rows)


def judge(medians: Medians) -> list[tuple[str, bool]]:
    """Returns a line for each thing wanted and whether it holds; what was not measured does not."""
    lines = []
    for num_seqs, peer, share in WANTED:
        ratio = find_ratio(medians, peer, num_seqs)
        found = "not measured beside" if ratio is None else f"{ratio:.2f} of"
        line = f"{num_seqs} seqs: {found} {peer} (wanted: {share:g})"
        lines.append((line, ratio is not None and ratio >= share))
    return lines


def find_cautions(found: Findings) -> list[str]:
    """Returns what a reader must know before believing the numbers."""
    cautions = []
    noisy = [sample for sample in found.samples if sample.others > NOISY]
    if noisy:
        worst = max(noisy, key=lambda sample: sample.others)
        cautions.append(
            f"{len(noisy)} of {len(found.samples)} batches ran while others had more than "
            f"{100 * NOISY:g} % of the cores, at worst {100 * worst.others:.0f} % ({worst.variant})"
        )
    cautions += [
        f"{variant}: only {100 * share:.0f} % of first tokens are this engine's: are these the "
        "same weights?"
        for variant, share in find_agreement(found).items()
        if variant not in found.lossy and share < SAME_WEIGHTS
    ]
    return cautions


def tell(table: Table) -> str:
    """Returns a table as text."""
    cells = [list(table.head), *map(list, table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def build_page(found: Findings, lines: Sequence[str]) -> str:
    """Returns the page; `lines` say what was measured."""
    medians = find_medians(found.samples)
    all_seqs = sorted({num_seqs for _, num_seqs in medians})
    figures = []
    for num_seqs in all_seqs:
        rates = {
            variant: medians[variant, num_seqs]
            for variant in found.variants
            if (variant, num_seqs) in medians
        }
        texts = {variant: _say_rate(medians, variant, num_seqs) for variant in rates}
        about = "Median output tokens a second; in brackets what this engine's are of them."
        figures.append(_bars(f"seqs-{num_seqs}", f"{num_seqs} at once", about, rates, texts))
    goodputs = {
        variant: float(replayed["result"]["goodput"]["tokens_per_s"])
        for variant, replayed in found.replays.items()
    }
    replays = Section(
        key="replay",
        title="A Poisson replay with limits",
        figures=[
            _bars("goodput", "Goodput", "Output tokens/s of requests that met all limits.",
                  goodputs, {variant: f"{rate:.1f}" for variant, rate in goodputs.items()})
        ] if goodputs else [],
        tables=[("Replays", build_replays(found))] if goodputs else [],
        absent=_say_absent(found.unreplayed),
    )  # fmt: skip
    batches = Section(
        key="batches",
        title="Batches",
        figures=figures,
        tables=[("Throughput and memory", build_throughput(found))],
        absent=_say_absent(found.absent),
    )
    return build_plain_page("This engine and its peers", lines, [batches, replays])


def _say_absent(reasons: Mapping[str, str]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in reasons.items()]


def _bars(
    key: str, title: str, about: str, rates: Mapping[str, float], texts: Mapping[str, str]
) -> BarFigure:
    return BarFigure(
        key=key,
        title=title,
        about=about,
        parts=["output tokens/s"],
        rows=[
            BarRow(label=variant, values=[rate], text=texts[variant])
            for variant, rate in rates.items()
        ],
        high=nice_top(max(rates.values())),
        table=Table(head=("", "output tokens/s"), rows=list(texts.items())),
    )
