"""A trace of an engine's last steps and requests, in the Chrome trace-event format.

Perfetto and chrome://tracing open it, and `trace_page.py` makes a page of it. The format: "Trace
Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; here are
its complete events ("X", times in microseconds) and the names of processes and threads ("M").
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jaxserve
from jaxserve.engine.trace_ring import RequestTrace, Round, StepTrace, TraceRing
from jaxserve.errors import WorkloadError
from jaxserve.plan import HOST_PHASES, HostPhase

HOST, DEVICE, ROWS, REQUESTS = 1, 2, 3, 4  # process ids: a group of lanes each
GROUPS: Final = {HOST: "engine thread", DEVICE: "device", ROWS: "state rows", REQUESTS: "requests"}
BUSY, GAP = 1, 2  # the device's lanes
# Whose step a phase works for: that which the turn launches, or that which it retires.
_OF_LAUNCH: Final[frozenset[HostPhase]] = frozenset(("schedule", "build", "dispatch"))

Trace = dict[str, Any]  # the JSON object
Event = dict[str, Any]


class _Bar(NamedTuple):
    """An event on the engine's clock."""

    group: int
    lane: int
    name: str
    start_s: float
    end_s: float
    facts: dict[str, object]


def build_trace(ring: TraceRing, *, model: str) -> Trace:
    """Returns what the ring holds; nothing of prompts or outputs is in it."""
    turns, requests = ring.rounds, ring.requests
    steps = [turn.retired for turn in turns if turn.retired is not None]
    bars = [*_host_bars(turns), *_device_bars(turns, steps), *_row_bars(steps)]
    lanes = _find_lanes(requests)
    bars += itertools.chain.from_iterable(map(_request_bars, requests, lanes))
    origin_s = min((bar.start_s for bar in bars), default=0.0)
    events = [_complete(bar, origin_s) for bar in bars]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))  # what holds another comes first
    return {
        "traceEvents": [*_names(bars), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": f"jaxserve {jaxserve.__version__}",
            "model": model,
            "steps": len(steps),
            "requests": len(requests),
        },
    }


