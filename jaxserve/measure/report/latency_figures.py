"""The distributions of latencies, with the limits as lines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.limits import Limit, Limits
from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import (
    NUM_COLOURS,
    SHARE_TICKS,
    Axis,
    LineFigure,
    Rule,
    Section,
    Series,
    Table,
)
from jaxserve.measure.report.observed import Curve, Observed
from jaxserve.measure.report.scales import log_bounds, nice_top, say, say_time, time_unit

NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "ttft": (
        "Time to first token",
        "From when a request was due to its first token: what a reader waits before anything shows",
    ),
    "itl": (
        "Inter-token latency",
        "The gap before each token; tokens that came in one message share its gap evenly",
    ),
    "gap": (
        "Gap between messages",
        "The silence before each message, however many tokens it carried: stalls and coalescing",
    ),
    "tpot": (
        "Time per output token",
        "A request's mean gap between tokens after the first: how fast it reads",
    ),
    "e2e": ("End to end", "From when a request was due to its last byte"),
}
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
LONG_TAIL: Final = 12.0  # largest ÷ median: then the axis is logarithmic
# Where only the result is there: what it tells of a distribution.
KNOWN: Final = (
    ("min", 0.0),
    ("p50", 0.5),
    ("p90", 0.9),
    ("p95", 0.95),
    ("p99", 0.99),
    ("max", 1.0),
)


def build_section(result: Mapping[str, Any], observed: Observed | None, limits: Limits) -> Section:
    figures, absent = [], []
    for name in NAMES:
        figure = _build_figure(name, result, observed, limits)
        if figure is None:
            absent.append(f"{NAMES[name][0]}: no ok request has one.")
        elif name != "gap" or _is_gap_told(observed, limits):
            figures.append(figure)
    if "gap" in NAMES and not any(figure.key == "cdf-gap" for figure in figures):
        absent.append(
            "Gap between messages: the same as the inter-token latency here, or no requests to see."
        )
    return Section(key="latency", title="Latency", figures=figures, absent=absent)


def _is_gap_told(observed: Observed | None, limits: Limits) -> bool:
    """Returns whether the gaps say something that the inter-token latencies do not."""
    if any(limit.quantity == "gap" for _, limit in _each_limit(limits)):
        return True
    if observed is None:
        return False
    gap, itl = (observed.curves.get((name, None), Curve()) for name in ("gap", "itl"))
    return gap.total != itl.total


def _build_figure(
    name: str, result: Mapping[str, Any], observed: Observed | None, limits: Limits
) -> LineFigure | None:
    lines = _known_lines(result, name) if observed is None else list(_curves(observed, name))
    if not lines or not lines[0][1]:
        return None
    known = [(text, limit) for text, limit in _each_limit(limits) if limit.quantity == name]
    bounds = [value for _, points, _ in lines for value, _ in points]
    values = bounds + [limit.max_s for _, limit in known if limit.max_s is not None]
    median_s = facts.number(result, "latency", name, "p50") or max(bounds)
    is_log = min(bounds) > 0 and max(bounds) > LONG_TAIL * max(median_s, 1e-9)
    factor, unit = time_unit(max(values))
    title, about = NAMES[name]
    return LineFigure(
        key=f"cdf-{name}",
        title=title,
        about=_about(about, result, name, observed),
        x=_time_axis([value * factor for value in values], unit, is_log=is_log),
        y=Axis(label="share at or below, %", low=0, high=100, ticks=SHARE_TICKS),
        series=[
            Series(
                name=label,
                points=[(value * factor, 100 * share) for value, share in points],
                shape="steps" if is_whole else "dots",
            )
            for label, points, is_whole in lines
        ],
        rules=[
            Rule(label=text, value=limit.max_s * factor)
            for text, limit in known
            if limit.max_s is not None
        ],
        table=_build_table(name, result, observed),
    )


def _about(about: str, result: Mapping[str, Any], name: str, observed: Observed | None) -> str:
    number = facts.number(result, "latency", name, "count")
    ok, sent = (facts.number(result, "outcomes", part) for part in ("ok", "sent"))
    what = f"{about}. {say(number)} values of {say(ok)} ok requests, out of {say(sent)} sent."
    if observed is None:
        return f"{what} Only the marked points are known: the requests' own file is not there."
    if len(observed.classes) >= NUM_COLOURS:
        return f"{what} The {NUM_COLOURS - 1} largest classes have lines; all are in the first."
    return what


def _curves(
    observed: Observed, name: str
) -> Iterator[tuple[str, Sequence[tuple[float, float]], bool]]:
    for key in (None, *observed.classes[: NUM_COLOURS - 1]):
        curve = observed.curves.get((name, key))
        if curve is not None and curve.total:
            yield _class_name(key), curve.points(), True


def _known_lines(
    result: Mapping[str, Any], name: str
) -> list[tuple[str, Sequence[tuple[float, float]], bool]]:
    found = [(facts.number(result, "latency", name, part), share) for part, share in KNOWN]
    points = [(value, share) for value, share in found if value is not None and value >= 0]
    return [(_class_name(None), sorted(points), False)] if points else []


def _class_name(key: str | None) -> str:
    if key is None:
        return "all requests"
    return f"class {key}" if key else "no class"


def _each_limit(limits: Limits) -> Iterator[tuple[str, Limit]]:
    """Yields each limit once, with the words that stand at its line."""
    for limit in limits.common:
        yield _limit_text(limit), limit
    for name, own in sorted(limits.classes.items()):
        for limit in own:
            if limit not in limits.common:
                yield f"{name}: {_limit_text(limit)}", limit


def _limit_text(limit: Limit) -> str:
    name = limit.text.partition("=")[0]
    # a quantile of each request's own values, where the curve is of everybody's
    of_each = " each" if limit.share is not None else ""
    return f"{name} ≤ {say_time(limit.max_s)}{of_each}"


def _time_axis(values: Sequence[float], unit: str, *, is_log: bool) -> Axis:
    if is_log:
        low, high = log_bounds(min(values), max(values))
        return Axis(label=f"time, {unit}, logarithmic", low=low, high=high, kind="log")
    return Axis(label=f"time, {unit}", low=0, high=nice_top(max(values)))


def _build_table(name: str, result: Mapping[str, Any], observed: Observed | None) -> Table:
    found = facts.mapping(result, "latency", name)
    rows = [
        [
            _class_name(None),
            say(facts.number(found, "count")),
            *(say_time(facts.number(found, part)) for part in ("mean", "p50", "p90", "p95", "p99")),
            say_time(facts.number(found, "max")),
        ]
    ]
    for key in observed.classes if observed else ():
        curve = observed.curves.get((name, key)) if observed else None
        if curve is not None:
            quantiles = curve.quantiles((*QUANTILES, 1.0))
            rows.append([_class_name(key), say(curve.total), "–", *map(say_time, quantiles)])
    return Table(head=("", "values", "mean", "p50", "p90", "p95", "p99", "max"), rows=rows[:40])
