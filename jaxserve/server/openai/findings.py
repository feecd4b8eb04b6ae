"""What pydantic finds wrong with a body, as errors that name field, value and what is allowed."""

from collections.abc import Mapping
from typing import Final, NoReturn

import pydantic
import pydantic_core

from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.fields import shorten, show_name

_WANTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
    "string_unicode": "valid Unicode, without lone surrogates",
}


def wrong(message: str) -> pydantic_core.PydanticCustomError:
    """Returns an error for a validator to raise; the message follows the field's name."""
    return pydantic_core.PydanticCustomError("wrong", "{text}", {"text": message})


def refuse(error: pydantic.ValidationError, *, prefix: str = "") -> NoReturn:
    """Raises the first of pydantic's findings as one of ours.

    Args:
      prefix: path of the object in the body.
    """
    first = error.errors(include_url=False, include_context=True)[0]
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{show_name(step)}" for step in first["loc"]
    )
    path = shorten(prefix + "".join(steps).removeprefix("."))
    match first["type"]:
        case "missing":
            text = f"{path} is missing, but required"
        case "wrong":
            text = f"{path} {first['msg']}"
        case "too_short":
            text = f"{path} is an empty list, but needs at least one entry"
        case "string_too_short":
            text = f"{path} is empty, but must not be"
        case "extra_forbidden":
            text = f"{path} is not a known field; leave it out"
        case "literal_error":
            text = f"{path} is {short(first['input'])}, but must be {first['ctx']['expected']}"
        case "greater_than":
            text = f"{path} is {short(first['input'])}, but must be above {first['ctx']['gt']:g}"
        case "greater_than_equal":
            text = f"{path} is {short(first['input'])}, but must be at least {first['ctx']['ge']}"
        case kind:
            wanted = _WANTED.get(kind, first["msg"])
            text = f"{path} is {short(first['input'])}, but must be {wanted}"
    raise InvalidRequestError(text, field=path) from error


def short(value: object) -> str:
    """Returns a number or a short text as it is, and of anything longer its kind."""
    text = repr(value)
    return text if len(text) <= 40 and not isinstance(value, list | dict) else kind_of(value)


def kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"
