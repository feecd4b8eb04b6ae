"""The same figures as PNG files, drawn by matplotlib (the optional extra `plots`)."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jaxserve.errors import ConfigError, ResultError
from jaxserve.measure.report.figures import (
    NUM_COLOURS,
    BarFigure,
    Figure,
    HeatFigure,
    LineFigure,
    Series,
)
from jaxserve.measure.report.markup import shorten
from jaxserve.measure.report.scales import say
from jaxserve.measure.report.style import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INCH: Final = 7.0
DOTS_PER_INCH: Final = 150
WIDTH: Final = 60


def check_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed; install it with the extra `plots`: "
            "pip install 'jaxserve[plots]'"
        )


def write_pngs(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Writes a file for each figure, named by its key, and returns them.

    Raises:
      ConfigError: matplotlib is not installed.
      ResultError: the folder cannot be made.
    """
    check_matplotlib()
    # Figure without pyplot: no window, no backend of a screen, no global list of figures
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    paths = []
    _make_folder(folder)
    with rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        for figure in figures:
            canvas = Canvas(
                figsize=(INCH, _height(figure)), dpi=DOTS_PER_INCH, layout="constrained"
            )
            axes = canvas.add_subplot()
            axes.set_title(figure.title)
            _draw(figure, axes, canvas)
            path = folder / f"{figure.key}.png"
            canvas.savefig(path)
            paths.append(path)
    return paths


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultError(f"the folder {folder} cannot be made: {error.strerror}") from error


def _height(figure: Figure) -> float:
    match figure:
        case LineFigure():
            return 4.2
        case BarFigure():
            return 1.4 + 0.32 * len(figure.rows)
        case HeatFigure():
            return 1.6 + 0.5 * len(figure.rows)


def _draw(figure: Figure, axes: "Axes", canvas: "Canvas") -> None:
    match figure:
        case LineFigure():
            _draw_lines(figure, axes)
        case BarFigure():
            _draw_bars(figure, axes, canvas)
        case HeatFigure():
            _draw_heat(figure, axes)


def _draw_lines(figure: LineFigure, axes: "Axes") -> None:
    for place, series in enumerate(figure.series):
        _draw_series(series, place, axes)
    axes.set_xscale(figure.x.kind)
    axes.set_xlim(figure.x.low, figure.x.high)
    axes.set_ylim(figure.y.low, figure.y.high)
    axes.set_xticks(list(figure.x.places()), [say(tick) for tick in figure.x.places()])
    axes.set_yticks(list(figure.y.places()), [say(tick) for tick in figure.y.places()])
    axes.minorticks_off()
    axes.set_xlabel(figure.x.label)
    axes.set_ylabel(figure.y.label)
    axes.grid(axis="y", color="#e1e4e8")
    for place, rule in enumerate(figure.rules):
        if rule.axis == "y":
            axes.axhline(rule.value, color="#1b1f24", linestyle=":", label=rule.label)
        else:
            style = (":", "--", "-.")[place % 3]
            label = shorten(rule.label, WIDTH)
            axes.axvline(rule.value, color="#1b1f24", linestyle=style, linewidth=1, label=label)
    if len(figure.series) + len(figure.rules) > 1:
        axes.legend(fontsize=8)


def _draw_series(series: Series, place: int, axes: "Axes") -> None:
    light, _, dashes = SERIES[place % NUM_COLOURS]
    x = [point[0] for point in series.points]
    y = [point[1] for point in series.points]
    # dashes are in units of the line's width here, which is 1.5
    pattern = tuple(float(part) / 1.5 for part in dashes.split())
    style: dict[str, Any] = {"color": light, "linewidth": 1.5}
    if pattern:
        style["linestyle"] = (0, pattern)
    if series.shape == "dots":
        style |= {"marker": "o", "markersize": 4}
    if series.shape in ("steps", "area"):
        style["drawstyle"] = "steps-post"
    axes.plot(x, y, label=shorten(series.name, WIDTH), **style)
    if series.shape == "area":
        axes.fill_between(x, y, step="post", color=light, alpha=0.2, linewidth=0)


def _draw_bars(figure: BarFigure, axes: "Axes", canvas: "Canvas") -> None:
    lefts = [0.0] * len(figure.rows)
    places = range(len(figure.rows))
    for part, name in enumerate(figure.parts):
        values = [max(0.0, row.values[part]) for row in figure.rows]
        colour = SERIES[part % NUM_COLOURS][0]
        axes.barh(places, values, left=lefts, color=colour, label=shorten(name, WIDTH))
        lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    for place, row in zip(places, figure.rows, strict=True):
        axes.text(lefts[place] + 0.01 * figure.high, place, row.text, va="center", fontsize=8)
    axes.set_yticks(list(places), [shorten(row.label, WIDTH) for row in figure.rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * figure.high)  # room for the texts
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    if len(figure.parts) > 1:
        canvas.legend(fontsize=8, loc="outside lower center", ncols=len(figure.parts))


def _draw_heat(figure: HeatFigure, axes: "Axes") -> None:
    heats = [[float("nan") if cell is None else cell.heat for cell in row] for row in figure.cells]
    # half of the colours alone: the text stays readable on the darkest of them
    axes.imshow(heats, cmap="Blues", vmin=0, vmax=2, aspect="auto")
    for row, cells in enumerate(figure.cells):
        for column, cell in enumerate(cells):
            if cell is not None:
                text = f"{cell.text}\n{cell.small}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(figure.columns)), list(figure.columns))
    axes.set_yticks(range(len(figure.rows)), list(figure.rows))
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
