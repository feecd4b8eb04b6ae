"""The request bodies of `/v1/chat/completions` and `/v1/completions`, with vLLM's extras.

Here is checked what each field is; its range, told here for the API's description, and the model's
limits are the engine's to check. Null is unset everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import pydantic

from jaxserve.engine.limits import INT32, MAX_SEED, MAX_TEMPERATURE, REPETITION_RANGE
from jaxserve.engine.token_fields import MAX_BIAS
from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.fields import (
    HARMLESS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    keep_known,
)
from jaxserve.server.openai.findings import kind_of, refuse, short, wrong
from jaxserve.server.openai.messages import tidy_messages
from jaxserve.server.openai.parts import (
    Message,
    NamedChoice,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Tool,
)

MAX_PROMPTS: Final = 256  # of one completions body; each is a request of its own
TOOL_MODES: Final = ("none", "auto", "required")

Prompt = str | tuple[int, ...]


def _as_list(value: object) -> object:
    if value is not None and not isinstance(value, str | list):
        raise wrong(f"is {short(value)}, but must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _unset(description: str | None = None, /, **schema: Any) -> Any:  # noqa: ANN401
    """Returns a field that is None unless it is set.

    Args:
      schema: JSON Schema that the description has and pydantic does not check.
    """
    return pydantic.Field(None, description=description, json_schema_extra=schema)


_TOKEN_IDS: Final[dict[str, Any]] = {"items": {"type": "integer", "minimum": 0}}
_TEXTS: Final[dict[str, Any]] = {"items": {"type": "string", "minLength": 1}}
_Id = Annotated[int, pydantic.Field(ge=0)]


class _Body(pydantic.BaseModel):
    """What both kinds have. None is unset: the model's own default holds, then ours."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    model: str | None = None
    max_tokens: int | None = _unset(minimum=0)
    temperature: float | None = _unset(minimum=0, maximum=MAX_TEMPERATURE)
    top_p: float | None = _unset(exclusiveMinimum=0, maximum=1)
    presence_penalty: float | None = _unset(minimum=-2, maximum=2)
    frequency_penalty: float | None = _unset(minimum=-2, maximum=2)
    seed: int | None = _unset(minimum=0, maximum=MAX_SEED)
    n: int | None = _unset("Choices to write. Unset is 1.", minimum=1)
    stop: Annotated[
        list[str] | None,
        pydantic.BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = None
    logit_bias: dict[str, float] | None = _unset(
        "Token ids as keys.",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's extras
    top_k: int | None = _unset("0 or -1 is off.", minimum=-1, maximum=MAX_SEED)
    min_p: float | None = _unset(minimum=0, maximum=1)
    repetition_penalty: float | None = _unset(
        minimum=REPETITION_RANGE[0], maximum=REPETITION_RANGE[1]
    )
    min_tokens: int | None = _unset(minimum=0, maximum=INT32[1])
    stop_token_ids: list[int] | None = _unset(**_TOKEN_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = _unset(**_TOKEN_IDS, minItems=1)
    bad_words: list[str] | None = _unset(**_TEXTS)
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = _unset(
        "Log-probabilities of the prompt's tokens; not with stream.", minimum=0
    )
    priority: int = pydantic.Field(
        0,
        description="Higher runs first, as everywhere in jaxserve.",
        json_schema_extra={"minimum": INT32[0], "maximum": INT32[1]},
    )
    cache_salt: str | None = pydantic.Field(
        None, description="What is kept of the prompt is shared with this salt's requests alone."
    )
    return_token_ids: bool = pydantic.Field(
        False, description="Adds the output's token_ids to each choice, and the prompt's."
    )
    return_tokens_as_token_ids: bool = pydantic.Field(
        False, description="Log-probabilities name tokens as token_id:N."
    )
    # our own
    timeout: float | None = pydantic.Field(
        None, gt=0, description="Seconds from arrival: what is written by then is the answer."
    )
    queue_timeout: float | None = _unset(
        "Seconds that the request may wait for a place to run.", exclusiveMinimum=0
    )
    stream_interval: int | None = pydantic.Field(
        None, ge=1, description="Tokens to gather before a chunk is sent. Unset is 1."
    )


class ChatBody(_Body):
    """`/v1/chat/completions`; max_tokens unset is the rest of the context."""

    messages: list[Message] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = _unset(minimum=0)
    logprobs: bool = False
    top_logprobs: int | None = _unset(minimum=0)
    tools: list[Tool] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | None,
        pydantic.WrapValidator(lambda value, read: _read_tool_choice(value, read)),
    ] = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = pydantic.Field(
        True, description="Whether reasoning_content is sent (vLLM's extra)."
    )
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None


class CompletionBody(_Body):
    """`/v1/completions`; max_tokens unset is 16, as OpenAI has it."""

    prompt: Annotated[
        tuple[Prompt, ...],
        pydantic.PlainValidator(
            lambda value: _read_prompts(value),
            json_schema_input_type=(
                str
                | Annotated[list[_Id], pydantic.Field(min_length=1)]
                | Annotated[list[str | list[_Id]], pydantic.Field(min_length=1)]
            ),
        ),
    ]
    echo: bool = False
    logprobs: int | None = _unset(minimum=0)


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
        raise InvalidRequestError(f"the body is {kind_of(body)}, but must be a JSON object")
    is_chat = kind is ChatBody
    known = keep_known(
        body,
        supported=kind.model_fields,
        refused=REFUSED_IN_CHAT if is_chat else REFUSED_IN_COMPLETIONS,
        harmless=HARMLESS,
    )
    if is_chat and "messages" in known:
        known["messages"] = tidy_messages(known["messages"])
    try:
        return kind.model_validate(known)
    except pydantic.ValidationError as error:
        refuse(error)


def _read_tool_choice(value: object, read: pydantic.ValidatorFunctionWrapHandler) -> object:
    """A union's own findings would name each of its members."""
    match value:
        case str() if value in TOOL_MODES:
            return value
        case {"type": "function", "function": {"name": str()}}:
            return read(value)
    raise wrong(
        f"is {short(value)}, but must be 'none', 'auto', 'required', or such as "
        '{"type": "function", "function": {"name": "f"}}'
    )


def _read_prompts(value: object) -> tuple[Prompt, ...]:
    """Returns a text, a list of ids, or a list of either, as a list of prompts."""
    match value:
        case str():
            return (value,)
        case [int(), *_]:
            return (_read_ids(value),)
        case [str() | list(), *_]:
            if len(value) > MAX_PROMPTS:
                raise wrong(f"has {len(value)} prompts, but the limit is {MAX_PROMPTS}; send fewer")
            return tuple(part if isinstance(part, str) else _read_ids(part) for part in value)
        case []:
            raise wrong("is an empty list, but needs at least one prompt")
    raise wrong(f"is {kind_of(value)}, but must be a text, a list of token ids, or a list of these")


def _read_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(type(part) is int for part in value):
        raise wrong("holds something else beside token ids; send integers, or texts")
    return tuple(value)
