"""What a call sends: plain arguments as protobuf messages, and the options of a channel."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from google.protobuf import duration_pb2

from jaxserve.gen import generation_pb2
from jaxserve.request import ChatPrompt

Prompt = str | Sequence[int] | ChatPrompt

MAX_MESSAGE_BYTES: Final = 16 << 20  # the server's default, limits.max_message_bytes
GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `stream`; what is left out is the model's or the server's default.

    The meaning, range and default of each is told in protos/jaxserve/v1/generation.proto. Times
    are seconds.
    """

    request_id: str
    model: str
    priority: int
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


SAMPLING: Final = frozenset(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
STOP: Final = frozenset(generation_pb2.StopConditions.DESCRIPTOR.fields_by_name)
OUTPUT: Final = frozenset(generation_pb2.OutputOptions.DESCRIPTOR.fields_by_name)
TOP: Final = frozenset({"request_id", "model", "priority"})


def build_generate(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Returns the request.

    Raises:
      TypeError: an option that does not exist, or whose value has the wrong type.
      ValueError: a number that its protobuf type cannot hold, such as a negative id.
    """
    chosen: dict[str, object] = {key: value for key, value in options.items() if value is not None}
    chosen.pop("queue_timeout_s", None)
    queue_timeout_s = options.get("queue_timeout_s")
    for field in ("stop_strings", "stop_token_ids"):
        if isinstance(chosen.get(field), str):  # its letters would each be a stop
            raise TypeError(f"{field} is one string, but must be a list; put it in a list")
    if unknown := chosen.keys() - SAMPLING - STOP - OUTPUT - TOP:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    return generation_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(**_pick(chosen, SAMPLING)),
        stop=generation_pb2.StopConditions(**_pick(chosen, STOP)),
        output=generation_pb2.OutputOptions(**_pick(chosen, OUTPUT)),
        queue_timeout=None if queue_timeout_s is None else _duration(queue_timeout_s),
        **_pick(chosen, TOP),
        **_prompt(prompt),
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


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Returns grpc's options: message limits both ways, and pings that find a dead server."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _prompt(prompt: Prompt) -> dict[str, Any]:
    match prompt:
        case str():
            return {"text": prompt}
        case ChatPrompt():
            return {"chat": _chat(prompt)}
        case _:
            return {"token_ids": generation_pb2.TokenIds(ids=prompt)}


def _chat(prompt: ChatPrompt) -> generation_pb2.ChatPrompt:
    kwargs = dict(prompt.template_kwargs)
    return generation_pb2.ChatPrompt(
        messages=[
            generation_pb2.ChatMessage(role=turn.role, content=turn.content, name=turn.name)
            for turn in prompt.messages
        ],
        add_generation_prompt=prompt.add_generation_prompt,
        template_kwargs_json=json.dumps(kwargs) if kwargs else "",
    )


def _pick(chosen: Mapping[str, object], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in chosen.items() if key in names}


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
