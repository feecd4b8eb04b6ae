"""Values of strangers' JSON, read strictly: what is given, what is allowed, by name."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

MAX_COUNT: Final = (1 << 31) - 1
MAX_SECONDS: Final = 1e9


class FieldError(ValueError):
    """What is wrong with an object, without its place in the file."""


def parse_object(line: bytes) -> dict[str, Any]:
    """Returns the object on a line.

    Raises:
      FieldError: not UTF-8, not JSON, not an object, or a key twice.
    """
    try:
        value = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except FieldError:
        raise
    except UnicodeDecodeError as error:
        raise FieldError(f"it is not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise FieldError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (RecursionError, ValueError) as error:
        raise FieldError("it is nested too deeply, or has a number of too many digits") from error
    if not isinstance(value, dict):
        raise FieldError(f"it is {shorten(value)}, but must be an object: {{…}}")
    return value


def whole(value: object, name: str, *, low: int = 0, high: int = MAX_COUNT) -> int:
    """Returns a whole number in its range; 100, 100.0 and 1e2 are the same one.

    Raises:
      FieldError: it is none.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        ends = f"at least {low}" if high >= MAX_COUNT else f"from {low} to {high}"
        raise FieldError(f"{name} is {shorten(value)}, but must be a whole number of {ends}")
    return value


def number(value: object, name: str, *, low: float, high: float) -> float:
    """Returns a number in its range.

    Raises:
      FieldError: it is none.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise FieldError(
            f"{name} is {shorten(value)}, but must be a number from {low:g} to {high:g}"
        )
    return float(value) + 0.0  # type: ignore[arg-type]  # + 0.0: no negative zero


def shorten(value: object) -> str:
    """Returns a value for a message."""
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:37]}…"


def did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def text(found: Mapping[str, Any], name: str, default: str) -> str:
    value = found.get(name, default)
    if not isinstance(value, str):
        raise FieldError(f"{name} is {shorten(value)}, but must be a text")
    check_unicode(value, name)
    return value


def check_unicode(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FieldError(f"{name} holds a lone surrogate, but must be Unicode") from None


def word(found: Mapping[str, Any], name: str, allowed: Sequence[str], default: str) -> str:
    value = found.get(name, default)
    if value not in allowed:
        raise FieldError(f"{name} is {shorten(value)}, but must be {' or '.join(allowed)}")
    return str(value)


def check_names(found: Mapping[str, Any], known: Collection[str], *, prefix: str = "") -> None:
    for name in found:
        if name not in known:
            raise FieldError(f"{prefix}{name} is not known{did_you_mean(name, known)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError(f"{twice} stands there twice; leave one out")
    return found


def _refuse(name: str) -> NoReturn:
    raise FieldError(f"{name} is not JSON; a number is finite")
