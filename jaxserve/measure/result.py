"""The result of a benchmark as one JSON object.

The object's keys are API (SCHEMA_VERSION): those of `vllm bench serve` beside our own blocks.
Absent is null, never 0. Seconds, unless a key ends in `_ms`.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jaxserve.errors import ResultError
from jaxserve.measure import goodput
from jaxserve.measure.energy import Energy
from jaxserve.measure.goodput import Counts, Totals
from jaxserve.measure.replay import TimelineSample
from jaxserve.measure.request_lines import tidy
from jaxserve.measure.statistics import METHODS, Distribution, Interval, mean_interval

SCHEMA_VERSION: Final = 1
RESULT_FILE: Final = "result.json"
# vLLM's names of latencies and ours.
VLLM_LATENCIES: Final = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
# What is told of each repeat, with an interval over all.
REPEATED: Final = tuple(
    (name, part)
    for name in ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode", "delivery")
    for part in ("mean", "p50", "p95", "p99")
)

JsonObject = dict[str, Any]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Repeat:
    """One replay of several."""

    totals: Totals
    timeline: Sequence[TimelineSample]


def build_result(
    repeats: Sequence[Repeat],
    *,
    manifest: Mapping[str, Any],
    server: Mapping[str, object] | None,
    energy: Energy,
    date: str,
    warnings: Sequence[str],
    kind: str = "bench",
) -> JsonObject:
    """Returns the result of at least one repeat.

    Args:
      server: of `describe_server`.
      energy: of all repeats.
      date: of the start, for people.
    """
    pooled = Totals()
    for repeat in repeats:
        pooled.extend(repeat.totals)
    latencies = {name: sample.describe() for name, sample in pooled.samples.items()}
    result: JsonObject = tidy(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": kind,
            **_vllm_keys(pooled, latencies, manifest, date),
            "definitions": dict(goodput.DEFINITIONS),
            "methods": dict(METHODS),
            "manifest": dict(manifest),
            "warnings": list(warnings),
            "goodput": _goodput(pooled),
            "latency": {
                name: dataclasses.asdict(distribution) for name, distribution in latencies.items()
            },
            "attainment": {
                "all": _attainment(pooled.counts),
                "classes": {
                    name: _attainment(counts) for name, counts in sorted(pooled.classes.items())
                },
            },
            "outcomes": _outcomes(pooled),
            "tokens": {
                "prompt": pooled.prompt_tokens if pooled.num_prompts_told else None,
                "cached_prompt": pooled.cached_prompt_tokens if pooled.num_caches_told else None,
                "hit_rate": pooled.hit_rate,
                "output": pooled.counts.raw_tokens,
                "requests_with_assumed_tokens_per_message": pooled.num_assumed,
                "requests_with_usage_unlike_messages": pooled.num_unequal,
            },
            "server": server,
            "energy": {
                "joules": energy.joules,
                "parts": dict(energy.parts),
                "missing": dict(energy.missing),
                "per_compliant_token": energy.per_token(pooled.counts.compliant_tokens),
                "per_output_token": energy.per_token(pooled.counts.raw_tokens),
            },
            "timeline": list(_timeline(repeats)),
            "repeats": describe_repeats([repeat.totals for repeat in repeats]),
        }
    )
    return result


def _vllm_keys(
    totals: Totals,
    latencies: Mapping[str, Distribution],
    manifest: Mapping[str, Any],
    date: str,
) -> JsonObject:
    load, target = manifest["offered_load"], manifest["target"]
    counts = totals.counts
    prompt_tokens = totals.prompt_tokens if totals.num_prompts_told else None
    keys: JsonObject = {
        "date": date,
        "backend": target["backend"],
        "model_id": target["model"],
        "tokenizer_id": target["model"],
        "num_prompts": counts.sent,
        "request_rate": load["requests_per_s"],
        "burstiness": load["burstiness"],
        "max_concurrency": load["concurrency"],
        "duration": totals.duration_s,
        "completed": totals.num_completed,
        "failed": counts.sent - totals.num_completed,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": counts.raw_tokens,
        "request_throughput": totals.per_second(totals.num_completed),
        "request_goodput": totals.per_second(counts.compliant),
        "output_throughput": totals.raw_throughput,
        "total_token_throughput": None
        if prompt_tokens is None
        else totals.per_second(counts.raw_tokens + prompt_tokens),
        "max_output_tokens_per_s": totals.peak_tokens_per_s,
    }
    for theirs, ours in VLLM_LATENCIES.items():
        found = latencies[ours]
        for part in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            value = getattr(found, part)
            keys[f"{part}_{theirs}_ms"] = None if value is None else 1000 * value
    return keys


def _goodput(totals: Totals) -> JsonObject:
    counts = totals.counts
    return {
        "label": goodput.LABEL,
        "quality_gate": None,
        "tokens_per_s": totals.goodput,
        "requests_per_s": totals.per_second(counts.compliant),
        "attainment": totals.attainment,
        "compliant_tokens": counts.compliant_tokens,
        "compliant_requests": counts.compliant,
        "sent_requests": counts.sent,
        "raw_tokens": counts.raw_tokens,
        "raw_tokens_per_s": totals.raw_throughput,
        "peak_tokens_per_s": totals.peak_tokens_per_s,
        "peak_window_s": totals.peak_window_s,
        "duration_s": totals.duration_s,
        "drain_s": totals.drain_s,
        "classes": {
            name: {
                "tokens_per_s": totals.per_second(part.compliant_tokens),
                "raw_tokens_per_s": totals.per_second(part.raw_tokens),
            }
            for name, part in sorted(totals.classes.items())
        },
    }


def _attainment(counts: Counts) -> JsonObject:
    return {
        "sent": counts.sent,
        "ok": counts.outcomes["ok"],
        "compliant": counts.compliant,
        "share": counts.compliant / counts.sent,
        "limits": {
            limit: {
                "requests": number,
                "met": counts.met[limit],
                "share": counts.met[limit] / number,
            }
            for limit, number in sorted(counts.limited.items())
        },
    }


def _outcomes(totals: Totals) -> JsonObject:
    outcomes = totals.counts.outcomes
    return {
        "sent": totals.counts.sent,
        **{name: outcomes[name] for name in goodput.OUTCOMES},
        "empty": totals.num_empty,
    }


def _timeline(repeats: Sequence[Repeat]) -> Iterator[JsonObject]:
    for number, repeat in enumerate(repeats):
        for sample in repeat.timeline:
            yield {
                "repeat": number,
                "time_s": sample.time_s,
                "in_flight": sample.in_flight,
                "output_tokens": sample.output_tokens,
                **dataclasses.asdict(sample.levels),
            }


def describe_repeats(repeats: Sequence[Totals]) -> JsonObject:
    """Returns the figures of each repeat, and their means with confidence intervals."""
    each = [_describe_repeat(totals) for totals in repeats]
    names = dict.fromkeys(name for figures in each for name in figures)
    intervals: dict[str, Interval | None] = {
        name: mean_interval(figures[name] for figures in each if figures.get(name) is not None)
        for name in names
    }
    return {
        "count": len(each),
        "each": each,
        "intervals": {
            name: None if interval is None else dataclasses.asdict(interval)
            for name, interval in intervals.items()
        },
    }


def _describe_repeat(totals: Totals) -> JsonObject:
    latencies = {name: sample.describe() for name, sample in totals.samples.items()}
    return {
        "goodput": totals.goodput,
        "raw_throughput": totals.raw_throughput,
        "attainment": totals.attainment,
        "duration_s": totals.duration_s,
        "hit_rate": totals.hit_rate,
        **{f"{name}_{part}": getattr(latencies[name], part) for name, part in REPEATED},
    }


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Writes the object; the file has its name only when it is whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_result(path: Path) -> JsonObject:
    """Returns a result.

    Args:
      path: the file, or the folder it is in.

    Raises:
      ResultError: it cannot be read, or is not a result of this version.
    """
    file = path / RESULT_FILE if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultError(f"{file} is not JSON: {error}") from error
    if not isinstance(result, dict) or "schema_version" not in result:
        raise ResultError(f"{file} is not a result of `jaxserve bench`: it has no schema_version")
    if result["schema_version"] != SCHEMA_VERSION:
        raise ResultError(
            f"{file} has schema_version {result['schema_version']}, but this version reads "
            f"{SCHEMA_VERSION}; measure it again"
        )
    return result
