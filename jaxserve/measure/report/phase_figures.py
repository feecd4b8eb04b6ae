"""Where the time went: phases of requests and of steps, and the device's time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import (
    BarFigure,
    BarRow,
    Figure,
    Section,
    Table,
)
from jaxserve.measure.report.observed import PARTS, Observed
from jaxserve.measure.report.scales import say, say_share, say_time

PHASES: Final = ("queue", "prefill", "decode", "delivery")
MAX_CLASSES: Final = 8


def build_section(result: Mapping[str, Any], observed: Observed | None) -> Section:
    """Returns where requests and steps spent their time."""
    found: list[Figure | None] = [
        _request_phases(result, observed),
        _host_phases(result),
        _device_time(result),
    ]
    names = ("Phases of requests", "Host phases of steps", "The device's time")
    return Section(
        key="phases",
        title="Where the time went",
        figures=[figure for figure in found if figure is not None],
        absent=[
            f"{name}: the server does not tell it."
            for name, figure in zip(names, found, strict=True)
            if figure is None
        ],
    )


def _request_phases(result: Mapping[str, Any], observed: Observed | None) -> BarFigure | None:
    rows = list(_phase_means(result, observed))
    if not rows:
        return None
    high = max(sum(max(0.0, value) for value in means) for _, means, _ in rows)
    table = Table(
        head=("", "mean", "p50", "p95", "p99"),
        rows=[
            [
                name,
                *(
                    say_time(facts.number(result, "latency", name, part))
                    for part in ("mean", "p50", "p95", "p99")
                ),
            ]
            for name in (*PHASES, "send_lag")
        ],
    )
    return BarFigure(
        key="request-phases",
        title="Phases of requests",
        about="The mean time of ok requests, cut into the server's phases and what the client saw "
        "beside them: a late send, and the way there and back with all that the server does not "
        "count.",
        parts=PARTS if observed is not None and observed.phases else PHASES,
        rows=[
            BarRow(
                label=f"{label} · {say(number)} requests",
                values=means,
                text=say_time(sum(means)),
            )
            for label, means, number in rows
        ],
        high=high or 1.0,
        table=table,
    )


def _phase_means(
    result: Mapping[str, Any], observed: Observed | None
) -> Iterator[tuple[str, Sequence[float], float]]:
    """Yields a label, the mean of each part, and of how many requests."""
    if observed is None or not observed.phases:
        means = [facts.count(result, "latency", name, "mean") for name in PHASES]
        if any(means):
            yield "all requests", means, facts.count(result, "latency", "queue", "count")
        return
    for key in (None, *observed.classes[:MAX_CLASSES]):
        sums = observed.phases.get(key)
        if sums is not None and sums.num_requests:
            label = "all requests" if key is None else f"class {key}" if key else "no class"
            means = [sums.seconds[part] / sums.num_requests for part in PARTS]
            yield label, means, sums.num_requests


def _host_phases(result: Mapping[str, Any]) -> BarFigure | None:
    told = facts.mapping(result, "server", "step_seconds")
    seconds = {name: facts.count(told, name) for name in told if name != "idle"}
    whole_s = sum(seconds.values())
    if not whole_s:
        return None
    num_steps = sum(facts.count(row, "steps") for row in facts.items(result, "server", "buckets"))
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return BarFigure(
        key="host-phases",
        title="Host phases of steps",
        about="What the engine's thread did, idle left out. Time under wait is the device's; all "
        "else is the host's own work.",
        parts=("share",),
        rows=[
            BarRow(
                label=name,
                values=(value,),
                text=f"{say_share(value / whole_s)} · "
                + (f"{say_time(value / num_steps)} a step" if num_steps else say_time(value)),
            )
            for name, value in ordered
        ],
        high=whole_s,
        table=Table(
            head=("phase", "seconds", "share"),
            rows=[[name, say(value), say_share(value / whole_s)] for name, value in ordered],
        ),
    )


def _device_time(result: Mapping[str, Any]) -> BarFigure | None:
    delta = facts.mapping(result, "server", "delta")
    busy_s = facts.count(delta, "step_device_seconds_total")
    gap_s = facts.count(delta, "step_gap_seconds_total")
    idle_s = facts.count(result, "server", "step_seconds", "idle")
    whole_s = busy_s + gap_s + idle_s
    if not busy_s:
        return None
    communication_s = facts.count(delta, "step_communication_seconds_total")
    parts = (
        ("busy with steps", busy_s),
        ("host gap: requests, but no work", gap_s),
        ("idle: no request", idle_s),
    )
    return BarFigure(
        key="device-time",
        title="The device's time",
        about=f"Host gap by gap and busy together: {say_share(gap_s / (gap_s + busy_s))}. "
        f"{say_time(communication_s)} of busy went into collectives.",
        parts=("share",),
        rows=[
            BarRow(
                label=name,
                values=(value,),
                text=f"{say_time(value)} · {say_share(value / whole_s)}",
            )
            for name, value in parts
        ],
        high=whole_s,
        table=Table(
            head=("", "seconds", "share"),
            rows=[[name, say(value), say_share(value / whole_s)] for name, value in parts],
        ),
    )
