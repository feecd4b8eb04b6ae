"""What a figure says, whoever draws it: as SVG in the page, or through matplotlib."""

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from jaxserve.measure.report import scales

NUM_COLOURS: Final = 6
# 100 at the top of the axis needs no tick; 95 is where tails are judged.
SHARE_TICKS: Final = (0.0, 25.0, 50.0, 75.0, 95.0)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Table:
    """Numbers under a figure, ready to be shown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
      label: with its unit.
      ticks: places with a label; empty leaves them to the bounds.
    """

    label: str
    low: float
    high: float
    kind: scales.Kind = "linear"
    ticks: Sequence[float] = ()

    def places(self) -> Sequence[float]:
        if self.ticks:
            return self.ticks
        if self.kind == "log":
            return scales.log_ticks(self.low, self.high)
        return scales.linear_ticks(self.low, self.high)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Series:
    """Points of one meaning.

    Attributes:
      points: x and y, in the order of x.
      shape: steps keep a y until the next x; dots are marked and joined.
      spread: of each point, the low and the high end of its interval; empty is none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    shape: Literal["line", "steps", "area", "dots"] = "line"
    spread: Sequence[tuple[float, float] | None] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Rule:
    """A line across, such as a limit."""

    label: str
    value: float
    axis: Literal["x", "y"] = "x"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class LineFigure:
    """Lines over two axes.

    Attributes:
      key: its id and the name of its file.
      about: what it shows, in a sentence or two.
    """

    key: str
    title: str
    about: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rules: Sequence[Rule] = ()
    table: Table


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BarRow:
    """One bar.

    Attributes:
      values: lengths of its parts.
      text: what stands at its end.
    """

    label: str
    values: Sequence[float]
    text: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BarFigure:
    """Bars that lie, of one part or several.

    Attributes:
      parts: names of the parts; of a single one it is not shown.
      high: the length of a whole row.
    """

    key: str
    title: str
    about: str
    parts: Sequence[str]
    rows: Sequence[BarRow]
    high: float
    table: Table


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Cell:
    """A field of a heat map.

    Attributes:
      heat: 0 to 1.
      text, small: what stands in it.
      tip: all of it.
    """

    heat: float
    text: str
    small: str
    tip: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class HeatFigure:
    """Fields in rows and columns; None is a field that does not exist."""

    key: str
    title: str
    about: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    table: Table


Figure = LineFigure | BarFigure | HeatFigure


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Section:
    """Figures and tables under one heading.

    Attributes:
      absent: what is not shown, and why.
    """

    key: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Table]] = ()
    absent: Sequence[str] = ()
