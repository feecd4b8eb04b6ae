"""Goodput: output tokens of the requests that met every limit, per second; and what is beside it.

Pure functions of `RequestRecord`s. A `Tally` takes them one by one and keeps numbers alone, some
tens of bytes for each message, so that a replay of any length can be summed up as it goes.
"""

import array
import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from jaxserve.measure import latency
from jaxserve.measure.limits import Limits
from jaxserve.measure.records import Outcome, RequestRecord
from jaxserve.measure.statistics import Sample

LABEL: Final = "goodput (no quality gate)"
DEFINITIONS: Final[Mapping[str, str]] = {
    **latency.DEFINITIONS,
    "goodput": "output tokens of compliant requests / duration, added up request by request; no "
    "quality gate",
    "compliant": "outcome ok, and every limit met",
    "sent": "all requests of the workload, whatever became of them, warm-up excepted: what shares "
    "are of",
    "raw_throughput": "all output tokens that came, of requests of any outcome / duration",
    "duration": "from the first intended start to the last end of a request, warm-up excepted",
    "drain": "the part of the duration behind the last intended start",
    "peak": "tokens read in the busiest of floor(duration) equal parts of the duration (1 to 2 s "
    "each) / the part's length; never below the mean of the tokens read",
    "attainment": "compliant / sent; of one limit: requests with outcome ok that met it / those "
    "sent that it is meant for",
    "ok": "ended as asked",
    "short": "ended without an error before the tokens that were asked for; empty: without any",
    "refused": "an error before anything ran",
    "failed": "an error later",
    "timed_out": "the client's limit, or a deadline, passed",
    "cancelled": "cut by the end of the replay",
    "completed": "ok and short ones with a token; vLLM's failed is all others",
    "energy": "joules of this machine's processors and GPUs during the repeats, of this tool too; "
    "null is not known, never 0",
    "hit_rate": "prompt tokens that a cache spared / prompt tokens, by the server's usage; null "
    "where no request's usage tells of a cache",
}
OUTCOMES: Final[tuple[Outcome, ...]] = (
    "ok", "short", "refused", "failed", "timed_out", "cancelled"
)  # fmt: skip
PHASES: Final = ("queue", "prefill", "decode", "delivery")
SAMPLES: Final = ("ttft", "itl", "gap", "tpot", "e2e", *PHASES, "send_lag")


def is_compliant(record: RequestRecord, limits: Limits) -> bool:
    """Returns whether the request's tokens count as goodput."""
    return record.outcome == "ok" and all(limit.is_met(record) for limit in limits.of(record))


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """Requests and tokens of one prompt class, or of all.

    Attributes:
      limited: by limit, the requests it is meant for.
      met: by limit, those of them with outcome ok that met it.
    """

    sent: int = 0
    compliant: int = 0
    raw_tokens: int = 0
    compliant_tokens: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    limited: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def extend(self, other: "Counts") -> None:
        self.sent += other.sent
        self.compliant += other.compliant
        self.raw_tokens += other.raw_tokens
        self.compliant_tokens += other.compliant_tokens
        self.outcomes.update(other.outcomes)
        self.limited.update(other.limited)
        self.met.update(other.met)


@dataclasses.dataclass(slots=True, kw_only=True)
class Totals:
    """What one or several replays came to.

    Attributes:
      samples: latencies and phases of ok requests, send lags of all, by name.
      num_completed: ok and short ones with a token.
      num_assumed: whose tokens per message had to be assumed.
      num_unequal: whose usage is another number than the tokens of their messages.
      num_prompts_told, num_caches_told: whose usage tells the prompt's tokens, and the cached ones.
      duration_s, drain_s: summed over replays.
      peak_tokens_per_s: of the busiest window of all; `peak_window_s` is its length.
    """

    counts: Counts = dataclasses.field(default_factory=Counts)
    classes: dict[str, Counts] = dataclasses.field(default_factory=dict)
    samples: dict[str, Sample] = dataclasses.field(
        default_factory=lambda: {name: Sample() for name in SAMPLES}
    )
    num_completed: int = 0
    num_empty: int = 0
    num_assumed: int = 0
    num_unequal: int = 0
    num_prompts_told: int = 0
    num_caches_told: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    duration_s: float = 0.0
    drain_s: float = 0.0
    peak_tokens_per_s: float = 0.0
    peak_window_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Compliant output tokens per second."""
        return self.per_second(self.counts.compliant_tokens)

    @property
    def raw_throughput(self) -> float:
        """Output tokens per second, of whatever outcome."""
        return self.per_second(self.counts.raw_tokens)

    @property
    def attainment(self) -> float:
        """Compliant requests / all sent; 0 where none was."""
        return self.counts.compliant / self.counts.sent if self.counts.sent else 0.0

    @property
    def hit_rate(self) -> float | None:
        if not self.num_caches_told or not self.prompt_tokens:
            return None
        return self.cached_prompt_tokens / self.prompt_tokens

    def per_second(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0

    def extend(self, other: "Totals") -> None:
        """Adds another replay's."""
        self.counts.extend(other.counts)
        for name, counts in other.classes.items():
            self.classes.setdefault(name, Counts()).extend(counts)
        for name, sample in other.samples.items():
            self.samples[name].extend(sample)
        self.num_completed += other.num_completed
        self.num_empty += other.num_empty
        self.num_assumed += other.num_assumed
        self.num_unequal += other.num_unequal
        self.num_prompts_told += other.num_prompts_told
        self.num_caches_told += other.num_caches_told
        self.prompt_tokens += other.prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.duration_s += other.duration_s
        self.drain_s += other.drain_s
        if other.peak_tokens_per_s > self.peak_tokens_per_s:
            self.peak_tokens_per_s = other.peak_tokens_per_s
            self.peak_window_s = other.peak_window_s


