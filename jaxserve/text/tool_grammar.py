"""The form of an output that must call tools, as the model's own chat format writes calls."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.request import StructuredOutput
from jaxserve.text.chat_output.tools import functions_of, parameter_types
from jaxserve.text.grammar_source import JSON_STYLE, OWN_KEY
from jaxserve.text.json_schemas import Schema, map_schemas, narrow_formats
from jaxserve.text.tokenizer import Tokenizer

FIELD: Final = "chat.tools_json"
MAX_CALLS: Final = 16  # of an output that must call, in formats that write several
_END_VALUE: Final = '"\\n</parameter>\\n"'
# A function without parameters takes an empty object.
_NO_PARAMETERS: Final[Mapping[str, object]] = {"type": "object", "additionalProperties": False}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Thought:
    """What a model that thinks writes before its calls.

    Attributes:
      is_open: the prompt ends inside of it, so that the output begins there.
    """

    open: str
    close: str
    is_open: bool = False


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class _Function:
    """A tool, by the parts that a grammar needs.

    Attributes:
      types: that each parameter may have, by its name; none where its schema does not say.
      is_strict: what its schema says that the grammar cannot keep is refused, not left out.
    """

    name: str
    parameters: Mapping[str, object]
    types: Mapping[str, frozenset[str]]
    is_strict: bool


def build_tool_form(
    tools: Sequence[Mapping[str, object]],
    *,
    parser: str,
    tokenizer: Tokenizer,
    function: str = "",
    thought: Thought | None = None,
) -> StructuredOutput:
    """Returns the form of one call or more, and nothing else but a thought before them.

    Args:
      tools: in OpenAI's shape, checked.
      parser: the chat format, by the name of the parser that reads it.
      function: the one that is to be called, once; empty for any, at least once.

    Raises:
      InvalidRequestError: there is no such function.
      UnsupportedError: this chat format has no form for calls.
    """
    functions = [read for read in _read(tools) if read.name == (function or read.name)]
    if not functions:
        what = f"a function {function!r}, but no tool has that name" if function else "a tool"
        raise InvalidRequestError(
            f"tool_choice asks for {what}; send it among the tools", field="chat.tool_choice"
        )
    if parser not in _FORMATS:
        raise UnsupportedError(
            f"tool_choice can force a call only in the formats {', '.join(_FORMATS)}, and this "
            "model's is not one of them; set tool_choice to auto",
            field="chat.tool_choice",
        )
    lines = [
        f"start: {_start_of(thought)}calls",
        *_FORMATS[parser](functions, _Marker(tokenizer), 1 if function else MAX_CALLS),
        *(_thought(thought, _Marker(tokenizer)) if thought else ()),
    ]
    return StructuredOutput(kind="lark", text="\n".join(lines), field=FIELD)


class _Marker:
    """Spells a format's marker: by its id where it is a special token, else as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = {tokenizer.token_bytes(id): id for id in tokenizer.special_ids}

    def __call__(self, text: str) -> str:
        token_id = self.find(text)
        return _quote(text) if token_id is None else f"<[{token_id}]>"

    def find(self, text: str) -> int | None:
        return self._special.get(text.encode())


def _hermes(functions: Sequence[_Function], marker: _Marker, most: int) -> list[str]:
    names = _rule_names(functions)
    return [
        _several("calls", "call", separator='"\\n"', most=most),
        f'call: {marker("<tool_call>")} "\\n" ({" | ".join(names)}) "\\n" {marker("</tool_call>")}',
        *_json_calls(functions, arguments="arguments"),
    ]


def _llama3(functions: Sequence[_Function], marker: _Marker, most: int) -> list[str]:
    del marker, most  # without a marker, and one call: the models are not trained on several
    calls = _json_calls(functions, arguments="parameters")
    return [f"calls: {' | '.join(_rule_names(functions))}", *calls]


def _mistral(functions: Sequence[_Function], marker: _Marker, most: int) -> list[str]:
    opened = marker("[TOOL_CALLS]")
    names = " | ".join(_rule_names(functions))
    if marker.find("[ARGS]") is None:
        return [
            f'calls: {opened} "[" list "]"',
            _several("list", "call", separator='", "', most=most),
            f"call: {names}",
            *_json_calls(functions, arguments="arguments"),
        ]
    args = marker("[ARGS]")
    return [
        _several("calls", "call", separator="", most=most),
        f"call: {opened} ({names})",
        *(
            f"{rule}: {_quote(function.name)} {args} {_inline(function.parameters, function)}"
            for rule, function in zip(_rule_names(functions), functions, strict=True)
        ),
    ]


