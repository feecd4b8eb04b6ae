"""What a call gives back, as plain records."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from google.protobuf import duration_pb2

from jaxserve.gen import generation_pb2, model_pb2
from jaxserve.request import FinishReason

FINISH_REASONS: Final[Mapping[int, FinishReason]] = {
    generation_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    generation_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP,
    generation_pb2.FINISH_REASON_MAX_TOKENS: FinishReason.MAX_TOKENS,
    generation_pb2.FINISH_REASON_CONTEXT_LENGTH: FinishReason.CONTEXT_LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    generation_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Usage:
    """Tokens of a request, as they are charged."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Timings:
    """Where a request's time went on the server, in seconds.

    Attributes:
      queue_s: until it first ran.
      prefill_s: from then until its first token.
      time_to_first_token_s: the two together.
      decode_s: from its first token until the end.
      compile_s: compilation it waited for; 0 on a warm server.
      delivery_s: from the end until the server wrote its last message. The four phases, queue,
        prefill, decode and delivery, follow each other without a gap.
      delivery_sum_s: each token's time until the transport accepted it, added up.
    """

    queue_s: float
    prefill_s: float
    time_to_first_token_s: float
    decode_s: float
    compile_s: float
    delivery_s: float
    delivery_sum_s: float


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Execution:
    """How the server ran a request; the fields are the proto's."""

    prefill_bucket_tokens: int
    prefill_chunks: int
    padding_fraction: float
    preemptions: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Start:
    """First of a stream, with the first token."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Delta:
    """More of the output. Text comes in whole characters, so it may lag behind `token_ids`."""

    text: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Finish:
    """Last of a stream.

    Attributes:
      matched_stop: with STOP, the string or token id that ended it.
      execution: where it was asked for.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    execution: Execution | None


Event = Start | Delta | Finish


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Generation:
    """A whole output; a `Finish` with what came before it."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    execution: Execution | None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Tokens:
    """A text or a conversation as token ids.

    Attributes:
      offsets: of each token, [start, end) in the text's characters; empty unless asked for.
      max_model_tokens: most that prompt and output may have together.
    """

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    max_model_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Model:
    """A served model.

    Attributes:
      default_sampling: the model's own defaults, by field name.
    """

    name: str
    architectures: tuple[str, ...]
    max_model_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    weight_dtype: str
    quantization: str
    default_sampling: Mapping[str, object]
    has_chat_template: bool


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Health:
    """Whether the process works, and whether it takes requests."""

    is_alive: bool
    is_ready: bool


class _Ended(Protocol):
    """What the messages that end an output have in common."""

    @property
    def stop_string(self) -> str: ...

    @property
    def stop_token_id(self) -> int: ...

    def WhichOneof(self, oneof_group: str, /) -> str | None: ...  # noqa: N802  # protobuf's name


class _Accounts(Protocol):
    """Likewise: the accounts of a whole request."""

    @property
    def usage(self) -> generation_pb2.Usage: ...

    @property
    def timings(self) -> generation_pb2.Timings: ...

    @property
    def execution(self) -> generation_pb2.ExecutionInfo: ...

    def HasField(self, field_name: str, /) -> bool: ...  # noqa: N802  # protobuf's name


def read_event(message: generation_pb2.StreamGenerateResponse) -> Event:
    """Returns one message of a stream."""
    match message.WhichOneof("event"):
        case "start":
            start = message.start
            return Start(
                request_id=start.request_id, model=start.model, prompt_tokens=start.prompt_tokens
            )
        case "delta":
            return Delta(text=message.delta.text, token_ids=tuple(message.delta.token_ids))
        case _:
            finish = message.finish
            return Finish(
                reason=FINISH_REASONS[finish.reason],
                matched_stop=_matched_stop(finish),
                usage=_usage(finish.usage),
                timings=_timings(finish.timings),
                execution=_execution(finish),
            )


def read_generation(message: generation_pb2.GenerateResponse) -> Generation:
    """Returns the only choice of a unary answer."""
    choice = message.choices[0]
    return Generation(
        request_id=message.request_id,
        model=message.model,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=FINISH_REASONS[choice.finish_reason],
        matched_stop=_matched_stop(choice),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        execution=_execution(message),
    )


def read_tokens(message: generation_pb2.TokenizeResponse) -> Tokens:
    offsets = zip(message.start_offsets, message.end_offsets, strict=True)
    return Tokens(
        token_ids=tuple(message.token_ids),
        offsets=tuple(offsets),
        max_model_tokens=message.max_model_tokens,
    )


def read_models(messages: Sequence[model_pb2.Model]) -> list[Model]:
    return [
        Model(
            name=message.name,
            architectures=tuple(message.architectures),
            max_model_tokens=message.max_model_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
            weight_dtype=message.weight_dtype,
            quantization=message.quantization,
            default_sampling=json.loads(message.default_sampling_json or "{}"),
            has_chat_template=message.has_chat_template,
        )
        for message in messages
    ]


def _matched_stop(message: _Ended) -> str | int | None:
    match message.WhichOneof("matched_stop"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
        case _:
            return None


def _usage(message: generation_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
    )


def _timings(message: generation_pb2.Timings) -> Timings:
    return Timings(
        queue_s=_seconds(message.queue),
        prefill_s=_seconds(message.prefill),
        time_to_first_token_s=_seconds(message.time_to_first_token),
        decode_s=_seconds(message.decode),
        compile_s=_seconds(message.compile),
        delivery_s=_seconds(message.delivery),
        delivery_sum_s=_seconds(message.delivery_sum),
    )


def _execution(message: _Accounts) -> Execution | None:
    if not message.HasField("execution"):
        return None
    execution = message.execution
    return Execution(
        prefill_bucket_tokens=execution.prefill_bucket_tokens,
        prefill_chunks=execution.prefill_chunks,
        padding_fraction=execution.padding_fraction,
        preemptions=execution.preemptions,
    )


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9
