"""Results with every figure in them, made without a server: a queue of rows in plain arithmetic."""

import heapq
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.measure.energy import Energy
from jaxserve.measure.goodput import Tally
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.records import Arrival, Outcome, RequestRecord, ServerPhases
from jaxserve.measure.replay import TimelineSample
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.result import JsonObject, Repeat, build_result, write_result
from jaxserve.measure.targets.base import Levels

LIMITS = ("ttft=0.8", "itl_p95=0.06", "e2e=12", "batch:e2e=30", "batch:ttft=5")
CLASSES = ("chat", "code", "batch")
ROWS = 8
BUCKETS = ("2x1+0", "4x1+0", "8x1+0", "2x1+64", "4x1+64", "8x1+64", "8x1+256", "2x1+256")


def build_records(
    number: int, *, rate: float, seed: int, tokens: int = 30, rows: int = ROWS
) -> Iterator[RequestRecord]:
    """Yields requests that share rows, some of which go wrong."""
    chance = random.Random(seed)
    free = [0.0] * rows
    at_s = 0.0
    for index in range(number):
        at_s += chance.expovariate(rate) * (0.3 if (at_s // 20) % 2 else 1.7)
        sent_s = at_s + chance.expovariate(1 / 0.0006)
        start_s = max(sent_s + 0.001, heapq.heappop(free))
        first_s = start_s + 0.04 + chance.expovariate(1 / 0.03)
        time_s, arrivals = first_s, [Arrival(time_s=first_s, num_tokens=1)]
        num_tokens = 1
        while num_tokens < tokens:
            time_s += (
                0.022 + chance.expovariate(1 / 0.004) + (0.12 if chance.random() < 0.01 else 0)
            )
            count = 2 if chance.random() < 0.05 else 1
            arrivals.append(Arrival(time_s=time_s, num_tokens=count))
            num_tokens += count
        heapq.heappush(free, time_s)
        outcome = _outcome(chance.random())
        if outcome in ("refused", "failed"):
            arrivals = arrivals[: len(arrivals) // 2] if outcome == "failed" else []
        yield RequestRecord(
            index=index,
            request_id=f"r{index}",
            prompt_class=CLASSES[min(2, int(chance.expovariate(1.0)))],
            intended_s=at_s,
            sent_s=sent_s,
            arrivals=tuple(arrivals),
            end_s=time_s + 0.0012,
            outcome=outcome,
            prompt_tokens=100,
            output_tokens=num_tokens if outcome in ("ok", "short") else None,
            cached_prompt_tokens=32 if index % 3 else 0,
            error="" if outcome in ("ok", "short") else f"{outcome}: the server said no",
            phases=ServerPhases(
                queue_s=start_s - sent_s - 0.0005,
                prefill_s=first_s - start_s - 0.0002,
                decode_s=time_s - first_s,
                delivery_s=0.0004,
            )
            if outcome == "ok"
            else ServerPhases(),
        )


def _outcome(share: float) -> Outcome:
    for outcome, part in (("refused", 0.02), ("failed", 0.03), ("timed_out", 0.04)):
        if share < part:
            return outcome  # type: ignore[return-value]  # one of the literals
    return "short" if share < 0.05 else "ok"


def build_repeat(records: list[RequestRecord], limits: Limits, *, rows: int = ROWS) -> Repeat:
    tally = Tally(limits)
    for record in records:
        tally.add(record)
    end_s = max(record.end_s for record in records)
    timeline = []
    for second in range(math.ceil(end_s) if end_s < 4000 else 4000):
        there = [record for record in records if record.sent_s <= second < record.end_s][:99]
        timeline.append(
            TimelineSample(
                time_s=float(second),
                in_flight=len(there),
                output_tokens=0,
                levels=Levels(
                    running=float(min(rows, len(there))),
                    waiting=float(max(0, len(there) - rows)),
                    kv_usage=min(1.0, 0.11 * len(there)),
                    memory_bytes=1.4e9 + 4e6 * second,
                ),
            )
        )
    return Repeat(totals=tally.close(), timeline=timeline)


def build_server() -> dict[str, object]:
    buckets = [
        {
            "bucket": name,
            "steps": 900 // (place + 1),
            "real_tokens": 4000 // (place + 1),
            "padded_tokens": 700 * (place % 4),
        }
        for place, name in enumerate(BUCKETS)
    ]
    delta = {
        "joined_running_total": 120.0,
        "kv_grown_pages_total": 3456.0,
        "chunked_prompts_total": 0.0,
        "overlapped_steps_total": 2200.0,
        "bucketed_steps_total": 1500.0,
        "bucket_fallbacks_total": 40.0,
        "captured_steps_total": 0.0,
        "step_device_seconds_total": 48.0,
        "step_gap_seconds_total": 3.1,
        "step_communication_seconds_total": 0.0,
    }
    return {
        "before": {},
        "after": {},
        "delta": delta,
        "buckets": buckets,
        "padding_share": 0.31,
        "captured_share": 0.0,
        "programs_per_step": 2.1,
        "compiles": {"before_serving": 14.0, "while_serving": 0.0},
        "row_occupancy": 0.71,
        "kv_usage_peak": 0.88,
        "kv_capacity_tokens": 4096.0,
        "peak_memory_bytes": 1.6e9,
        "host_gap_share": 0.061,
        "step_seconds": {
            "idle": 6.0, "schedule": 0.6, "build": 0.9, "dispatch": 2.2, "wait": 44.0,
            "readback": 0.5, "detokenize": 0.1, "commit": 1.1,
        },
        "preemptions": 2.0,
        "recomputed_tokens": 240.0,
    }  # fmt: skip


def build_manifest(limits: Limits, *, rate: float, repeats: int, number: int) -> dict[str, Any]:
    return {
        "workload": {
            "name": "example", "hash": "ab12" * 16, "num_requests": number, "span_s": 60.0,
            "source": "made for a test", "licence": "", "lineage": [],
        },
        "bundle_digest": "cd34" * 16,
        "hardware": {"cpu": "an example", "cores": 2},
        "jax_version": "0.12.0",
        "jaxserve_version": "0.1.0",
        "server_version": "0.1.0",
        "target": {
            "backend": "in-process", "address": "", "model": "tiny-model", "max_model_tokens": 4096,
        },
        "config": {"scheduler": {"max_seqs": ROWS, "batching": "continuous"}},
        "limits": limits.as_json(),
        "sampling": {"temperature": 0.0, "lengths": "exact", "ignore_eos": True},
        "offered_load": {
            "arrivals": "open", "rate_scale": 1.0, "requests_per_s": rate, "burstiness": 1.0,
            "concurrency": None,
        },
        "cache_state": "cold",
        "seed": 7,
        "repeats": repeats,
        "warm_up": 0,
        "timeout_s": 600.0,
        "max_drain_s": None,
        "stated": [],
    }  # fmt: skip


def write_run(
    folder: Path,
    *,
    number: int = 150,
    rate: float = 6.0,
    repeats: int = 2,
    tokens: int = 30,
) -> Path:
    """Writes a run with its requests and returns the result's path."""
    limits = read_limits(LIMITS)
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    with RequestWriter(folder / "requests.jsonl") as writer:
        for repeat in range(repeats):
            records = list(build_records(number, rate=rate, seed=repeat, tokens=tokens))
            for record in records:
                writer.write(record, repeat)
            done.append(build_repeat(records, limits))
    result = build_result(
        done,
        manifest=build_manifest(limits, rate=rate, repeats=repeats, number=number),
        server=build_server(),
        energy=Energy(parts={"cpu": 1234.5}, missing={"gpu": "there is none"}),
        date="2026-01-31T12:00:00+00:00",
        warnings=["drain: 9.1 of 40.2 s passed after the last send; rates are lower"],
    )
    path = folder / "result.json"
    write_result(result, path)
    return path


def build_sweep() -> JsonObject:
    """Returns a sweep whose goodput falls where its raw throughput still rises."""
    points = [
        {
            "file": f"point-{place:02d}.json",
            "rate_scale": load / 2,
            "requests_per_s": load,
            "concurrency": None,
            "attainment": share,
            "goodput": 60.0 * load * share,
            "raw_throughput": min(60.0 * load, 390.0),
            "outcomes": {"sent": 100, "ok": 99},
            "latency": {
                name: {"p50": base * slow, "p95": 2 * base * slow, "p99": 3 * base * slow}
                for name, base in (("ttft", 0.1), ("itl", 0.025), ("tpot", 0.026), ("e2e", 1.5))
            },
        }
        for place, (load, share, slow) in enumerate(
            ((1.0, 1.0, 1.0), (2.0, 0.99, 1.1), (4.0, 0.97, 1.3), (4.7, 0.95, 1.6),
             (5.6, 0.81, 2.5), (8.0, 0.3, 9.0)), start=1,
        )
    ]  # fmt: skip
    limits = read_limits(("ttft=0.5", "itl_p95=0.1"))
    return {
        "schema_version": 1,
        "kind": "sweep",
        "date": "2026-01-31T12:00:00+00:00",
        "definitions": {"method": "doubling, then bisection"},
        "manifest": build_manifest(limits, rate=1.0, repeats=1, number=100),
        "search": {"attainment": 0.95, "start": 1.0, "resolution": 0.2, "max_points": 16},
        "is_within_resolution": True,
        "lowest_that_failed": 2.8,
        "best": points[3],
        "highest_goodput": points[4],
        "points": points,
    }
