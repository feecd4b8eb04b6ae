"""A conversation in the shape in which one chat template wants it."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from jaxserve.errors import InvalidRequestError
from jaxserve.request import ChatMessage
from jaxserve.text.chat import ChatTemplate

MAX_DEPTH: Final = 64  # of a call's arguments that are given to a template as an object
# What templates call an earlier turn's reasoning.
_REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
PROBED_NAME: Final = "probed_function"
PROBED_ARGUMENTS: Final[Mapping[str, str]] = {"probed_key": "probed_value"}
PROBED_TOOL: Final[Mapping[str, object]] = {
    "type": "function",
    "function": {
        "name": PROBED_NAME,
        "description": "Probed.",
        "parameters": {
            "type": "object",
            "properties": {"probed_key": {"type": "string", "description": "Probed."}},
            "required": ["probed_key"],
        },
    },
}
_ID: Final = "call00001"  # nine characters, as some templates demand
_USER: Final = ChatMessage(role="user", content="Probed.")
_CALL: Final = ChatMessage(
    role="assistant",
    content="",
    tool_calls=(
        {
            "id": _ID,
            "type": "function",
            "function": {"name": PROBED_NAME, "arguments": json.dumps(PROBED_ARGUMENTS)},
        },
    ),
)
_ANSWER: Final = ChatMessage(role="tool", content="Probed.", tool_call_id=_ID, name=PROBED_NAME)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TemplateTraits:
    """What a template does with tools; templates differ, and none says so.

    Attributes:
      renders_tools: it tells the model of the tools.
      arguments: in which form it wants a call's arguments; an object is what Hugging Face
        recommends, some older templates write a text.
      no_content: what it takes for a turn that has only calls.
      reasoning_keys: under which names it looks for an earlier turn's reasoning.
      called: a conversation in which the probed function is called, as it is rendered; empty where
        the template does not render one.
    """

    renders_tools: bool
    arguments: Literal["object", "text"] = "object"
    no_content: Literal["empty", "null", "absent"] = "empty"
    reasoning_keys: tuple[str, ...] = ()
    called: str = ""


def plain_traits(source: str) -> TemplateTraits:
    """Returns what can be said of a template for conversations without tools."""
    keys = tuple(key for key in _REASONING_KEYS if re.search(rf"[.'\"]{key}\b", source))
    return TemplateTraits(renders_tools=False, reasoning_keys=keys)


def find_traits(template: ChatTemplate, variables: Mapping[str, object]) -> TemplateTraits:
    """Returns a template's traits, found by rendering small conversations.

    Args:
      variables: what it is given besides messages and tools.
    """

    def render(*messages: ChatMessage, traits: TemplateTraits) -> str:
        names = {**variables, "tools": [PROBED_TOOL]}
        built = build_messages(messages, traits)
        try:
            return template.render(built, add_generation_prompt=True, variables=names)
        except InvalidRequestError:
            return ""

    traits = plain_traits(template.source)
    told = render(_USER, traits=traits)
    traits = dataclasses.replace(traits, renders_tools=PROBED_NAME in told)
    variants = (
        dataclasses.replace(traits, arguments=arguments, no_content=no_content)
        for arguments in ("object", "text")
        for no_content in ("empty", "null", "absent")
    )
    for variant in variants:
        text = render(_USER, _CALL, _ANSWER, traits=variant)
        if _has_call(text):
            return dataclasses.replace(variant, called=text)
    return traits


def _has_call(text: str) -> bool:
    """Whether the probed call is written as JSON, or as the template's own form."""
    # Python's spelling of an object or of null, and JSON inside of a JSON string
    is_mangled = "{'probed_key'" in text or "None" in text or r"\"probed_key" in text
    return PROBED_ARGUMENTS["probed_key"] in text and not is_mangled


def build_messages(
    messages: Sequence[ChatMessage], traits: TemplateTraits
) -> list[dict[str, object]]:
    """Returns the turns as a template sees them; keys that have no value are left out."""
    return [dict(_items_of(message, traits)) for message in messages]


def _items_of(message: ChatMessage, traits: TemplateTraits) -> Iterator[tuple[str, object]]:
    yield "role", message.role
    if message.content or not message.tool_calls or traits.no_content == "empty":
        yield "content", message.content
    elif traits.no_content == "null":
        yield "content", None
    if message.name:
        yield "name", message.name
    if message.reasoning:
        for key in traits.reasoning_keys:
            yield key, message.reasoning
    if message.tool_calls:
        yield "tool_calls", [_shape_call(call, traits) for call in message.tool_calls]
    if message.tool_call_id:
        yield "tool_call_id", message.tool_call_id


def _shape_call(call: Mapping[str, object], traits: TemplateTraits) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if traits.arguments == "object" and isinstance(arguments, str):
        arguments = _read_object(arguments)
    elif traits.arguments == "text" and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _read_object(text: str) -> object:
    """Returns the object a text stands for; the text itself where a model wrote no valid one."""
    try:
        value = json.loads(text) if text.strip() else {}
        is_object = isinstance(value, dict) and _depth(value) <= MAX_DEPTH
    except (ValueError, RecursionError):
        is_object = False
    return value if is_object else text


def _depth(value: object) -> int:
    match value:
        case dict():
            return 1 + max(map(_depth, value.values()), default=0)
        case list():
            return 1 + max(map(_depth, value), default=0)
    return 0
