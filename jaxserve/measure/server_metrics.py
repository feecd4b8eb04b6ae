"""A server's metrics at one moment, by our names, and what two moments say of the time between."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import view
from jaxserve.metrics.registry import PREFIX

_OURS: Final[Mapping[str, str]] = {twin.name: ours for ours, twin in view.TWINS.items()}
# Counters of one process, where it does not tell when it began.
NEVER_FALLING: Final = ("prompt_tokens_total", "output_tokens_total", "request_seconds_count")
_Key = tuple[str, tuple[tuple[str, str], ...]]


class Snapshot:
    """Samples by name and labels; vLLM's names are read as ours where the meaning is the same."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples: dict[_Key, float] = {}
        self._labels: dict[str, list[dict[str, str]]] = {}
        for family in families:
            name = _OURS.get(family.name, family.name)
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                ours = name.removeprefix(PREFIX) + sample.name.removeprefix(family.name)
                self._samples[ours, tuple(sorted(sample.labels.items()))] = sample.value
                self._labels.setdefault(ours, []).append(sample.labels)

    @classmethod
    def of_registry(cls, registry: CollectorRegistry) -> "Snapshot":
        return cls(registry.collect())

    @classmethod
    def of_text(cls, text: str) -> "Snapshot":
        """Reads Prometheus' text format.

        Raises:
          ValueError: it is something else.
        """
        return cls(text_string_to_metric_families(text))

    def __contains__(self, name: str) -> bool:
        return name in self._labels

    def value(self, name: str, **labels: str) -> float | None:
        """Returns a sample such as `output_tokens_total`, summed over labels that are not given;
        None where there is none."""
        found = [
            value
            for (sample, pairs), value in self._samples.items()
            if sample == name and labels.items() <= dict(pairs).items()
        ]
        return sum(found) if found else None

    def values_by(self, name: str, label: str) -> dict[str, float]:
        """Returns a sample's values by one of its labels."""
        values: dict[str, float] = {}
        for (sample, pairs), value in self._samples.items():
            if sample == name and label in dict(pairs):
                key = dict(pairs)[label]
                values[key] = values.get(key, 0.0) + value
        return values

    def info(self, name: str) -> dict[str, str]:
        """Returns the labels of an info family such as `build`; empty where there is none."""
        found = self._labels.get(f"{name}_info", [])
        return dict(found[0]) if found else {}

    def as_json(self) -> dict[str, float]:
        """Returns the scalars: counters and gauges over all labels, counts and sums of histograms.

        Counters of processes and of Python itself are left out.
        """
        totals: dict[str, float] = {}
        for (name, pairs), value in self._samples.items():
            is_bucket = name.endswith("_bucket") and "le" in dict(pairs)
            if not is_bucket and not name.endswith("_info") and not name.startswith("python_"):
                totals[name] = totals.get(name, 0.0) + value
        return dict(sorted(totals.items()))


def describe_server(
    before: Snapshot | None,
    after: Snapshot | None,
    *,
    peak_kv_usage: float | None,
    peak_memory_bytes: float | None,
) -> dict[str, object] | None:
    """Returns what the server did between two moments; None where its metrics cannot be read, or
    another process's were read at the end.

    Args:
      peak_kv_usage, peak_memory_bytes: the largest that was seen in between.
    """
    if before is None or after is None or has_restarted(before, after):
        return None
    first, last = before.as_json(), after.as_json()
    delta = {name: last[name] - first.get(name, 0.0) for name in last if _rises(name)}
    return {
        "before": first,
        "after": last,
        "delta": delta,
        "buckets": list(_buckets(before, after)),
        "padding_share": _share(delta, "step_padded_tokens_total", "step_real_tokens_total"),
        "bucketed_steps": delta.get("bucketed_steps_total"),
        "captured_share": _ratio(delta.get("captured_steps_total"), delta.get("steps_total")),
        "programs_per_step": _programs_per_step(delta),
        "compiles": {
            "before_serving": last.get("compiles_total"),
            "while_serving": delta.get("recompiles_total"),
        },
        "row_occupancy": _ratio(delta.get("useful_rows_total"), delta.get("offered_rows_total")),
        "kv_usage_peak": peak_kv_usage,
        "kv_capacity_tokens": last.get("kv_capacity_tokens"),
        "peak_memory_bytes": peak_memory_bytes,
        "host_gap_share": _share(delta, "step_gap_seconds_total", "step_device_seconds_total"),
        "step_seconds": _step_seconds(before, after),
        "preemptions": delta.get("preemptions_total"),
        "recomputed_tokens": delta.get("recomputed_tokens_total"),
    }


def has_restarted(before: Snapshot | None, after: Snapshot | None) -> bool:
    """Returns whether the two are of different processes: a difference of them says nothing."""
    if before is None or after is None:
        return False
    starts = [snapshot.value("process_start_time_seconds") for snapshot in (before, after)]
    if None not in starts:
        return starts[0] != starts[1]
    return any((after.value(name) or 0.0) < (before.value(name) or 0.0) for name in NEVER_FALLING)


def _rises(name: str) -> bool:
    return name.endswith(("_total", "_count", "_sum"))


def _buckets(before: Snapshot, after: Snapshot) -> Iterator[dict[str, object]]:
    """Yields each forward bucket that ran, the most steps first."""
    first, last = (_by_bucket(snapshot) for snapshot in (before, after))
    ran: dict[str, dict[str, int]] = {}
    for bucket, counts in last.items():
        old = first.get(bucket, {})
        row = {name: round(count - old.get(name, 0.0)) for name, count in counts.items()}
        if row.get("steps"):
            ran[bucket] = row
    for bucket in sorted(ran, key=lambda bucket: (-ran[bucket]["steps"], bucket)):
        yield {"bucket": bucket, **ran[bucket]}


def _programs_per_step(delta: Mapping[str, float]) -> float | None:
    """Returns forward, output and side programs by step."""
    names = ("steps_total", "output_programs_total", "side_programs_total")
    if any(name not in delta for name in names):
        return None
    return _ratio(sum(delta[name] for name in names), delta["steps_total"])


def _step_seconds(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Returns the engine thread's time by what it did; empty where that is not told."""
    first = before.values_by("step_host_seconds_total", "phase")
    last = after.values_by("step_host_seconds_total", "phase")
    return {phase: seconds - first.get(phase, 0.0) for phase, seconds in last.items()}


def _by_bucket(snapshot: Snapshot) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name, sample in (
        ("steps", "steps_total"),
        ("real_tokens", "step_real_tokens_total"),
        ("padded_tokens", "step_padded_tokens_total"),
        ("captured_steps", "captured_steps_total"),
        ("fallbacks", "bucket_fallbacks_total"),
        ("recompiles", "recompiles_total"),
    ):
        for bucket, value in snapshot.values_by(sample, "bucket").items():
            table.setdefault(bucket, {})[name] = value
    return table


def _share(delta: Mapping[str, float], part: str, rest: str) -> float | None:
    """Returns part / (part + rest)."""
    if part not in delta or rest not in delta:
        return None
    return _ratio(delta[part], delta[part] + delta[rest])


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