def _qwen_coder(functions: Sequence[_Function], marker: _Marker, most: int) -> list[str]:
    lines = [
        _several("calls", "call", separator='"\\n"', most=most),
        f'call: {marker("<tool_call>")} "\\n" ({" | ".join(_rule_names(functions))}) '
        f'"</function>\\n" {marker("</tool_call>")}',
        f"text_value[suffix={_END_VALUE}]: /(?s:.*)/",
        'any_parameter: "<parameter=" /[\\w.\\-]+/ ">\\n" text_value',
    ]
    for rule, function in zip(_rule_names(functions), functions, strict=True):
        lines.append(f'{rule}: {_quote(f"<function={function.name}>")} "\\n" {rule}_parameters')
        lines += _tagged_parameters(f"{rule}_parameters", function)
    return lines


_FORMATS: Final[Mapping[str, Callable[[Sequence[_Function], _Marker, int], list[str]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen_coder": _qwen_coder,
}


def _read(tools: Sequence[Mapping[str, object]]) -> Iterator[_Function]:
    types = parameter_types(tools)
    for function in functions_of(tools):
        name, parameters = str(function["name"]), function.get("parameters")
        yield _Function(
            name=name,
            # arguments are an object, also where the schema leaves that out
            parameters={"type": "object", **parameters}
            if isinstance(parameters, Mapping)
            else _NO_PARAMETERS,
            types=types[name],
            is_strict=function.get("strict") is True,
        )


def _rule_names(functions: Sequence[_Function]) -> list[str]:
    return [f"function_{index}" for index in range(len(functions))]


def _several(rule: str, part: str, *, separator: str, most: int) -> str:
    more = f" ({separator} {part}){{0,{most - 1}}}" if most > 1 else ""
    return f"{rule}: {part}{more}"


def _json_calls(functions: Sequence[_Function], *, arguments: str) -> list[str]:
    return [
        f"{rule}: "
        + _inline(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    arguments: _move_references(function.parameters, f"#/properties/{arguments}"),
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            },
            function,
        )
        for rule, function in zip(_rule_names(functions), functions, strict=True)
    ]


def _tagged_parameters(rule: str, function: _Function) -> list[str]:
    properties = function.parameters.get("properties")
    if not isinstance(properties, Mapping):
        is_closed = function.parameters.get("additionalProperties") is False
        return [f'{rule}: ""' if is_closed else f"{rule}: any_parameter*"]
    required = function.parameters.get("required")
    needed = required if isinstance(required, list | tuple) else ()
    lines, parts = [], []
    for index, (name, schema) in enumerate(properties.items()):
        part = f"{rule}_{index}"
        parts.append(part if name in needed else f"{part}?")
        lines.append(
            f'{part}: {_quote(f"<parameter={name}>")} "\\n" {_tagged(name, schema, function)}'
        )
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *lines]


def _tagged(name: str, schema: object, function: _Function) -> str:
    """Returns the form of a parameter's value: a string stands there as it is, others as JSON."""
    types = function.types[name]
    if not isinstance(schema, Mapping) or not types:
        return "text_value"
    values = schema.get("enum")
    if isinstance(values, list | tuple) and values and all(isinstance(v, str) for v in values):
        return f"({' | '.join(map(_quote, values))}) {_END_VALUE}"
    if "string" in types:
        return "text_value"
    return f"{_inline(_with_definitions(schema, function), function)} {_END_VALUE}"


def _with_definitions(schema: Mapping[str, object], function: _Function) -> Mapping[str, object]:
    """Returns a parameter's schema with what its references may name."""
    kept = {
        key: function.parameters[key]
        for key in ("$defs", "definitions")
        if key in function.parameters
    }
    return {**schema, **kept}


def _inline(schema: Mapping[str, object], function: _Function) -> str:
    style = {**JSON_STYLE, "lenient": not function.is_strict}
    kept = narrow_formats(schema)
    assert isinstance(kept, dict)
    return f"%json {json.dumps({**kept, OWN_KEY: style})}"


def _move_references(schema: object, place: str) -> object:
    """Returns the schema as it must read at `place` of another one."""

    def move(part: Schema) -> Schema:
        reference = part.get("$ref")
        if not (isinstance(reference, str) and reference.startswith("#")):
            return part
        return {**part, "$ref": f"{place}{reference[1:]}"}

    return map_schemas(schema, move)


def _start_of(thought: Thought | None) -> str:
    if thought is None:
        return ""
    return "thought " if thought.is_open else "thought? "  # nothing makes a model think


def _thought(thought: Thought, marker: _Marker) -> list[str]:
    opening = "" if thought.is_open else f"{marker(thought.open)} "
    if marker.find(thought.close) is not None:
        return [f"thought: {opening}/(?s:.*)/ {marker(thought.close)} WHITE?", "WHITE: /\\s{1,4}/"]
    return [
        f"thought: {opening}thought_text WHITE?",
        f"thought_text[suffix={_quote(thought.close)}]: /(?s:.*)/",
        "WHITE: /\\s{1,4}/",
    ]


def _quote(text: str) -> str:
    return json.dumps(text)
