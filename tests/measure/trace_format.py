"""The rules of the trace-event format as far as viewers rely on them, written from the format."""

import json
from typing import Any

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check_format(trace: dict[str, Any]) -> None:
    """Asserts required keys, order, and that the bars of a lane nest or follow each other."""
    assert json.loads(json.dumps(trace)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    last_ts = 0.0
    open_ends: dict[tuple[int, int], list[float]] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            assert last_ts == 0, "names come before events"
            continue
        assert event["ph"] == "X"
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= last_ts, "events are in the order of their starts"
        assert event["dur"] >= 0
        last_ts = event["ts"]
        lane = (event["pid"], event["tid"])
        assert lane in named, f"lane {lane} has no name"
        assert event["pid"] in processes
        ends = open_ends.setdefault(lane, [])
        end = round(1000 * (event["ts"] + event["dur"]))  # whole nanoseconds
        while ends and ends[-1] <= round(1000 * event["ts"]):
            ends.pop()
        assert not ends or end <= ends[-1], f"{event} sticks out of what holds it"
        ends.append(end)
