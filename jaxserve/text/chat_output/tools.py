"""The tools a caller offers, and which of them may or must be called."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NoReturn

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat_output.qwen_coder import ParameterTypes, type_name

MAX_NAME: Final = 64
_NAME: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME}}}")
_MAX_REFERENCES: Final = 8  # that are followed from one parameter to its type

Tools = Sequence[Mapping[str, object]]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ToolChoice:
    """Whether tools are called.

    Attributes:
      mode: auto: the model decides; none: no tool is offered; required: at least one call.
      function: the one that must be called, and nothing else; empty where `mode` says it all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    function: str = ""

    @property
    def is_forced(self) -> bool:
        return self.mode == "required" or bool(self.function)


AUTO: Final = ToolChoice()


def check_tools(tools: object, *, max_tools: int) -> tuple[Mapping[str, object], ...]:
    """Returns tools in OpenAI's shape, as they came.

    Raises:
      InvalidRequestError: not that shape, too many, a name twice.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        _refuse("tools is not a list; send a list of tools", "chat.tools")
    if len(tools) > max_tools:
        _refuse(f"tools has {len(tools)} entries, but the limit is {max_tools}", "chat.tools")
    checked: list[Mapping[str, object]] = []
    names: set[str] = set()
    for n, tool in enumerate(tools):
        where = f"tools[{n}]"
        match tool:
            case {"type": "function", "function": {"name": str(name)} as function}:
                pass
            case {"type": str(kind)} if kind != "function":
                _refuse(f"{where}.type is {kind[:40]!r}, but must be 'function'", "chat.tools")
            case _:
                _refuse(
                    f'{where} is not a tool, such as {{"type": "function", "function": '
                    '{"name": "add", "parameters": {"type": "object"}}}',
                    "chat.tools",
                )
        if not _NAME.fullmatch(name):
            _refuse(
                f"{where}.function.name is {name[:80]!r}, but must be 1 to {MAX_NAME} letters, "
                "digits, dots, dashes or underscores",
                "chat.tools",
            )
        if name in names:
            _refuse(f"tools has {name!r} twice; names must differ", "chat.tools")
        names.add(name)
        _check_function(function, where)
        checked.append(tool)
    return tuple(checked)


def _check_function(function: Mapping[str, object], where: str) -> None:
    if not isinstance(function.get("description") or "", str):
        _refuse(f"{where}.function.description must be a string", "chat.tools")
    if not isinstance(function.get("parameters") or {}, Mapping):
        _refuse(f"{where}.function.parameters must be a JSON Schema object", "chat.tools")


def check_tool_choice(choice: ToolChoice, tools: Tools) -> ToolChoice:
    """Returns the choice.

    Raises:
      InvalidRequestError: a call is asked for of a tool that is not offered.
    """
    names = tool_names(tools)
    if choice.is_forced and not names:
        _refuse(
            "tool_choice asks for a call, but there are no tools; send tools", "chat.tool_choice"
        )
    if choice.function and choice.function not in names:
        _refuse(
            f"tool_choice names {choice.function[:80]!r}, which is none of the tools; use one of "
            f"{', '.join(names[:8])}",
            "chat.tool_choice",
        )
    return choice


def check_tool_calls(calls: object, where: str) -> tuple[Mapping[str, object], ...]:
    """Returns an earlier turn's calls in OpenAI's shape, as they came.

    Args:
      where: the message, for errors: messages[3].

    Raises:
      InvalidRequestError: not that shape.
    """
    field = "chat.messages"
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(f"{where}.tool_calls is not a list; send a list of calls", field)
    for n, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str() | dict()}}:
                is_call = call.get("type", "function") == "function"
            case _:
                is_call = False
        if not (is_call and isinstance(call.get("id", ""), str)):
            _refuse(
                f'{where}.tool_calls[{n}] is not a call, such as {{"id": "call_1", "type": '
                '"function", "function": {"name": "add", "arguments": "{}"}}',
                field,
            )
    return tuple(calls)


def tool_names(tools: Tools) -> list[str]:
    return [str(function["name"]) for function in functions_of(tools)]


def functions_of(tools: Tools) -> Iterator[Mapping[str, object]]:
    """Yields each tool's function; the tools have been checked."""
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping), "checked"
        yield function


def parameter_types(tools: Tools) -> ParameterTypes:
    """Returns the JSON types that each function's parameters may have, as their schemas say."""
    types: dict[str, dict[str, frozenset[str]]] = {}
    for function in functions_of(tools):
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        types[str(function["name"])] = {
            name: frozenset(_types_of(part, schema, _MAX_REFERENCES))
            for name, part in (properties.items() if isinstance(properties, Mapping) else ())
        }
    return types


def _types_of(schema: object, root: object, num_left: int) -> Iterator[str]:
    """Yields the types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or num_left == 0:
        return
    match schema.get("type"):
        case str(name):
            yield name
        case [*names]:
            yield from (name for name in names if isinstance(name, str))
    match schema.get("enum"):
        case [*values] if "type" not in schema:
            yield from map(type_name, values)
    if "const" in schema and "type" not in schema:
        yield type_name(schema["const"])
    for key in ("anyOf", "oneOf", "allOf"):
        match schema.get(key):
            case [*parts]:
                for part in parts:
                    yield from _types_of(part, root, num_left - 1)
    match schema.get("$ref"):
        case str(pointer) if pointer.startswith("#/"):
            yield from _types_of(_follow(root, pointer), root, num_left - 1)


def _follow(root: object, pointer: str) -> object:
    for step in pointer.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field=field)
