"""The page: one file that asks nothing of the network and runs no script."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.report import facts, svg
from jaxserve.measure.report.figures import (
    BarFigure,
    Figure,
    HeatFigure,
    LineFigure,
    Section,
    Table,
)
from jaxserve.measure.report.markup import Markup, element, shorten, void
from jaxserve.measure.report.scales import say, say_bytes, say_share, say_time
from jaxserve.measure.report.style import STYLE

# Nothing is loaded and nothing runs, whatever may have got into a page.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
NAME_WIDTH: Final = 48
CELL_WIDTH: Final = 1000
MAX_ROWS: Final = 500  # of a table
MAX_WARNINGS: Final = 30
CARD_COLUMNS: Final = 2  # of a table that is as narrow as a figure


def build_page(result: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Returns the whole HTML; it is well-formed XML too."""
    is_sweep = facts.text(result, "kind") == "sweep"
    what = "Sweep" if is_sweep else "Run"
    model = facts.text(result, "manifest", "target", "model") or "a model without a name"
    shown = [section for section in sections if section.figures or section.tables or section.absent]
    body = [
        element(
            "header",
            {},
            element("h1", {}, f"{what} of {shorten(model, 120)}"),
            _facts(result),
            _warnings(facts.items(result, "warnings")),
            _tiles(_sweep_tiles(result) if is_sweep else _run_tiles(result)),
            element(
                "nav",
                {"aria-label": "sections"},
                *(element("a", {"href": f"#{section.key}"}, section.title) for section in shown),
                element("a", {"href": "#about"}, "Manifest and definitions"),
            ),
        ),
        element("main", {}, *map(_section, shown)),
        _footer(result),
    ]
    head = element(
        "head",
        {},
        void("meta", {"charset": "utf-8"}),
        void("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        void("meta", {"name": "color-scheme", "content": "light dark"}),
        void("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        element("title", {}, f"{what} of {shorten(model, 60)} · jaxserve"),
        element("style", {}, Markup(STYLE)),
    )
    page = element("html", {"lang": "en"}, head, element("body", {}, *body))
    return f"<!DOCTYPE html>\n{page}\n"


def _facts(result: Mapping[str, Any]) -> Markup:
    manifest = facts.mapping(result, "manifest")
    target, workload = facts.mapping(manifest, "target"), facts.mapping(manifest, "workload")
    pairs = [
        ("measured", facts.text(result, "date")),
        (
            "through",
            " ".join(filter(None, (facts.text(target, "backend"), facts.text(target, "address")))),
        ),
        ("workload", facts.text(workload, "name")),
        ("workload's hash", facts.text(workload, "hash")),
        ("load", _describe_load(result)),
        ("limits", _describe_limits(facts.mapping(manifest, "limits"))),
        ("cache at the start", facts.text(manifest, "cache_state")),
        ("hardware", _describe_hardware(facts.mapping(manifest, "hardware"))),
        ("jax", facts.text(manifest, "jax_version")),
        ("jaxserve", facts.text(manifest, "jaxserve_version")),
        ("model's digest", facts.text(manifest, "bundle_digest")),
    ]
    return element(
        "dl",
        {"class": "facts"},
        *(
            element("div", {}, element("dt", {}, name), element("dd", {}, shorten(value, 160)))
            for name, value in pairs
            if value
        ),
    )


def _describe_load(result: Mapping[str, Any]) -> str:
    load = facts.mapping(result, "manifest", "offered_load")
    rate, concurrency = facts.number(load, "requests_per_s"), facts.number(load, "concurrency")
    number = facts.number(result, "manifest", "workload", "num_requests")
    requests = f", {say(number)} requests" if number else ""
    repeats = facts.number(result, "manifest", "repeats")
    times = f", {say(repeats)} repeats" if repeats and repeats > 1 else ""
    if facts.text(result, "kind") == "sweep":
        return f"{facts.text(load, 'arrivals')} loop, swept{requests}"
    if facts.text(load, "arrivals") == "closed":
        return f"closed loop, {say(concurrency)} in flight{requests}{times}"
    how = "all at once" if rate is None else f"{say(rate)} requests/s"
    return f"open loop, {how}{requests}{times}"


def _describe_limits(limits: Mapping[str, Any]) -> str:
    parts = [", ".join(map(str, facts.items(limits, "all")))]
    for name, own in facts.mapping(limits, "classes").items():
        parts.append(f"{name}: {', '.join(map(str, own if isinstance(own, list) else ()))}")
    return "; ".join(filter(None, parts)) or "none: every ok request is compliant"


def _describe_hardware(hardware: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_bytes')} {say_bytes(facts.number(value))}"
        if name.endswith("_bytes") and facts.number(value) is not None
        else f"{name} {value}"
        for name, value in hardware.items()
    )


def _warnings(warnings: Sequence[Any]) -> Markup:
    if not warnings:
        return Markup("")
    return element(
        "ul",
        {"class": "warnings", "aria-label": "warnings"},
        *(element("li", {}, shorten(str(warning), 600)) for warning in warnings[:MAX_WARNINGS]),
    )


_Tile = tuple[str, str, str]


def _tiles(tiles: Sequence[_Tile]) -> Markup:
    return element(
        "div",
        {"class": "tiles"},
        *(
            element(
                "div",
                {"class": "tile"},
                element("div", {"class": "name"}, name),
                element("div", {"class": "value"}, value),
                element("div", {"class": "more"}, more),
            )
            for name, value, more in tiles
        ),
    )


def _run_tiles(result: Mapping[str, Any]) -> Sequence[_Tile]:
    goodput = facts.mapping(result, "goodput")
    sent, ok = (facts.number(result, "outcomes", name) for name in ("sent", "ok"))
    lag = facts.mapping(result, "latency", "send_lag")
    tiles = [
        (
            facts.text(goodput, "label") or "goodput (no quality gate)",
            f"{say(facts.number(goodput, 'tokens_per_s'))} tokens/s",
            _interval(result, "goodput"),
        ),
        (
            "raw throughput",
            f"{say(facts.number(goodput, 'raw_tokens_per_s'))} tokens/s",
            _interval(result, "raw_throughput"),
        ),
        (
            "attainment",
            say_share(facts.number(goodput, "attainment")),
            f"{say(facts.number(goodput, 'compliant_requests'))} of {say(sent)} requests",
        ),
        ("ok requests", say(ok), f"of {say(sent)} sent"),
    ]
    for name, title in (
        ("ttft", "time to first token"),
        ("itl", "inter-token latency"),
        ("e2e", "end to end"),
    ):
        p50, p95, p99 = (
            facts.number(result, "latency", name, part) for part in ("p50", "p95", "p99")
        )
        if p50 is not None:
            tiles.append(
                (f"{title}, p95", say_time(p95), f"p50 {say_time(p50)} · p99 {say_time(p99)}")
            )
    tiles.append(("send lag, p99", say_time(facts.number(lag, "p99")), "how late this tool was"))
    joules = facts.number(result, "energy", "per_compliant_token")
    if joules is not None:
        tiles.append(("energy", f"{say(joules)} J", "per compliant output token"))
    hit_rate = facts.number(result, "tokens", "hit_rate")
    if hit_rate is not None:
        tiles.append(("prompt tokens from a cache", say_share(hit_rate), "hit rate"))
    return tiles


def _interval(result: Mapping[str, Any], name: str) -> str:
    low, high = (
        facts.number(result, "repeats", "intervals", name, part) for part in ("low", "high")
    )
    if low is None or high is None:
        return "one repeat: no interval"
    return f"95 %: {say(low)} to {say(high)}"


def _sweep_tiles(result: Mapping[str, Any]) -> Sequence[_Tile]:
    wanted = say_share(facts.number(result, "search", "attainment"))
    tiles = []
    for name, title in (
        ("best", f"highest load at {wanted}"),
        ("highest_goodput", "highest goodput"),
    ):
        point = facts.mapping(result, name)
        if not point:
            tiles.append((title, "none", "no point met it"))
            continue
        rate = facts.number(point, "requests_per_s")
        concurrency = facts.number(point, "concurrency")
        load = f"{say(rate)} requests/s" if rate is not None else f"{say(concurrency)} in flight"
        about = (
            f"{say(facts.number(point, 'goodput'))} tokens/s goodput, "
            f"{say(facts.number(point, 'raw_throughput'))} raw, attainment "
            f"{say_share(facts.number(point, 'attainment'))}"
        )
        tiles.append((title, load, about))
    resolution = say_share(facts.number(result, "search", "resolution"))
    is_within = facts.get(result, "is_within_resolution") is True
    tiles.append(
        (
            "the search",
            "ended" if is_within else "cut short",
            f"answer {'within' if is_within else 'not within'} {resolution} of the next load",
        )
    )
    return tiles


def _section(section: Section) -> Markup:
    cards = [_figure(figure) for figure in section.figures]
    wide = []
    for title, table in section.tables:
        if len(table.head) > CARD_COLUMNS or _has_words(table):
            wide.append(_fold(title, table, is_open=True))
        else:
            cards.append(element("div", {"class": "card"}, _fold(title, table, is_open=True)))
    return element(
        "section",
        {"id": section.key, "aria-labelledby": f"{section.key}-heading"},
        element("h2", {"id": f"{section.key}-heading"}, section.title),
        element("div", {"class": "grid"}, *cards) if cards else "",
        *wide,
        *(element("p", {"class": "absent"}, f"Not shown: {line}") for line in section.absent),
    )


def _figure(figure: Figure) -> Markup:
    return element(
        "figure",
        {"id": figure.key},
        element(
            "figcaption",
            {},
            element("h3", {}, figure.title),
            element("p", {}, figure.about),
            _legend(figure),
        ),
        svg.draw(figure),
        _fold("Numbers", figure.table),
    )


def _legend(figure: Figure) -> Markup:
    match figure:
        case LineFigure():
            names, shape = [series.name for series in figure.series], "line"
        case BarFigure():
            names, shape = list(figure.parts), "bar"
        case HeatFigure():
            return Markup("")
    if len(names) < 2:
        return Markup("")
    return element(
        "ul",
        {"class": "legend"},
        *(
            element(
                "li", {}, svg.swatch(place, shape), element("span", {}, shorten(name, NAME_WIDTH))
            )
            for place, name in enumerate(names)
        ),
    )


def _has_words(table: Table) -> bool:
    """Returns whether cells are sentences, which want the whole width."""
    return any(len(cell) > 40 for row in table.rows for cell in row)


def _fold(title: str, table: Table, *, is_open: bool = False, name: str = "") -> Markup:
    """Returns a table that is opened by a click.

    Args:
      name: a class of the style sheet.
    """
    attributes = {"class": name} if name else {}
    rows = [element("tr", {}, *map(_cell, row)) for row in table.rows[:MAX_ROWS]]
    if len(table.rows) > MAX_ROWS:
        more = f"and {len(table.rows) - MAX_ROWS} more"
        rows.append(element("tr", {}, element("td", {"colspan": len(table.head)}, more)))
    head = (element("th", {"scope": "col"}, name) for name in table.head)
    return element(
        "details",
        {**attributes, "open": "open"} if is_open else attributes,
        element("summary", {}, title),
        element(
            "div",
            {"class": "scroll", "tabindex": "0", "role": "group", "aria-label": title},
            element(
                "table",
                {"class": "words"} if _has_words(table) else {},
                element("thead", {}, element("tr", {}, *head)),
                element("tbody", {}, *rows),
            ),
        ),
    )


def _cell(text: str) -> Markup:
    return element("td", {}, shorten(text, CELL_WIDTH))


def _footer(result: Mapping[str, Any]) -> Markup:
    folded = [
        ("Repeats", _repeats_table(result)),
        ("Manifest: what was measured, and how", _flat_table(facts.mapping(result, "manifest"))),
        ("Definitions", _flat_table(facts.mapping(result, "definitions"))),
        ("Methods", _flat_table(facts.mapping(result, "methods"))),
        ("Search", _flat_table(facts.mapping(result, "search"))),
    ]
    return element(
        "footer",
        {"id": "about"},
        *(
            _fold(title, table, name="printed" if title.startswith("Manifest") else "")
            for title, table in folded
            if table.rows
        ),
        element(
            "p",
            {"class": "absent"},
            "Made by jaxserve report out of the result's JSON, which has every number.",
        ),
    )


def _repeats_table(result: Mapping[str, Any]) -> Table:
    each = facts.items(result, "repeats", "each")
    intervals = facts.mapping(result, "repeats", "intervals")
    if len(each) < 2:
        return Table(head=(), rows=())
    rows = []
    for name, interval in intervals.items():
        cells = [facts.number(interval, part) for part in ("value", "low", "high")]
        cells += [facts.number(repeat, name) for repeat in each[:20]]
        rows.append([name, *map(say, cells)])
    numbers = [f"repeat {number + 1}" for number in range(min(20, len(each)))]
    return Table(head=("", "mean", "95 % low", "95 % high", *numbers), rows=rows)


def _flat_table(whole: Mapping[str, Any]) -> Table:
    return Table(head=("", ""), rows=list(_flatten("", whole)) if whole else ())


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401  # any JSON value
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(f"{path}.{key}" if path else str(key), part)
    elif isinstance(value, str):
        yield path, value
    else:
        yield path, json.dumps(value)
