"""Looks into a result without trusting it: it may be another tool's, older, or written by hand."""

import math
from collections.abc import Mapping
from typing import Any, Final

NOTHING: Final[Mapping[str, Any]] = {}


def get(whole: Any, *keys: str) -> Any:  # noqa: ANN401  # any JSON value
    """Returns what is at the end of the keys; None where one is missing."""
    for key in keys:
        if not isinstance(whole, Mapping):
            return None
        whole = whole.get(key)
    return whole


def number(whole: Any, *keys: str) -> float | None:  # noqa: ANN401
    """Returns a finite number, or None."""
    value = get(whole, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:  # JSON has no largest integer
        return None
    return value if math.isfinite(value) else None


def count(whole: Any, *keys: str) -> float:  # noqa: ANN401
    """Returns a number that is not below 0; 0 where there is none."""
    return max(0.0, number(whole, *keys) or 0.0)


def text(whole: Any, *keys: str) -> str:  # noqa: ANN401
    """Returns a value as text; "" where there is none."""
    value = get(whole, *keys)
    return "" if value is None else str(value)


def mapping(whole: Any, *keys: str) -> Mapping[str, Any]:  # noqa: ANN401
    value = get(whole, *keys)
    return value if isinstance(value, Mapping) else NOTHING


def items(whole: Any, *keys: str) -> list[Any]:  # noqa: ANN401
    value = get(whole, *keys)
    return value if isinstance(value, list) else []
