"""The form that a body asks of its output."""

import json

from jaxserve.errors import InvalidRequestError
from jaxserve.request import StructuredOutput
from jaxserve.server.openai.parts import ResponseFormat, StructuredOutputs

# The names that vLLM had before structured_outputs.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def read_form(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: dict[str, object],
) -> StructuredOutput | None:
    """Returns the form of the output; None where it is free.

    Args:
      guided: those of `GUIDED` that are set.

    Raises:
      InvalidRequestError: several are asked for, or one that says nothing.
    """
    asked = {
        "response_format": None if response_format is None else _read_format(response_format),
        "structured_outputs": None if structured is None else _read_structured(structured),
        **{name: _read_guided(name, value) for name, value in guided.items()},
    }
    found = {name: form for name, form in asked.items() if form is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequestError(
            f"{first} and {second} both give the output a form; leave one out", field=second
        )
    return next(iter(found.values()), None)


def _read_format(asked: ResponseFormat) -> StructuredOutput | None:
    field = "response_format.json_schema"
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        raise InvalidRequestError(
            f"{field} goes with the type 'json_schema'; send both or neither", field=field
        )
    match asked.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput(kind="json_object", field="response_format")
        case "json_schema":
            assert asked.json_schema is not None
            return StructuredOutput(
                kind="json_schema",
                text=_dump(asked.json_schema.schema_),
                field="response_format",
            )


def _read_structured(asked: StructuredOutputs) -> StructuredOutput:
    if asked.json_object is False:
        raise InvalidRequestError(
            "structured_outputs.json_object is false, which is no form; leave it out",
            field="structured_outputs.json_object",
        )
    values = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object,
    }
    found = {name: value for name, value in values.items() if value is not None}
    if len(found) != 1:
        raise InvalidRequestError(
            f"structured_outputs has {len(found)} of {', '.join(values)}; send exactly one",
            field="structured_outputs",
        )
    ((name, value),) = found.items()
    return _build(name, value, field=f"structured_outputs.{name}")


def _read_guided(name: str, value: object) -> StructuredOutput:
    return _build(GUIDED[name], value, field=name)


def _build(name: str, value: object, *, field: str) -> StructuredOutput:
    match name, value:
        case "json", str() as text:
            return StructuredOutput(kind="json_schema", text=text, field=field)
        case "json", dict() as schema:
            return StructuredOutput(kind="json_schema", text=_dump(schema), field=field)
        case "regex", str() as text:
            return StructuredOutput(kind="regex", text=text, field=field)
        case "grammar", str() as text:
            return StructuredOutput(kind="lark", text=text, field=field)
        case "choice", list() as choices:
            return StructuredOutput(kind="choice", choices=tuple(choices), field=field)
    assert name == "json_object", f"{name} has been read already"
    return StructuredOutput(kind="json_object", field=field)


def _dump(schema: dict[str, object]) -> str:
    return json.dumps(schema, ensure_ascii=False)
