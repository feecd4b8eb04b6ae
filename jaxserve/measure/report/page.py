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
from jaxserve.measure.report.header import build_header
from jaxserve.measure.report.markup import Markup, element, shorten, void
from jaxserve.measure.report.scales import say
from jaxserve.measure.report.style import STYLE

# Nothing is loaded and nothing runs, whatever may have got into a page.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
NAME_WIDTH: Final = 48
CELL_WIDTH: Final = 1000
MAX_ROWS: Final = 500  # of a table
CARD_COLUMNS: Final = 2  # of a table that is as narrow as a figure


def build_page(result: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Returns the whole HTML; it is well-formed XML too."""
    what = "Sweep" if facts.text(result, "kind") == "sweep" else "Run"
    model = facts.text(result, "manifest", "target", "model") or "a model without a name"
    shown = [section for section in sections if section.figures or section.tables or section.absent]
    body = [
        element(
            "header",
            {},
            element("h1", {}, f"{what} of {shorten(model, 120)}"),
            *build_header(result),
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
    return _document(f"{what} of {shorten(model, 60)} · jaxserve", body)


def build_plain_page(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """Returns the HTML of figures that are of no one result.

    Args:
      lines: below the title, what was measured.
    """
    header = element(
        "header", {}, element("h1", {}, title), *(element("p", {}, line) for line in lines)
    )
    main = element("main", {}, *map(_section, sections))
    return _document(f"{title} · jaxserve", [header, main])


def _document(title: str, body: Sequence[Markup]) -> str:
    head = element(
        "head",
        {},
        void("meta", {"charset": "utf-8"}),
        void("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        void("meta", {"name": "color-scheme", "content": "light dark"}),
        void("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        element("title", {}, title),
        element("style", {}, Markup(STYLE)),
    )
    page = element("html", {"lang": "en"}, head, element("body", {}, *body))
    return f"<!DOCTYPE html>\n{page}\n"


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
