"""Figures as inline SVG. Colours are CSS classes, so that one drawing serves light, dark and print.

A drawing is 360 units wide, about what a phone shows, so that its text is readable there.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from jaxserve.measure.report.figures import (
    NUM_COLOURS,
    Axis,
    BarFigure,
    BarRow,
    Cell,
    Figure,
    HeatFigure,
    LineFigure,
    Rule,
    Series,
)
from jaxserve.measure.report.markup import Markup, element, join, shorten, void
from jaxserve.measure.report.scales import Scale, line_path, say, step_path

WIDTH: Final = 360.0
HEIGHT: Final = 230.0
CHARACTER: Final = 6.9  # how wide one is at most, of the 12 units high text
ROW: Final = 32.0  # of a bar with its label
CELL: Final = 36.0
TIP_WIDTH: Final = 200
# Opacity of a heat map's colour: at most so much that text on it keeps a contrast of 4.5 to 1.
HEAT_LOW: Final = 0.05
HEAT_SPAN: Final = 0.57


def draw(figure: Figure) -> Markup:
    match figure:
        case LineFigure():
            return _draw_lines(figure)
        case BarFigure():
            return _draw_bars(figure)
        case HeatFigure():
            return _draw_heat(figure)


def swatch(place: int, shape: str) -> Markup:
    """Returns a legend's sample of a series or a part."""
    if shape == "bar":
        inner = void("rect", {"width": 22, "height": 10, "y": 1, "class": f"bar c{_colour(place)}"})
    else:
        inner = void("path", {"d": "M0 6H22", "class": f"line c{_colour(place)}"})
    return element(
        "svg", {"viewBox": "0 0 22 12", "width": 22, "height": 12, "aria-hidden": "true"}, inner
    )


def _svg(figure: Figure, height: float, parts: Iterator[Markup]) -> Markup:
    title_id, about_id = f"{figure.key}-title", f"{figure.key}-about"
    return element(
        "svg",
        {
            "viewBox": f"0 0 {WIDTH:g} {height:g}",
            "role": "img",
            "aria-labelledby": f"{title_id} {about_id}",
            "class": "plot",
        },
        element("title", {"id": title_id}, figure.title),
        element("desc", {"id": about_id}, figure.about),
        join(parts),
    )


def _text(x: float, y: float, text: str, names: str = "") -> Markup:
    place: dict[str, str | float] = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return element("text", {**place, "class": names} if names else place, text)


def _colour(place: int) -> int:
    return place % NUM_COLOURS


def _draw_lines(figure: LineFigure) -> Markup:
    y_labels = [say(tick) for tick in figure.y.places()]
    left = 12 + CHARACTER * max(map(len, y_labels))
    right, top, bottom = WIDTH - 14, 26.0, HEIGHT - 40
    x = _scale(figure.x, left, right)
    y = _scale(figure.y, bottom, top)

    def parts() -> Iterator[Markup]:
        for tick, label in zip(figure.y.places(), y_labels, strict=True):
            yield void("path", {"d": f"M{left:.1f} {y.at(tick):.1f}H{right:g}", "class": "grid"})
            yield _text(left - 6, y.at(tick) + 4, label, "end")
        for place, label, middle in _spaced(figure.x.places(), x):
            yield void("path", {"d": f"M{place:.1f} {bottom:g}v4", "class": "tick"})
            yield _text(middle, bottom + 17, label, "mid")
        yield void("path", {"d": f"M{left:.1f} {bottom:g}H{right:g}", "class": "axis"})
        yield _text(2, 14, figure.y.label, "label")
        yield _text(right, HEIGHT - 6, figure.x.label, "label end")
        for place, series in enumerate(figure.series):
            yield from _series(series, _colour(place), x, y)
        yield from _rules(figure.rules, x, y)

    return _svg(figure, HEIGHT, parts())


def _scale(axis: Axis, start: float, stop: float) -> Scale:
    return Scale(kind=axis.kind, low=axis.low, high=axis.high, start=start, stop=stop)


def _spaced(ticks: Sequence[float], scale: Scale) -> Iterator[tuple[float, str, float]]:
    """Yields place, label and the label's middle, of ticks whose labels do not touch."""
    end = -1e9
    for tick in ticks:
        label = say(tick)
        half = CHARACTER * len(label) / 2
        place = scale.at(tick)
        middle = min(place, WIDTH - half)
        if middle - half > end:
            yield place, label, middle
            end = middle + half + 4


