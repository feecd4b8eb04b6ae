"""Checks of one field's value, each with a message that names it and the fix."""

import ctypes
import math
import operator
from collections.abc import Sized
from numbers import Integral, Real

from jaxserve.errors import InvalidRequestError


def check_count(values: object, field: str, limit: int) -> None:
    if not isinstance(values, Sized):
        raise refusal(values, field, "a list, empty for none")
    if len(values) > limit:
        raise InvalidRequestError(
            f"{_name(field)} has {len(values)} entries, but this server's limit is {limit}; "
            "send fewer",
            field=field,
        )


def check_text(text: object, field: str, limit: int) -> int:
    """Returns the UTF-8 length of a text that is valid and within its limit."""
    if not isinstance(text, str):
        raise refusal(text, field, "text")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{_name(field)} holds a lone surrogate, but must be valid Unicode; repair the text",
            field=field,
        ) from None
    if num_bytes > limit:
        raise InvalidRequestError(
            f"{_name(field)} is {num_bytes} bytes, but the limit is {limit}; shorten it",
            field=field,
        )
    return num_bytes


def check_token_id(value: object, field: str, *, what: str, vocab_size: int) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise InvalidRequestError(f"{what} is {_short(value)}, but must be an integer", field=field)
    token_id = operator.index(value)
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{what} is {_short(token_id)}, but this model's ids are 0 to {vocab_size - 1}; "
            "use ids of its tokenizer",
            field=field,
        )
    return token_id


def check_number(
    value: object,
    field: str,
    *,
    low: float = 0.0,
    high: float,
    above: float | None = None,
    hint: str = "",
) -> float:
    """Returns a finite number in [low, high], or in (above, high]; NaN is in neither.

    A bound that came as a float32, as over gRPC, is one too: what a float32 makes of 1e20 is
    greater, and of 1e-6 smaller. Nothing else beyond a bound is.
    """
    opening = f"[{low:g}" if above is None else f"({above:g}"
    wanted = f"a number in {opening}, {high:g}]" + (f"; {hint}" if hint else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refusal(value, field, wanted)
    try:
        number = float(value)
    except OverflowError:  # an int beyond any float
        raise refusal(value, field, wanted) from None
    is_within = low <= number <= high or number in (_as_float32(low), _as_float32(high))
    if not math.isfinite(number) or not is_within or (above is not None and number <= above):
        raise refusal(value, field, wanted)
    return number


def check_integer(value: object, field: str, *, low: int, high: int, hint: str = "") -> int:
    wanted = f"an integer in [{low}, {high}]" + (f"; {hint}" if hint else "")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refusal(value, field, wanted)
    integer = operator.index(value)
    if not low <= integer <= high:
        raise refusal(value, field, wanted)
    return integer


def check_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise refusal(value, field, "true or false")
    return value


def refusal(value: object, field: str, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{_name(field)} is {_short(value)}, but must be {wanted}", field=field
    )


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value


def _name(field: str) -> str:
    return field.rpartition(".")[2]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
