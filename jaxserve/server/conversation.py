"""Conversations of messages: turns, tools, and whether the model may or must call one."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal, NoReturn

from jaxserve.config import LimitsSection
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2
from jaxserve.request import ChatMessage, ChatPrompt
from jaxserve.server.json_text import parse_json
from jaxserve.text.chat_output import (
    ToolChoice,
    check_tool_calls,
    check_tool_choice,
    check_tools,
)

MODES: Final[Mapping[int, Literal["auto", "none", "required"]]] = {
    generation_pb2.ToolChoice.MODE_UNSPECIFIED: "auto",
    generation_pb2.ToolChoice.MODE_AUTO: "auto",
    generation_pb2.ToolChoice.MODE_NONE: "none",
    generation_pb2.ToolChoice.MODE_REQUIRED: "required",
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Conversation:
    """A prompt, and what may come after it.

    Attributes:
      prompt: without the tools, where none may be called.
    """

    prompt: ChatPrompt
    tool_choice: ToolChoice


def read_conversation(message: generation_pb2.ChatPrompt, limits: LimitsSection) -> Conversation:
    """Returns what a message says.

    Raises:
      InvalidRequestError: a JSON text that is none, or of another shape; a tool choice that does
        not fit the tools.
    """
    tools = check_tools(
        _read_json(message.tools_json, "chat.tools_json", empty=[]), max_tools=limits.max_tools
    )
    choice = check_tool_choice(_read_tool_choice(message.tool_choice), tools)
    prompt = ChatPrompt(
        messages=tuple(_read_turn(turn, place) for place, turn in enumerate(message.messages)),
        add_generation_prompt=(
            message.add_generation_prompt or not message.HasField("add_generation_prompt")
        ),
        template_kwargs=_read_kwargs(message.template_kwargs_json),
        tools=() if choice.mode == "none" else tools,
    )
    return Conversation(prompt=prompt, tool_choice=choice)


def _read_tool_choice(message: generation_pb2.ToolChoice) -> ToolChoice:
    field = "chat.tool_choice.mode"
    if message.mode not in MODES:
        _refuse(f"tool_choice.mode is {message.mode}, which is no mode; leave it out", field)
    if message.function and message.mode != generation_pb2.ToolChoice.MODE_UNSPECIFIED:
        _refuse("tool_choice has both a mode and a function; leave one of them out", field)
    return ToolChoice(mode=MODES[message.mode], function=message.function)


def _read_turn(turn: generation_pb2.ChatMessage, place: int) -> ChatMessage:
    calls = _read_json(turn.tool_calls_json, "chat.messages.tool_calls_json", empty=[])
    return ChatMessage(
        role=turn.role,
        content=turn.content,
        name=turn.name,
        tool_calls=check_tool_calls(calls, f"messages[{place}]"),
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning,
    )


def _read_kwargs(text: str) -> Mapping[str, object]:
    field = "chat.template_kwargs_json"
    value = _read_json(text, field, empty={})
    if not isinstance(value, dict):
        _refuse(
            f"template_kwargs_json is a JSON {type(value).__name__}, but must be an object such as "
            '{"enable_thinking": false}',
            field,
        )
    return value


def _read_json(text: str, field: str, *, empty: object) -> object:
    if not text:
        return empty
    try:
        return parse_json(text)
    except ValueError as error:
        name = field.rpartition(".")[2]
        raise InvalidRequestError(
            f"{name} is not JSON ({error}); send a JSON text, or leave it out", field=field
        ) from error


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field=field)