def _series(series: Series, colour: int, x: Scale, y: Scale) -> Iterator[Markup]:
    points = [(x.at(across), y.at(up)) for across, up in series.points]
    if not points:
        return
    path = step_path(points) if series.shape in ("steps", "area") else line_path(points)
    if series.shape == "area":
        floor = f"L{points[-1][0]:.1f} {y.start:.1f}H{points[0][0]:.1f}Z"
        yield void("path", {"d": path + floor, "class": f"area c{colour}"})
    yield void("path", {"d": path, "class": f"line c{colour}"})
    if series.shape == "dots" or len(points) == 1:
        for across, up in points:
            yield void(
                "circle",
                {"cx": f"{across:.1f}", "cy": f"{up:.1f}", "r": 3, "class": f"bar c{colour}"},
            )
    for (across, _), spread in zip(points, series.spread, strict=False):
        if spread is not None:
            low, high = y.at(spread[0]), y.at(spread[1])
            whisker = f"M{across:.1f} {low:.1f}V{high:.1f}m-4 0h8M{across - 4:.1f} {low:.1f}h8"
            yield void("path", {"d": whisker, "class": f"whisker c{colour}"})


def _rules(rules: Sequence[Rule], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yields the rules; labels of upright ones hang one below the other, so that none touch."""
    upright = sorted((rule for rule in rules if rule.axis == "x"), key=lambda rule: rule.value)
    for place, rule in enumerate(upright):
        across = x.at(rule.value)
        height = y.start - 8 - 15 * (len(upright) - 1 - place)
        room_right, room_left = (
            int((room - 6) / CHARACTER) for room in (x.stop + 12 - across, across - x.start + 12)
        )
        is_left = len(rule.label) > room_right and room_left > room_right
        label = shorten(rule.label, room_left if is_left else room_right)
        yield void("path", {"d": f"M{across:.1f} {y.stop:g}V{y.start:g}", "class": "rule"})
        yield _text(
            across - 4 if is_left else across + 4, height, label, "halo end" if is_left else "halo"
        )
    for rule in rules:
        if rule.axis == "y":
            up = y.at(rule.value)
            yield void("path", {"d": f"M{x.start:.1f} {up:.1f}H{x.stop:g}", "class": "rule"})
            yield _text(x.stop, up + 14, shorten(rule.label, 44), "halo end")


def _draw_bars(figure: BarFigure) -> Markup:
    height = ROW * len(figure.rows) + 4

    def parts() -> Iterator[Markup]:
        for place, row in enumerate(figure.rows):
            yield from _bar(row, place * ROW, figure)

    return _svg(figure, height, parts())


def _bar(row: BarRow, top: float, figure: BarFigure) -> Iterator[Markup]:
    room = int(WIDTH / CHARACTER) - len(row.text) - 2
    yield _text(2, top + 14, shorten(row.label, max(8, room)))
    yield _text(WIDTH - 2, top + 14, row.text, "end num")
    yield void(
        "rect", {"x": 2, "y": f"{top + 19:g}", "width": WIDTH - 4, "height": 9, "class": "track"}
    )
    start = 2.0
    for place, value in enumerate(row.values):
        width = (WIDTH - 4) * max(0.0, value) / figure.high
        if width <= 0:
            continue
        tip = f"{figure.parts[place]}: {say(value)}" if len(figure.parts) > 1 else row.text
        yield element(
            "rect",
            {
                "x": f"{start:.1f}",
                "y": f"{top + 19:g}",
                "width": f"{max(0.5, width):.1f}",
                "height": 9,
                "class": f"bar c{_colour(place)}",
            },
            element("title", {}, shorten(f"{row.label} · {tip}", TIP_WIDTH)),
        )
        start += width


def _draw_heat(figure: HeatFigure) -> Markup:
    left = 14 + CHARACTER * max(map(len, figure.rows))
    top = 24.0
    width = min(64.0, (WIDTH - left - 4) / len(figure.columns))
    bottom = top + CELL * len(figure.rows)

    def parts() -> Iterator[Markup]:
        yield _text(2, 14, figure.y_label, "label")
        for row, (name, cells) in enumerate(zip(figure.rows, figure.cells, strict=True)):
            yield _text(left - 6, top + CELL * row + CELL / 2 + 4, name, "end")
            for column, cell in enumerate(cells):
                yield from _cell(cell, left + width * column, top + CELL * row, width)
        for column, name in enumerate(figure.columns):
            yield _text(left + width * (column + 0.5), bottom + 16, name, "mid")
        yield _text(left, bottom + 34, figure.x_label, "label")

    return _svg(figure, bottom + 40, parts())


def _cell(cell: Cell | None, x: float, y: float, width: float) -> Iterator[Markup]:
    place: dict[str, str | float] = {
        "x": f"{x + 1:.1f}",
        "y": f"{y + 1:.1f}",
        "width": f"{width - 2:.1f}",
        "height": CELL - 2,
    }
    if cell is None:
        yield void("rect", {**place, "class": "none"})
        return
    heat = {"class": "heat", "fill-opacity": f"{HEAT_LOW + HEAT_SPAN * cell.heat:.2f}"}
    yield element("rect", {**place, **heat}, element("title", {}, cell.tip))
    yield _text(x + width / 2, y + 16, cell.text, "mid")
    yield _text(x + width / 2, y + 29, cell.small, "mid small")
