"""A sweep: what came of each load."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.limits import Limits
from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import (
    SHARE_TICKS,
    Axis,
    LineFigure,
    Rule,
    Section,
    Series,
    Table,
)
from jaxserve.measure.report.latency_figures import NAMES
from jaxserve.measure.report.scales import nice_top, say, say_share, say_time, time_unit

LATENCIES: Final = ("ttft", "itl", "tpot", "e2e")
QUANTILES: Final = ("p50", "p95", "p99")


def build_section(result: Mapping[str, Any], limits: Limits) -> Section:
    load, points = read_points(result)
    figures: list[LineFigure] = []
    absent = []
    if points:
        figures += [_goodput(result, load, points), _attainment(result, load, points)]
        for name in LATENCIES:
            figure = _latency(name, load, points, limits)
            if figure is None:
                absent.append(f"{NAMES[name][0]}: no point has one.")
            else:
                figures.append(figure)
    else:
        absent.append("The sweep has no points.")
    return Section(key="sweep", title="By load", figures=figures, absent=absent)


def read_points(
    result: Mapping[str, Any],
) -> tuple[str, list[tuple[float, Mapping[str, Any]]]]:
    """Returns what the load is, and the points in its order."""
    points = [facts.mapping(point) for point in facts.items(result, "points")]
    for field, label in (
        ("requests_per_s", "requests/s offered"),
        ("concurrency", "requests in flight"),
        ("rate_scale", "times the workload's rate"),
    ):
        loads = [facts.number(point, field) for point in points]
        if points and all(load is not None for load in loads):
            pairs = [(load or 0.0, point) for load, point in zip(loads, points, strict=True)]
            return label, sorted(pairs, key=lambda pair: pair[0])
    return "load", []


_Points = Sequence[tuple[float, Mapping[str, Any]]]


def _goodput(result: Mapping[str, Any], load: str, points: _Points) -> LineFigure:
    goodput, raw = (
        [(at, facts.count(point, name)) for at, point in points]
        for name in ("goodput", "raw_throughput")
    )
    return LineFigure(
        key="sweep-goodput",
        title="Goodput by load",
        about="Output tokens per second of requests that met every limit (no quality gate), and of "
        "all requests beside it. Where the two part, more load makes more tokens and fewer that "
        "count.",
        x=_load_axis(load, points),
        y=Axis(label="output tokens/s", low=0, high=nice_top(max(y for _, y in goodput + raw))),
        series=[
            Series(name="goodput (no quality gate)", points=goodput, shape="dots"),
            Series(name="raw throughput", points=raw, shape="dots"),
        ],
        rules=_best_rule(result, points),
        table=Table(
            head=(load, "goodput, tokens/s", "raw, tokens/s", "attainment", "file"),
            rows=[
                [
                    say(at),
                    say(facts.number(point, "goodput")),
                    say(facts.number(point, "raw_throughput")),
                    say_share(facts.number(point, "attainment")),
                    facts.text(point, "file"),
                ]
                for at, point in points
            ],
        ),
    )


def _attainment(result: Mapping[str, Any], load: str, points: _Points) -> LineFigure:
    wanted = facts.number(result, "search", "attainment")
    rules = list(_best_rule(result, points))
    if wanted is not None:
        rules.append(Rule(label=f"wanted: {say_share(wanted)}", value=100 * wanted, axis="y"))
    shares = [(at, 100 * facts.count(point, "attainment")) for at, point in points]
    return LineFigure(
        key="sweep-attainment",
        title="Attainment by load",
        about="Requests that ended ok and met every limit, of those sent. The highest load whose "
        "point is on or above the wanted share is the sweep's answer.",
        x=_load_axis(load, points),
        y=Axis(label="% of requests", low=0, high=100, ticks=SHARE_TICKS),
        series=[Series(name="attainment", points=shares, shape="dots")],
        rules=rules,
        table=Table(
            head=(load, "sent", "ok", "attainment"),
            rows=[
                [
                    say(at),
                    say(facts.number(point, "outcomes", "sent")),
                    say(facts.number(point, "outcomes", "ok")),
                    say_share(facts.number(point, "attainment")),
                ]
                for at, point in points
            ],
        ),
    )


def _latency(name: str, load: str, points: _Points, limits: Limits) -> LineFigure | None:
    lines = {
        part: [
            (at, value)
            for at, point in points
            if (value := facts.number(point, "latency", name, part)) is not None
        ]
        for part in QUANTILES
    }
    values = [value for line in lines.values() for _, value in line]
    if not values:
        return None
    known = [limit for limit in limits.common if limit.quantity == name and limit.max_s is not None]
    factor, unit = time_unit(max(values))
    high = max(values)
    # a limit far above the lines would flatten them: its value is told in the table's note
    shown = [limit for limit in known if (limit.max_s or 0.0) <= 4 * high]
    high = max([high, *(limit.max_s or 0.0 for limit in shown)])
    title, about = NAMES[name]
    far = [limit.text for limit in known if limit not in shown]
    note = f" Far above: {', '.join(far)}." if far else ""
    return LineFigure(
        key=f"sweep-{name}",
        title=title,
        about=f"{about}. Of ok requests, by load.{note}",
        x=_load_axis(load, points),
        y=Axis(label=f"time, {unit}", low=0, high=nice_top(high * factor)),
        series=[
            Series(name=part, points=[(at, y * factor) for at, y in lines[part]], shape="dots")
            for part in QUANTILES
        ],
        rules=[
            Rule(label=limit.text, value=(limit.max_s or 0.0) * factor, axis="y") for limit in shown
        ],
        table=Table(
            head=(load, *QUANTILES),
            rows=[
                [
                    say(at),
                    *(say_time(facts.number(point, "latency", name, part)) for part in QUANTILES),
                ]
                for at, point in points
            ],
        ),
    )


def _load_axis(load: str, points: _Points) -> Axis:
    return Axis(label=load, low=0, high=nice_top(max(at for at, _ in points)))


def _best_rule(result: Mapping[str, Any], points: _Points) -> Sequence[Rule]:
    scale = facts.number(result, "best", "rate_scale")
    if scale is None:
        return ()
    for at, point in points:
        if facts.number(point, "rate_scale") == scale:
            return (Rule(label=f"highest that met it: {say(at)}", value=at),)
    return ()
