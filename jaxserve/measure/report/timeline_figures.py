"""The load and the server over the time of one repeat."""

import bisect
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import Axis, LineFigure, Rule, Section, Series, Table
from jaxserve.measure.report.observed import TICK_S, Observed
from jaxserve.measure.report.scales import bin_width_s, nice_top, say

MAX_BINS: Final = 120
MAX_ROWS: Final = 40

Points = list[tuple[float, float]]


def choose_repeat(result: Mapping[str, Any]) -> int:
    """Returns the repeat whose goodput is the median (the lower of two): one of them was run."""
    each = facts.items(result, "repeats", "each")
    order = sorted(range(len(each)), key=lambda place: facts.count(each[place], "goodput"))
    return order[(len(order) - 1) // 2] if order else 0


def build_section(result: Mapping[str, Any], observed: Observed | None) -> Section:
    repeat = choose_repeat(result)
    samples = [
        sample
        for sample in facts.items(result, "timeline")
        if facts.number(sample, "repeat") == repeat and facts.number(sample, "time_s") is not None
    ]
    samples.sort(key=lambda sample: facts.count(sample, "time_s"))
    figures = [
        *(_client_figures(observed) if observed is not None and len(observed.sent_s) else ()),
        *_server_figures(result, samples),
    ]
    absent = []
    if observed is None or not len(observed.sent_s):
        absent.append("Arrivals, requests in flight, output tokens: no requests' file beside it.")
    there = {figure.key for figure in figures}
    absent += [
        f"{title}: the server does not tell it."
        for key, title, *_ in SERVER_LEVELS
        if f"time-{key}" not in there
    ]
    number = len(facts.items(result, "repeats", "each"))
    which = f" (repeat {repeat + 1} of {number}: the median by goodput)" if number > 1 else ""
    return Section(key="timeline", title=f"Over time{which}", figures=figures, absent=absent)


def _client_figures(observed: Observed) -> Iterator[LineFigure]:
    span_s = max(max(observed.end_s), max(observed.intended_s))
    width_s = bin_width_s(span_s, MAX_BINS)
    last_s = max(observed.intended_s)
    rules = [Rule(label="last one due", value=last_s)] if last_s < 0.9 * span_s else []
    unit = f"per {say(width_s)} s, as a rate" if width_s != 1 else "each second"
    yield _figure(
        "arrivals",
        "Arrivals and sends",
        "Requests that were due by the workload, and those that this tool sent. Where the two "
        f"differ, the tool was late, not the server. Counted {unit}.",
        "requests/s",
        [
            Series(name="due", points=_rates(observed.intended_s, width_s, span_s), shape="area"),
            Series(name="sent", points=_rates(observed.sent_s, width_s, span_s), shape="steps"),
        ],
    )
    yield _figure(
        "in-flight",
        "Requests in flight",
        "Sent and not ended, as the client sees it. A line that only rises: the load is more than "
        f"the server can do. The most in each {say(width_s)} s.",
        "requests",
        [Series(name="in flight", points=_in_flight(observed, width_s, span_s), shape="steps")],
        rules,
    )
    yield _figure(
        "tokens",
        "Output tokens",
        "Tokens as they were read, and those among them of requests that met every limit: what is "
        f"between the two lines does not count as goodput. Counted {unit}.",
        "tokens/s",
        [
            Series(
                name="all", points=_token_rates(observed.tokens, width_s, span_s), shape="steps"
            ),
            Series(
                name="of compliant requests",
                points=_token_rates(observed.compliant_tokens, width_s, span_s),
                shape="area",
            ),
        ],
        rules,
    )


# Key, title, field of a sample, unit, factor, what it says.
SERVER_LEVELS: Final[Sequence[tuple[str, str, str, str, float, str]]] = (
    ("queue", "Queue", "waiting", "requests", 1.0,
     "Requests that wait for a row or for pages. The wait is the queue phase of each."),
    ("rows", "Batch rows", "running", "rows", 1.0,
     "Requests that hold a row of the batch: each step computes for these."),
    ("kv", "KV use", "kv_usage", "% of the pool's pages", 100.0,
     "Pages in use. At 100 % sequences are preempted and computed again."),
    ("memory", "Memory of the server's process", "memory_bytes", "GiB", 1 / 2**30,
     "Resident memory of the process on the host."),
)  # fmt: skip


def _server_figures(
    result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> Iterator[LineFigure]:
    for key, title, field, unit, factor, about in SERVER_LEVELS:
        found = [
            (facts.count(sample, "time_s"), value * factor)
            for sample in samples
            if (value := facts.number(sample, field)) is not None
        ]
        if not found:
            continue
        width_s = bin_width_s(found[-1][0] or 1.0, MAX_BINS)
        rules = []
        rows = _max_rows(facts.mapping(result, "manifest", "config"))
        if key == "rows" and rows:
            rules.append(Rule(label=f"all {say(rows)} rows", value=rows, axis="y"))
        yield _figure(
            key,
            title,
            f"{about} Looked at about every second; the most in each {say(max(1.0, width_s))} s.",
            unit,
            [Series(name=title, points=_highest(found, width_s), shape="steps")],
            rules,
            high=100.0 if key == "kv" else 0.0,
        )


def _max_rows(config: Mapping[str, Any]) -> float | None:
    """Returns the rows of the batch; a server elsewhere tells them as text."""
    told = facts.text(config, "max_seqs")
    return facts.number(config, "scheduler", "max_seqs") or (
        float(told) if told.isdecimal() and len(told) < 10 else None
    )


def _figure(
    key: str,
    title: str,
    about: str,
    unit: str,
    series: Sequence[Series],
    rules: Sequence[Rule] = (),
    *,
    high: float = 0.0,
) -> LineFigure:
    end_s = max((x for one in series for x, _ in one.points), default=1.0)
    tops = [y for one in series for _, y in one.points]
    tops += [rule.value for rule in rules if rule.axis == "y"]
    high = high or nice_top(max(tops, default=1.0))
    is_few = unit in ("requests", "rows") and high <= 4  # no half of one
    return LineFigure(
        key=f"time-{key}",
        title=title,
        about=about,
        x=Axis(label="s since the start", low=0, high=max(end_s, 1e-3)),
        y=Axis(label=unit, low=0, high=high, ticks=range(int(high) + 1) if is_few else ()),
        series=series,
        rules=rules,
        table=_build_table(series, unit),
    )


def _build_table(series: Sequence[Series], unit: str) -> Table:
    times = sorted({x for one in series for x, _ in one.points})
    step = -(-len(times) // MAX_ROWS)
    columns = [dict(one.points) for one in series]
    return Table(
        head=("s", *(f"{one.name}, {unit}" for one in series)),
        rows=[
            [say(round(time_s, 3)), *(say(column.get(time_s)) for column in columns)]
            for time_s in times[:: max(1, step)]
        ],
    )


def _rates(times_s: Sequence[float], width_s: float, span_s: float) -> Points:
    counts = collections.Counter(int(time_s / width_s + 1e-9) for time_s in times_s)
    return _steps(lambda place: counts[place] / width_s, width_s, span_s)


def _token_rates(ticks: Mapping[int, int], width_s: float, span_s: float) -> Points:
    counts: collections.Counter[int] = collections.Counter()
    for tick, number in ticks.items():
        counts[int((tick + 0.5) * TICK_S / width_s)] += number
    return _steps(lambda place: counts[place] / width_s, width_s, span_s)


def _in_flight(observed: Observed, width_s: float, span_s: float) -> Points:
    """Returns the most in flight in each bin; of two at one time the end comes first, as where a
    closed loop sends the next."""
    events = sorted(
        [(time_s, 1) for time_s in observed.sent_s] + [(time_s, -1) for time_s in observed.end_s]
    )
    most: dict[int, int] = {}
    level, place = 0, 0
    for time_s, change in events:
        here = int(time_s / width_s + 1e-9)
        for between in range(place, here + 1):
            most[between] = max(most.get(between, 0), level)
        level += change
        place = here
        most[here] = max(most[here], level)
    return _steps(lambda place: float(most.get(place, 0)), width_s, span_s)


def _steps(height: Callable[[int], float], width_s: float, span_s: float) -> Points:
    """Returns a step's start and height for each bin, and the end of the last."""
    number = max(1, int(span_s / width_s + 1e-9) + 1)
    points = [(place * width_s, height(place)) for place in range(number)]
    return [*points, (number * width_s, points[-1][1])]


def _highest(found: Points, width_s: float) -> Points:
    """Returns the samples, of those that share a bin the highest."""
    edges = [place * width_s for place in range(int(found[-1][0] / width_s) + 2)]
    highest: dict[int, tuple[float, float]] = {}
    for time_s, value in found:
        place = bisect.bisect_right(edges, time_s) - 1
        before = highest.get(place)
        if before is None:
            highest[place] = (time_s, value)
        else:
            highest[place] = (before[0], max(before[1], value))
    return list(highest.values())
