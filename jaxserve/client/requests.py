"""What a call sends: plain arguments as protobuf messages, and the options of a channel."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

from google.protobuf import duration_pb2

from jaxserve.gen import generation_pb2
from jaxserve.request import ChatMessage, ChatPrompt, StructuredOutput

Prompt = str | Sequence[int] | ChatPrompt

ToolChoiceMode = Literal["auto", "none", "required"]
MODES: Final[Mapping[str, generation_pb2.ToolChoice.Mode]] = {
    "auto": generation_pb2.ToolChoice.MODE_AUTO,
    "none": generation_pb2.ToolChoice.MODE_NONE,
    "required": generation_pb2.ToolChoice.MODE_REQUIRED,
}
GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `stream`; what is left out is the model's or the server's default.

    The meaning, range and default of each is told in protos/jaxserve/v1/generation.proto. Times
    are seconds.
    """

    request_id: str
    model: str
    priority: int
    cache_salt: str
    queue_timeout_s: float

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    n: int
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    structured_output: StructuredOutput

    max_tokens: int
    min_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_text: bool

    omit_text: bool
    include_token_ids: bool
    skip_special_tokens: bool
    stream_interval: int
    include_execution_info: bool
    echo: bool
    logprobs: int
    prompt_logprobs: int
    raw_text: bool

    tool_choice: ToolChoiceMode
    tool_function: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ScoreItem:
    """What is to be scored, and what comes before it.

    Attributes:
      context: None is the model's begin-of-text token alone.
    """

    continuation: str | Sequence[int]
    context: str | Sequence[int] | None = None


SAMPLING: Final = frozenset(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
STOP: Final = frozenset(generation_pb2.StopConditions.DESCRIPTOR.fields_by_name)
OUTPUT: Final = frozenset(generation_pb2.OutputOptions.DESCRIPTOR.fields_by_name)
TOP: Final = frozenset(
    {"request_id", "model", "priority", "cache_salt", "queue_timeout", "structured_output"}
)


def build_generate(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Returns the request.

    Raises:
      TypeError: an option that does not exist, or whose value has the wrong type.
      ValueError: a number that its protobuf type cannot hold, such as a negative id.
    """
    chosen: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    for field in ("stop_strings", "stop_token_ids", "bad_words"):
        if isinstance(chosen.get(field), str):  # its letters would each be one
            raise TypeError(f"{field} is one string, but must be a list; put it in a list")
    if unknown := chosen.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    if "allowed_token_ids" in chosen:
        chosen["allowed_token_ids"] = generation_pb2.TokenIds(ids=chosen["allowed_token_ids"])
    if "structured_output" in chosen:
        chosen["structured_output"] = _structured_output(chosen["structured_output"])
    if "queue_timeout_s" in chosen:
        chosen["queue_timeout"] = _duration(chosen["queue_timeout_s"])
    request = generation_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(**_pick(chosen, SAMPLING)),
        stop=generation_pb2.StopConditions(**_pick(chosen, STOP)),
        output=generation_pb2.OutputOptions(**_pick(chosen, OUTPUT)),
        **_pick(chosen, TOP),
        **_prompt(prompt),
    )
    _set_tool_choice(request, options)
    return request


def build_score(
    items: Sequence[ScoreItem],
    *,
    request_id: str,
    model: str,
    priority: int,
    include_token_logprobs: bool,
) -> generation_pb2.ScoreRequest:
    """Returns the request; raises as `build_generate`."""
    return generation_pb2.ScoreRequest(
        request_id=request_id,
        model=model,
        priority=priority,
        include_token_logprobs=include_token_logprobs,
        items=[
            generation_pb2.ScoreItem(
                **_text_or_ids(item.context, "context"),
                **_text_or_ids(item.continuation, "continuation"),
            )
            for item in items
        ],
    )


def build_tokenize(
    prompt: str | ChatPrompt,
    *,
    model: str,
    add_special_tokens: bool | None,
    include_offsets: bool,
) -> generation_pb2.TokenizeRequest:
    request = generation_pb2.TokenizeRequest(
        model=model, include_offsets=include_offsets, **_prompt(prompt)
    )
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return request


def _prompt(prompt: Prompt) -> dict[str, Any]:
    match prompt:
        case str():
            return {"text": prompt}
        case ChatPrompt():
            return {"chat": _chat(prompt)}
        case _:
            return {"token_ids": generation_pb2.TokenIds(ids=prompt)}


def _chat(prompt: ChatPrompt) -> generation_pb2.ChatPrompt:
    return generation_pb2.ChatPrompt(
        messages=[_turn(turn) for turn in prompt.messages],
        add_generation_prompt=prompt.add_generation_prompt,
        template_kwargs_json=_json(dict(prompt.template_kwargs)),
        tools_json=_json([dict(tool) for tool in prompt.tools]),
    )


def _turn(turn: ChatMessage) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(
        role=turn.role,
        content=turn.content,
        name=turn.name,
        tool_call_id=turn.tool_call_id,
        tool_calls_json=_json([dict(call) for call in turn.tool_calls]),
        reasoning=turn.reasoning,
    )


def _json(value: list[Any] | dict[str, Any]) -> str:
    """Returns a text; "" for what holds nothing. Raises ValueError for what JSON cannot say."""
    return json.dumps(value, allow_nan=False) if value else ""


def _set_tool_choice(request: generation_pb2.GenerateRequest, options: GenerateOptions) -> None:
    mode, function = options.get("tool_choice"), options.get("tool_function")
    if mode is None and function is None:
        return
    if not request.HasField("chat"):
        raise ValueError("tool_choice and tool_function are for a conversation; leave them out")
    if mode is not None and mode not in MODES:
        raise ValueError(f"tool_choice is {mode!r}, but must be one of {', '.join(MODES)}")
    request.chat.tool_choice.mode = (
        MODES[mode] if mode else generation_pb2.ToolChoice.MODE_UNSPECIFIED
    )
    request.chat.tool_choice.function = function or ""


def _structured_output(asked: StructuredOutput) -> generation_pb2.StructuredOutput:
    match asked.kind:
        case "json_object":
            return generation_pb2.StructuredOutput(json_object=True)
        case "choice":
            choices = generation_pb2.ChoiceList(choices=asked.choices)
            return generation_pb2.StructuredOutput(choice=choices)
        case "json_schema":
            return generation_pb2.StructuredOutput(json_schema=asked.text)
        case "regex":
            return generation_pb2.StructuredOutput(regex=asked.text)
        case "lark":
            return generation_pb2.StructuredOutput(lark_grammar=asked.text)


def _text_or_ids(value: str | Sequence[int] | None, name: str) -> dict[str, Any]:
    match value:
        case None:
            return {}
        case str():
            return {f"{name}_text": value}
        case _:
            return {f"{name}_token_ids": generation_pb2.TokenIds(ids=value)}


def _pick(chosen: Mapping[str, object], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in chosen.items() if key in names}


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
