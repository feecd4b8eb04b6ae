"""What a reader of a result must know before its figures, in sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.bench_options import BenchOptions
from jaxserve.measure.goodput import Totals

DRAIN_BOUND: Final = 0.5  # of the duration
RESTARTED: Final = (
    "the server was started again meanwhile, or another one answered: its metrics are of two "
    "processes and left out"
)


def find_warnings(
    repeats: Sequence[Totals], manifest: Mapping[str, Any], options: BenchOptions
) -> Iterator[str]:
    """Yields a warning for each thing that changes what the figures mean."""
    pooled = Totals()
    for totals in repeats:
        pooled.extend(totals)
    lag = pooled.samples["send_lag"].describe()
    if lag.p99 is not None and lag.p99 > options.lag_bound_s:
        yield (
            f"send lag: p99 is {lag.p99:.3f} s, above {options.lag_bound_s:g} s, so this tool was "
            "late; the load was another than asked for, and latencies hold the lag"
        )
    if manifest["offered_load"]["arrivals"] == "closed":
        yield (
            "closed loop: the server sets the pace, so waiting for it is in no latency; do not "
            "compare with an open loop"
        )
    if num_dropped := manifest["offered_load"]["dropped_over_context"]:
        yield (
            f"{num_dropped} requests of the workload are longer than the served context and were "
            "not sent"
        )
    if pooled.drain_s > DRAIN_BOUND * pooled.duration_s:
        yield (
            f"drain: {pooled.drain_s:.1f} of {pooled.duration_s:.1f} s passed after the last send; "
            "rates are lower than in a steady state"
        )
    if pooled.num_unequal:
        yield (
            f"usage: of {pooled.num_unequal} requests the server's usage is another number than "
            "the tokens of their messages; all rates count the usage"
        )
    if pooled.num_assumed:
        yield (
            f"tokens per message were assumed for {pooled.num_assumed} requests: the server told "
            "their sum alone, so inter-token latencies are approximate"
        )
    if manifest["cache_state"] in ("mixed", "unknown"):
        yield (
            f"cache state at the start: {manifest['cache_state']}; state it with --cache-state, or "
            "this result cannot be compared"
        )
