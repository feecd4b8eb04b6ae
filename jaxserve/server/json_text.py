"""Strangers' JSON: strictly the standard, and no deeper than what walks it later can bear."""

import json
from collections.abc import Iterable
from typing import Final, NoReturn

MAX_DEPTH: Final = 64


def parse_json(text: str | bytes) -> object:
    """Returns the value of a JSON text.

    Raises:
      ValueError: it is not UTF-8, not JSON (NaN and Infinity are not), or nested too deeply; the
        message says where and speaks of "it".
    """
    try:
        # not left to json.loads, which would take UTF-16 too
        decoded = text.decode() if isinstance(text, bytes) else text
        value = json.loads(decoded, parse_constant=_refuse_constant)
        _check_depth(value, MAX_DEPTH)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from error
    return value


def _check_depth(value: object, num_left: int) -> None:
    if num_left == 0:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    children: Iterable[object] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    for child in children:
        _check_depth(child, num_left - 1)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
