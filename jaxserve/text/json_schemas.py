"""JSON Schemas as they are sent, made ready for the grammar engine."""

from collections.abc import Callable, Mapping
from typing import Final

Schema = Mapping[str, object]

# Values that only look like schemas, and objects whose keys are names of the caller's.
_PLAIN_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:[0-9]{{4}}-(?:(?:0[13-9]|1[0-2])-[0-9]{{2}}|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
# What the engine's own formats let through, and readers refuse: a 29th of February in any year, a
# leap second at any time, a mailbox of more than 64 characters.
_NARROWER: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}",
    "time": f"^{_TIME}",
    "date-time": f"^{_DATE}[Tt]{_TIME}",
    "email": "^[^@]{1,64}@",
}


def map_schemas(schema: object, change: Callable[[Schema], Schema]) -> object:
    """Returns a schema with each one in it, itself too, changed; the innermost first.

    Objects that may or may not be schemas, such as what an unknown key holds, are changed as well:
    a reference may name them.
    """
    match schema:
        case Mapping():
            return change({key: _map_part(key, part, change) for key, part in schema.items()})
        case list() | tuple():
            return [map_schemas(part, change) for part in schema]
    return schema


def narrow_formats(schema: object) -> object:
    """Returns a schema whose days, times and mailboxes are what their standards say."""
    return map_schemas(schema, _narrow_format)


def _map_part(key: str, part: object, change: Callable[[Schema], Schema]) -> object:
    if key in _PLAIN_VALUES:
        return part
    if key in _BY_NAME and isinstance(part, Mapping):
        return {name: map_schemas(named, change) for name, named in part.items()}
    return map_schemas(part, change)


def _narrow_format(schema: Schema) -> Schema:
    name, others = schema.get("format"), schema.get("allOf", [])
    if not (isinstance(name, str) and name in _NARROWER and isinstance(others, list)):
        return schema
    return {**schema, "allOf": [*others, {"pattern": _NARROWER[name]}]}
