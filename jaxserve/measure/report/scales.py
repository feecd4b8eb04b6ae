"""Scales, ticks, paths and numbers of figures: pure functions of numbers."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal

Kind = Literal["linear", "log"]
STEPS: Final = (1.0, 2.0, 5.0, 10.0)
# Widths of a timeline's bins, seconds.
BINS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Scale:
    """Maps [low, high] to [start, stop]; what lies outside is put at the end it is behind.

    Attributes:
      kind: of log, low is above 0.
    """

    kind: Kind
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.kind == "log":
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def nice_step(span: float, count: int) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that about `count` of them are the span."""
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * (1 - 1e-9))


def nice_top(high: float, count: int = 4) -> float:
    """Returns the first tick at or above `high`; 1 where nothing is above 0."""
    if not high > 0:
        return 1.0
    step = nice_step(high, count)
    return step * math.ceil(high / step - 1e-9)


def linear_ticks(low: float, high: float, count: int = 4) -> list[float]:
    step = nice_step(high - low, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Returns powers of ten, or 1, 2 and 5 times them, as many as fit; the bounds where none do."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) <= count:
            break
    else:
        inside = inside[:: math.ceil(len(inside) / count)]
    return inside if len(inside) >= 2 else [low, high]


def log_bounds(low: float, high: float) -> tuple[float, float]:
    """Returns bounds around positive values that are not on the very edge, and never equal."""
    return low / 1.1, high * 1.1


def say(value: float | None) -> str:
    """Returns a number for people, to three digits: `12,345`, `0.0123`, `1.2e+09`; "–" of None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-6:
        return f"{value:.3g}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(size))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def say_share(share: float | None) -> str:
    """Returns a percentage; one that is not all or nothing never reads 100 % or 0 %."""
    if share is None:
        return "–"
    text = f"{100 * share:.1f}".removesuffix(".0")
    if share < 1 and text == "100":
        text = ">99.9"
    if share > 0 and text == "0":
        text = "<0.1"
    return f"{text} %"


def say_bytes(size: float | None) -> str:
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{say(size)} {unit}"
        size /= 1024
    return f"{say(size)} GiB"


def time_unit(high_s: float) -> tuple[float, str]:
    """Returns by what to multiply seconds of up to `high_s`, and the unit they are in then."""
    if high_s < 2e-3:
        return 1e6, "µs"
    return (1e3, "ms") if high_s < 2 else (1.0, "s")


def say_time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    # twice: an axis up to 1,500 ms reads better than one up to 1.5 s, a number alone does not
    factor, unit = time_unit(2 * abs(seconds))
    return f"{say(seconds * factor)} {unit}"


def bin_width_s(span_s: float, max_bins: int) -> float:
    """Returns the width of bins, of which at most `max_bins` cover the span."""
    for width_s in BINS_S:
        if span_s <= width_s * max_bins:
            return width_s
    return 3600.0 * math.ceil(span_s / 3600.0 / max_bins)


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Returns the path of straight lines from point to point."""
    words = [f"{_short(x)} {_short(y)}" for x, y in points]
    return f"M{'L'.join(words)}" if words else ""


def step_path(points: Sequence[tuple[float, float]]) -> str:
    r"""Returns the path that keeps each y until the next x.

    y    ┌──
         │
       ──┘
    """
    if not points:
        return ""
    words = [f"M{_short(points[0][0])} {_short(points[0][1])}"]
    words += [f"H{_short(x)}V{_short(y)}" for x, y in points[1:]]
    return "".join(words)


def _short(value: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")
