"""The messages of a chat body: what each may hold, and the conversation that they are."""

from collections.abc import Iterable, Mapping, Sequence

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.request import ChatMessage
from jaxserve.server.openai.fields import REFUSED_IN_MESSAGES, keep_known, shorten
from jaxserve.server.openai.findings import short
from jaxserve.server.openai.parts import Message, TextPart


def tidy_messages(messages: object) -> object:
    """Returns the messages with unset fields left out; their types are still to be checked.

    Raises:
      InvalidRequestError: a message holds an unknown field, or content that is none.
      UnsupportedError: a role, a field or a part of another kind.
    """
    if not isinstance(messages, list):
        return messages
    return [_tidy(message, f"messages[{n}]") for n, message in enumerate(messages)]


def read_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Returns the conversation.

    Raises:
      InvalidRequestError: a message lacks what its role needs, or has what it cannot have.
    """
    return tuple(_read(message, f"messages[{n}]") for n, message in enumerate(messages))


def _tidy(message: object, path: str) -> object:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "function":
        raise UnsupportedError(
            f"{path}.role is 'function', which is older than tools; use 'tool' with a tool_call_id",
            field=f"{path}.role",
        )
    kept = keep_known(
        message, supported=Message.model_fields, refused=REFUSED_IN_MESSAGES, prefix=f"{path}."
    )
    content = kept.get("content", "")
    if not isinstance(content, str | list):
        raise InvalidRequestError(
            f"{path}.content is {short(content)}, but must be a string or a list of text parts",
            field=f"{path}.content",
        )
    for n, part in enumerate(content if isinstance(content, list) else ()):
        _check_part(part, f"{path}.content[{n}]")
    return kept


def _check_part(part: object, path: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not (isinstance(part, Mapping) and isinstance(kind, str)):
        raise InvalidRequestError(
            f'{path} is not a part of a message, such as {{"type": "text", "text": "Hi"}}',
            field=path,
        )
    if kind != "text":
        raise UnsupportedError(
            f"{path}.type is {shorten(kind)!r}, but this version reads only parts of type 'text'; "
            "leave the others out",
            field=f"{path}.type",
        )
    kept = keep_known(part, supported=TextPart.model_fields, refused={}, prefix=f"{path}.")
    if not isinstance(kept.get("text"), str):
        raise InvalidRequestError(f"{path}.text must be a string", field=f"{path}.text")


def _read(message: Message, path: str) -> ChatMessage:
    is_assistant = message.role == "assistant"
    if message.content is None and not message.tool_calls:
        raise InvalidRequestError(
            f"{path}.content is missing, but required", field=f"{path}.content"
        )
    if (message.role == "tool") != bool(message.tool_call_id):
        raise InvalidRequestError(
            f"{path}.tool_call_id goes with the role 'tool'; it says which call is answered",
            field=f"{path}.tool_call_id",
        )
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (("tool_calls", message.tool_calls), ("reasoning_content", reasoning)):
        if value and not is_assistant:
            raise InvalidRequestError(
                f"{path}.{name} is for the role 'assistant', but this is {message.role!r}; "
                "leave it out",
                field=f"{path}.{name}",
            )
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=message.text,
        name=message.name,
        tool_calls=tuple(_calls(message)),
        tool_call_id=message.tool_call_id,
        reasoning=reasoning,
    )


def _calls(message: Message) -> Iterable[Mapping[str, object]]:
    for call in message.tool_calls:
        function = {"name": call.function.name, "arguments": call.function.arguments}
        yield {"id": call.id, "type": call.type, "function": function}