class Tally:
    """Sums up one replay; warm-up requests are passed over."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._totals = Totals()
        self._start_s = math.inf
        self._last_start_s = -math.inf
        self._end_s = -math.inf
        self._arrival_s = array.array("d")
        self._arrival_tokens = array.array("q")

    def add(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        if record.is_warm_up:
            return
        totals = self._totals
        counts = self._count(record)
        totals.counts.extend(counts)
        totals.classes.setdefault(record.prompt_class, Counts()).extend(counts)
        has_ended = record.outcome in ("ok", "short")
        totals.num_completed += has_ended and counts.raw_tokens > 0
        totals.num_empty += has_ended and counts.raw_tokens == 0
        totals.num_assumed += record.are_tokens_assumed
        num_read = sum(arrival.num_tokens for arrival in record.arrivals)
        totals.num_unequal += record.output_tokens not in (None, num_read)
        totals.num_prompts_told += record.prompt_tokens is not None
        totals.num_caches_told += record.cached_prompt_tokens is not None
        totals.prompt_tokens += record.prompt_tokens or 0
        totals.cached_prompt_tokens += record.cached_prompt_tokens or 0
        self._start_s = min(self._start_s, record.intended_s)
        self._last_start_s = max(self._last_start_s, record.intended_s)
        self._end_s = max(self._end_s, record.end_s)
        for arrival in record.arrivals:
            self._arrival_s.append(arrival.time_s)
            self._arrival_tokens.append(arrival.num_tokens)
        totals.samples["send_lag"].add(latency.send_lag_s(record))
        if record.outcome == "ok":
            _add_latencies(totals.samples, record)

    def close(self) -> Totals:
        """Returns what it came to; nothing is added after it."""
        totals = self._totals
        if totals.counts.sent:
            totals.duration_s = self._end_s - self._start_s
            totals.drain_s = self._end_s - self._last_start_s
            since_s = np.array(self._arrival_s) - self._start_s
            totals.peak_tokens_per_s, totals.peak_window_s = find_peak(
                since_s, np.array(self._arrival_tokens), duration_s=totals.duration_s
            )
        return totals

    def _count(self, record: RequestRecord) -> Counts:
        counts = Counts(sent=1, raw_tokens=latency.output_tokens(record))
        counts.outcomes[record.outcome] = 1
        limits = self._limits.of(record)
        counts.limited.update(limit.text for limit in limits)
        if record.outcome == "ok":
            counts.met.update(limit.text for limit in limits if limit.is_met(record))
            if len(counts.met) == len(limits):
                counts.compliant = 1
                counts.compliant_tokens = counts.raw_tokens
        return counts


def find_peak(
    times_s: np.ndarray, num_tokens: np.ndarray, *, duration_s: float
) -> tuple[float, float]:
    """Returns the tokens per second of the busiest window, and the windows' length.

    The windows are equal and cover the duration, so the busiest is never below the mean.

    Args:
      times_s: since the start of the duration, and within it.
    """
    num_windows = max(1, math.floor(duration_s))
    window_s = duration_s / num_windows
    if not len(times_s) or window_s <= 0:
        return 0.0, window_s
    windows = np.minimum((times_s / window_s).astype(np.int64), num_windows - 1)
    return float(np.bincount(windows, weights=num_tokens).max()) / window_s, window_s


def _add_latencies(samples: Mapping[str, Sample], record: RequestRecord) -> None:
    phases = record.phases
    for name, value_s in (
        ("ttft", latency.ttft_s(record)),
        ("tpot", latency.tpot_s(record)),
        ("e2e", latency.e2e_s(record)),
        ("queue", phases.queue_s),
        ("prefill", phases.prefill_s),
        ("decode", phases.decode_s),
        ("delivery", phases.delivery_s),
    ):
        if value_s is not None:
            samples[name].add(value_s)
    for gap_s, count in latency.gaps(record):
        samples["gap"].add(gap_s)
        samples["itl"].add(gap_s / count, count)