def write_trace(trace: Trace, path: Path) -> None:
    """Writes the JSON, an event a line."""
    head = {key: value for key, value in trace.items() if key != "traceEvents"}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace["traceEvents"])
    path.write_text(f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n')


def read_trace(path: Path) -> Trace:
    """Returns a trace of ours as it was written.

    Raises:
      WorkloadError: it cannot be read, or is no trace of ours.
    """
    try:
        trace = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        raise WorkloadError(f"trace {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"trace {path} is not JSON: {error}; is it complete?") from error
    problem = _find_problem(trace)
    if problem:
        raise WorkloadError(
            f"trace {path}: {problem}; give a file that `jaxserve trace` or "
            "`jaxserve serve --trace-file` wrote"
        )
    assert isinstance(trace, dict)
    return trace


def _finite(text: str) -> float:
    """Refuses what a browser's JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def _find_problem(trace: object) -> str | None:
    """Returns what the page could not be made with."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return "it has no traceEvents"
    if not isinstance(trace.get("otherData"), dict) or "producer" not in trace["otherData"]:
        return "it was not made by jaxserve"
    for place, event in enumerate(trace["traceEvents"]):
        if not isinstance(event, dict) or event.get("ph") not in ("X", "M"):
            return f"event {place} is not of ph X or M"
        numbers = ("pid", "tid", "ts", "dur") if event["ph"] == "X" else ("pid",)
        for key in numbers:
            if not isinstance(event.get(key), int | float):
                return f"event {place} has no number {key}"
        if not isinstance(event.get("name"), str) or not isinstance(event.get("args"), dict):
            return f"event {place} has no name or args"
    return None


def _host_bars(turns: Iterable[Round]) -> Iterator[_Bar]:
    for turn in turns:
        retired = None if turn.retired is None else turn.retired.step_id
        for phase, start_s, end_s in turn.spans:
            step = turn.launched if phase in _OF_LAUNCH else retired
            facts: dict[str, object] = {}
            if step is not None and phase != "idle":
                facts["step"] = step
            yield _Bar(HOST, 1 + HOST_PHASES.index(phase), phase, start_s, end_s, facts)


def _device_bars(turns: Sequence[Round], steps: Sequence[StepTrace]) -> Iterator[_Bar]:
    idle = [span for turn in turns for span in turn.spans if span.phase == "idle"]
    idle.reverse()
    # a step that is in flight when the first turn begins has started before
    free_s = next((turn.spans[0].start_s for turn in turns if turn.spans), 0.0)
    for step in steps:
        # the device had nothing until then; without requests that is no gap
        while idle and idle[-1].end_s <= step.start_s:
            span = idle.pop()
            if span.start_s > free_s:
                yield _Bar(DEVICE, GAP, "gap", free_s, span.start_s, {})
            free_s = max(free_s, span.end_s)
        if step.start_s > free_s:
            yield _Bar(DEVICE, GAP, "gap", free_s, step.start_s, {"step": step.step_id})
        facts: dict[str, object] = {
            "step": step.step_id, "tokens": step.num_tokens, "rows": len(step.rows)
        }  # fmt: skip
        yield _Bar(DEVICE, BUSY, step.bucket, step.start_s, step.ready_s, facts)
        free_s = step.ready_s


def _row_bars(steps: Iterable[StepTrace]) -> Iterator[_Bar]:
    for step in steps:
        for row in step.rows:
            facts: dict[str, object] = {
                "step": step.step_id, "tokens": row.num_tokens, "samples": row.samples
            }  # fmt: skip
            yield _Bar(ROWS, 1 + row.row, row.request_id, step.start_s, step.ready_s, facts)


def _find_lanes(requests: Sequence[RequestTrace]) -> list[int]:
    """Returns a lane for each, in which it runs alone; as few as that allows."""
    free_s: list[float] = []
    lanes = dict.fromkeys(range(len(requests)), 0)
    for place in sorted(lanes, key=lambda place: requests[place].arrival_s):
        request = requests[place]
        fits = (lane for lane, since_s in enumerate(free_s) if since_s <= request.arrival_s)
        lane = next(fits, len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
        free_s[lane] = _gone_s(request)
        lanes[place] = 1 + lane
    return list(lanes.values())


def _gone_s(request: RequestTrace) -> float:
    """When nothing of it was left; a cancelled one may be delivered to nobody."""
    return max(request.end_s, request.reader.delivered_s or 0.0)


def _request_bars(request: RequestTrace, lane: int) -> Iterator[_Bar]:
    timings, since_s = request.timings, request.arrival_s
    yield _Bar(
        REQUESTS,
        lane,
        request.request_id,
        since_s,
        _gone_s(request),
        {
            "end": request.end,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "preemptions": request.preemptions,
        },
    )
    # each ends where the next begins, to the last bit, whatever their lengths round to
    ends_s = (
        ("queue", since_s + timings.queue_s),
        ("prefill", since_s + timings.queue_s + timings.prefill_s),
        ("decode", request.end_s),
        ("delivery", _gone_s(request)),
    )
    for name, end_s in ends_s:
        end_s = min(end_s, _gone_s(request))
        if end_s > since_s:
            yield _Bar(REQUESTS, lane, name, since_s, end_s, {})
            since_s = end_s


def _complete(bar: _Bar, origin_s: float) -> Event:
    start_ns, end_ns = (round((at_s - origin_s) * 1e9) for at_s in (bar.start_s, bar.end_s))
    return {
        "name": bar.name,
        "cat": GROUPS[bar.group],
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": bar.group,
        "tid": bar.lane,
        "args": bar.facts,
    }


def _names(bars: Iterable[_Bar]) -> Iterator[Event]:
    lanes = {(bar.group, bar.lane) for bar in bars}
    for group, name in GROUPS.items():
        yield _name("process_name", group, 0, {"name": name})
        yield _name("process_sort_index", group, 0, {"sort_index": group})
    for group, lane in sorted(lanes):
        yield _name("thread_name", group, lane, {"name": _lane_name(group, lane)})
        yield _name("thread_sort_index", group, lane, {"sort_index": lane})


def _lane_name(group: int, lane: int) -> str:
    if group == HOST:
        return HOST_PHASES[lane - 1]
    if group == DEVICE:
        return "busy" if lane == BUSY else "gap"
    return f"row {lane - 1}" if group == ROWS else f"lane {lane}"


def _name(kind: str, group: int, lane: int, facts: dict[str, object]) -> Event:
    return {"name": kind, "ph": "M", "pid": group, "tid": lane, "args": facts}
