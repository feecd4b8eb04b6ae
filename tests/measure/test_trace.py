"""A trace shows the scripted run of tests/metrics/script.py as its drawing has it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import MeasureSection
from jaxserve.engine.trace_ring import TraceRing
from jaxserve.errors import WorkloadError
from jaxserve.measure.trace import build_trace, read_trace, write_trace
from jaxserve.measure.trace_page import build_page, write_page
from tests.engines import ask, build_engine, gather, serve
from tests.measure.trace_format import check_format
from tests.metrics.script import run_script

S = 1e6  # in a trace's microseconds
HOST, DEVICE, ROWS, REQUESTS = 1, 2, 3, 4
DISPATCH, WAIT = 4, 6


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    ring = run_script(measure=MeasureSection(trace_steps=100)).trace
    assert ring is not None
    return build_trace(ring, model="bytes")


def bars(trace: dict[str, Any], group: int, lane: int | None = None) -> list[Any]:
    """(name, start, end) in seconds."""
    return [
        (event["name"], event["ts"] / S, (event["ts"] + event["dur"]) / S)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == group and lane in (None, event["tid"])
    ]


def test_it_keeps_to_the_format(trace: dict[str, Any]) -> None:
    check_format(trace)
    assert trace["otherData"]["steps"] == 15
    assert trace["otherData"]["requests"] == 5


def test_the_device_is_busy_and_has_gaps_as_in_the_drawing(trace: dict[str, Any]) -> None:
    results = (2.5, 4, 5.5, 7, 8.5, 9, 11.5, 13, 14.5, 16, 17.5, 19, 19.5, 22, 22.5)
    starts = (1, *results[:5], 10, *results[6:12], 20.5, 22)
    busy = bars(trace, DEVICE, 1)
    assert [(start, end) for _, start, end in busy] == list(zip(starts, results, strict=True))
    assert [name for name, _, _ in busy[:3]] == ["0x1+6", "0x1+6", "2x1+0"]
    assert bars(trace, DEVICE, 2) == [("gap", 0, 1), ("gap", 9, 10), ("gap", 19.5, 20.5)]


def test_the_engines_thread_launches_and_waits_in_turns(trace: dict[str, Any]) -> None:
    assert bars(trace, HOST, DISPATCH)[:4] == [
        ("dispatch", 0, 1), ("dispatch", 1, 2), ("dispatch", 2.5, 3.5), ("dispatch", 4, 5),
    ]  # fmt: skip
    assert bars(trace, HOST, WAIT)[:2] == [("wait", 2, 2.5), ("wait", 3.5, 4)]
    steps = [
        (event["args"]["step"], event["name"])
        for event in trace["traceEvents"]
        if event.get("cat") == "engine thread"
    ]
    assert steps[:5] == [
        (1, "dispatch"), (2, "dispatch"), (1, "wait"), (3, "dispatch"), (2, "wait")
    ]  # fmt: skip


def test_a_row_shows_who_ran_in_it(trace: dict[str, Any]) -> None:
    ids = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "state rows"}
    assert len(ids) == 4  # all but the one that was never scheduled
    rows = sorted({event["tid"] for event in trace["traceEvents"] if event["pid"] == ROWS} - {0})
    assert rows == [1, 2, 3]
    tokens = [
        event["args"]["tokens"]
        for event in trace["traceEvents"]
        if event.get("cat") == "state rows"
    ]
    assert sum(tokens) == 6 + 5 + 2 + 2 + 1 + 1 + 5 + 4 + 3 + 3 + 1 + 1 + 1 + 5 + 1


def test_a_requests_phases_fill_its_lane_from_arrival_to_delivery(trace: dict[str, Any]) -> None:
    ended = {
        event["args"]["end"]: event
        for event in trace["traceEvents"]
        if event.get("cat") == "requests" and "end" in event["args"]
    }
    assert set(ended) == {
        "eos", "max_tokens", "cancelled", "error_numerics", "error_deadline"
    }  # fmt: skip
    short = ended["max_tokens"]
    assert short["args"]["preemptions"] == 1
    phases = [
        bar
        for bar in bars(trace, REQUESTS, short["tid"])
        if bar[0] in ("queue", "prefill", "decode", "delivery")
        and 0 <= bar[1] < (short["ts"] + short["dur"]) / S
    ]
    assert phases == [
        ("queue", 0, 1), ("prefill", 1, 5.5), ("decode", 5.5, 19.5), ("delivery", 19.5, 22.5)
    ]  # fmt: skip


def test_requests_that_run_together_have_lanes_of_their_own_and_a_free_lane_is_used_again(
    trace: dict[str, Any],
) -> None:
    wholes = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == "requests" and "end" in event["args"]
    ]
    for one in wholes:
        for other in wholes:
            is_apart = one["ts"] + one["dur"] <= other["ts"]
            is_apart |= other["ts"] + other["dur"] <= one["ts"]
            assert is_apart or one is other or one["tid"] != other["tid"]
    assert len({event["tid"] for event in wholes}) < len(wholes)


def test_nothing_of_a_prompt_or_an_output_is_in_it() -> None:
    engine, runner = build_engine(measure=MeasureSection(trace_steps=50), clock=None)
    with serve(engine, runner):
        output = gather(engine.submit(ask("the secret", id="its-id", max_tokens=6)))
    assert engine.trace is not None
    text = json.dumps(build_trace(engine.trace, model="bytes"))
    assert "its-id" in text
    assert "secret" not in text
    assert not any(str(list(output.token_ids[i : i + 2]))[1:-1] in text for i in range(5))


@pytest.mark.parametrize("max_steps", range(1, 20))
def test_a_ring_that_dropped_turns_makes_a_bounded_trace_that_keeps_to_the_format(
    max_steps: int,
) -> None:
    ring = run_script(measure=MeasureSection(trace_steps=max_steps)).trace
    assert ring is not None
    part = build_trace(ring, model="bytes")
    check_format(part)
    assert len(ring.rounds) == min(max_steps, 18)
    assert part["otherData"]["requests"] == min(max_steps, 5)
    assert len(part["traceEvents"]) < 20 * max_steps + 60
    gaps = [(end - start) for _, start, end in bars(part, DEVICE, 2)]
    assert set(gaps) <= {1.0}  # none from what is not known


def test_an_engine_that_did_nothing_has_an_empty_trace() -> None:
    trace = build_trace(TraceRing(5), model="bytes")
    check_format(trace)
    assert bars(trace, HOST) == bars(trace, DEVICE) == []


def test_what_is_written_is_read_again(trace: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert max(map(len, path.read_text().splitlines())) < 400  # an event a line


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:-50], "is not JSON: .*is it complete"),
        (lambda text: '{"a": 1}', "it has no traceEvents; give a file that `jaxserve trace`"),
        (lambda text: '{"traceEvents": []}', "it was not made by jaxserve"),
        (lambda text: text.replace('"ph":"X"', '"ph":"B"'), "is not of ph X or M"),
        (lambda text: text.replace('"ts":', '"at":'), "has no number ts"),
        (lambda text: text.replace('"dur":1000000.0', '"dur":null'), "has no number dur"),
        (lambda text: text.replace('"args":{', '"facts":{'), "has no name or args"),
        (lambda text: text.replace('"dur":1000000.0', '"dur":NaN'), "is not JSON: NaN"),
        (lambda text: text.replace('"dur":1000000.0', '"dur":1e999'), "is not JSON: 1e999"),
        (lambda text: "[" * 100_000, "is not JSON: maximum recursion"),
    ],
)
def test_a_file_that_is_no_trace_of_ours_is_one_line(
    trace: dict[str, Any], tmp_path: Path, damage: Callable[[str], str], why: str
) -> None:
    path = tmp_path / "trace.json"
    write_trace(trace, path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(WorkloadError, match=why) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"trace {path}")
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "other.json")


def test_the_page_holds_the_trace_and_asks_nobody_for_anything(trace: dict[str, Any]) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    event = {**trace["traceEvents"][-1], "name": hostile}
    page = build_page({**trace, "traceEvents": [*trace["traceEvents"], event]})
    _, _, rest = page.partition('<script type="application/json" id="trace">')
    held, _, _ = rest.partition("</script>")
    assert json.loads(held)["traceEvents"] == [*trace["traceEvents"], event]
    assert hostile not in page
    outside = page.replace(held, "")
    assert "http://" not in outside
    assert "https://" not in outside
    assert not any(word in outside for word in (" src=", "@import", "url(", "fetch(", "@trace@"))
    assert "default-src 'none'" in outside


def test_a_models_name_cannot_write_into_the_page(trace: dict[str, Any]) -> None:
    page = build_page({**trace, "otherData": {**trace["otherData"], "model": "</title><b>x"}})
    assert "</title><b>" not in page


@pytest.mark.parametrize("model", ["@trace@", "@title@", "é \ud800"])
def test_any_models_name_makes_a_page(trace: dict[str, Any], model: str, tmp_path: Path) -> None:
    named = {**trace, "otherData": {**trace["otherData"], "model": model}}
    write_page(named, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    _, _, rest = page.partition('<script type="application/json" id="trace">')
    assert json.loads(rest.partition("</script>")[0]) == named
