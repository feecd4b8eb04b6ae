"""The request bodies of `/v1/chat/completions` and `/v1/completions`, with vLLM's extras.

Here is checked what each field is; its range and the model's limits are the engine's to check.
Null is unset everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, NoReturn

import pydantic
import pydantic_core

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.server.openai.fields import (
    HARMLESS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    keep_known,
    shorten,
)

MAX_PROMPTS: Final = 256  # of one completions body; each is a request of its own

Prompt = str | tuple[int, ...]


class TextPart(pydantic.BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(pydantic.BaseModel):
    """One turn. `developer` is the system's newer name, which templates do not know."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str = ""

    @property
    def text(self) -> str:
        """The content as one text: parts are joined by newlines, as vLLM does."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


def _as_list(value: object) -> object:
    if value is not None and not isinstance(value, str | list):
        raise _wrong(f"is {_short(value)}, but must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


class _Body(pydantic.BaseModel):
    """What both kinds have. None is unset: the model's own default holds, then ours."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        list[str] | None,
        pydantic.BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = None
    logit_bias: dict[str, float] | None = None
    # vLLM's extras
    top_k: int | None = pydantic.Field(None, description="0 or -1 is off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = pydantic.Field(0, description="Higher runs first, as everywhere in jaxserve.")
    return_token_ids: bool = pydantic.Field(
        False, description="Adds the output's token_ids to each choice."
    )


class ChatBody(_Body):
    """`/v1/chat/completions`; max_tokens unset is the rest of the context."""

    messages: list[Message] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None


class CompletionBody(_Body):
    """`/v1/completions`; max_tokens unset is 16, as OpenAI has it."""

    prompt: Annotated[
        tuple[Prompt, ...],
        pydantic.PlainValidator(
            lambda value: _read_prompts(value),
            json_schema_input_type=str | list[int] | list[str] | list[list[int]],
        ),
    ]


ENDPOINTS: Final[Mapping[str, type[ChatBody] | type[CompletionBody]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


def read_body(
    kind: type[ChatBody] | type[CompletionBody], body: object
) -> ChatBody | CompletionBody:
    """Returns the body of a parsed JSON document.

    Raises:
      InvalidRequestError: not an object, a field of a wrong kind, an unknown field.
      UnsupportedError: a field that this version refuses by name.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"the body is {_kind(body)}, but must be a JSON object")
    is_chat = kind is ChatBody
    known = keep_known(
        body,
        supported=kind.model_fields,
        refused=REFUSED_IN_CHAT if is_chat else REFUSED_IN_COMPLETIONS,
        harmless=HARMLESS,
    )
    if is_chat and "messages" in known:
        known["messages"] = _read_messages(known["messages"])
    try:
        return kind.model_validate(known)
    except pydantic.ValidationError as error:
        _refuse(error)


def _read_messages(messages: object) -> object:
    """Returns the messages with unset fields left out; their types are still to be checked."""
    if not isinstance(messages, list):
        return messages
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read_message(message: object, path: str) -> object:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") in ("tool", "function"):
        raise UnsupportedError(
            f"{path}.role is {message['role']!r}, but tools are not supported by this version; "
            "send what the tool said as a user's message",
            field=f"{path}.role",
        )
    kept = keep_known(
        message, supported=Message.model_fields, refused=REFUSED_IN_MESSAGES, prefix=f"{path}."
    )
    content = kept.get("content", "")
    if not isinstance(content, str | list):
        raise InvalidRequestError(
            f"{path}.content is {_short(content)}, but must be a string or a list of text parts",
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


def _read_prompts(value: object) -> tuple[Prompt, ...]:
    """Returns a text, a list of ids, or a list of either, as a list of prompts."""
    match value:
        case str():
            return (value,)
        case [int(), *_]:
            return (_read_ids(value),)
        case [str() | list(), *_]:
            if len(value) > MAX_PROMPTS:
                raise _wrong(
                    f"has {len(value)} prompts, but the limit is {MAX_PROMPTS}; send fewer"
                )
            return tuple(part if isinstance(part, str) else _read_ids(part) for part in value)
        case []:
            raise _wrong("is an empty list, but needs at least one prompt")
    raise _wrong(f"is {_kind(value)}, but must be a text, a list of token ids, or a list of these")


def _read_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(type(part) is int for part in value):
        raise _wrong("holds something else beside token ids; send integers, or texts")
    return tuple(value)


def _wrong(message: str) -> pydantic_core.PydanticCustomError:
    return pydantic_core.PydanticCustomError("wrong", "{text}", {"text": message})


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
}


def _refuse(error: pydantic.ValidationError) -> NoReturn:
    """Raises the first of pydantic's findings as one of ours."""
    first = error.errors(include_url=False, include_context=True)[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    path = shorten("".join(steps).removeprefix("."))
    match first["type"]:
        case "missing":
            text = f"{path} is missing, but required"
        case "wrong":
            text = f"{path} {first['msg']}"
        case "too_short":
            text = f"{path} is an empty list, but needs at least one entry"
        case "literal_error":
            text = f"{path} is {_short(first['input'])}, but must be {first['ctx']['expected']}"
        case kind:
            wanted = _WANTED.get(kind, first["msg"])
            text = f"{path} is {_short(first['input'])}, but must be {wanted}"
    raise InvalidRequestError(text, field=path) from error


def _short(value: object) -> str:
    """Returns a number or a short text as it is, and of anything longer its kind."""
    text = repr(value)
    return text if len(text) <= 40 and not isinstance(value, list | dict) else _kind(value)


def _kind(value: object) -> str:
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
