"""Request messages to the engine's records. Values are checked by the engine's limits; here is
checked only what the records cannot say."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NoReturn

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import InvalidRequestError, ModelNotFoundError, RequestError
from jaxserve.gen import generation_pb2
from jaxserve.request import ChatPrompt, GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.server.conversation import Conversation

SCALARS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
PROTO_NAMES: Final = {"chat.tools": "chat.tools_json"}
NANOS: Final = 1_000_000_000  # of a second
TEXT_FORMS: Final[dict[str, Literal["json_schema", "regex", "lark"]]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "lark_grammar": "lark",
}


def check_model(asked: str, model: ServedModel, *, field: str = "model") -> None:
    """Raises ModelNotFoundError unless the name is the served model's, or empty."""
    if asked not in ("", model.name):
        raise ModelNotFoundError(
            f"model {asked!r} is not served here; use {model.name!r} or leave it empty",
            field=field,
        )


def read_generate(
    message: generation_pb2.GenerateRequest,
    conversation: Conversation | None,
    *,
    request_id: str,
    tenant: str,
    deadline_s: float | None,
    model: ServedModel,
) -> GenerationRequest:
    """Returns what is asked, its fields having passed `refuse_unsupported`.

    Args:
      conversation: of `message.chat`; None where that is not the prompt.

    Raises:
      InvalidRequestError: no prompt, an echo of a conversation or without text, a delta of 0
        tokens, a structured output without a form.
    """
    _check_output(message)
    return GenerationRequest(
        prompt=_read_prompt(message, conversation, model),
        sampling=_read_sampling(message, model),
        structured_output=_read_structured_output(message),
        tenant=tenant,
        id=request_id,
        priority=message.priority,
        deadline_s=deadline_s,
        queue_timeout_s=(
            read_seconds(message.queue_timeout, "queue_timeout")
            if message.HasField("queue_timeout")
            else None
        ),
        cache_salt=message.cache_salt,
    )


def read_token_ids(ids: Sequence[int], model: ServedModel, field: str) -> tuple[int, ...]:
    """Refuses by length before millions of ids are copied."""
    if len(ids) > model.max_model_tokens:
        refuse(
            f"the prompt is {len(ids)} tokens, but this model's limit is "
            f"{model.max_model_tokens}; shorten it",
            field,
        )
    return tuple(ids)


@contextlib.contextmanager
def naming_fields() -> Iterator[None]:
    """Gives an error that leaves the block the proto's name of its field, where that is another."""
    try:
        yield
    except RequestError as error:
        error.field = PROTO_NAMES.get(error.field, error.field)
        raise


def refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field=field)


def _check_output(message: generation_pb2.GenerateRequest) -> None:
    output = message.output
    if output.HasField("stream_interval") and output.stream_interval < 1:
        refuse(
            "stream_interval is 0, but must be ≥ 1; leave it out for 1", "output.stream_interval"
        )
    if output.echo and message.HasField("chat"):
        refuse(
            "echo is for a prompt of text or tokens; leave it out with a conversation",
            "output.echo",
        )
    if output.echo and output.omit_text:
        refuse("echo and omit_text are both set; leave one of them out", "output.echo")


def _read_prompt(
    message: generation_pb2.GenerateRequest, conversation: Conversation | None, model: ServedModel
) -> str | tuple[int, ...] | ChatPrompt:
    if conversation is not None:
        return conversation.prompt
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return read_token_ids(message.token_ids.ids, model, "token_ids")
        case _:
            refuse("prompt is missing; set one of text, token_ids and chat", "prompt")


def _read_sampling(message: generation_pb2.GenerateRequest, model: ServedModel) -> SamplingParams:
    sampling, stop, output = message.sampling, message.stop, message.output
    overrides: dict[str, object] = {name: _optional(sampling, name, None) for name in SCALARS}
    overrides |= {
        "num_choices": _optional(sampling, "n", None),
        "logit_bias": dict(sampling.logit_bias) or None,
        "bad_words": tuple(sampling.bad_words) or None,
        "allowed_token_ids": (
            tuple(sampling.allowed_token_ids.ids)
            if sampling.HasField("allowed_token_ids")
            else None
        ),
        "max_tokens": _optional(stop, "max_tokens", None),
        "min_tokens": _optional(stop, "min_tokens", None),
        "stop_strings": tuple(stop.stop_strings) or None,
        "stop_token_ids": tuple(stop.stop_token_ids) or None,
        "ignore_eos": stop.ignore_eos,
        "include_stop_text": stop.include_stop_text,
        "logprobs": _optional(output, "logprobs", None),
        "prompt_logprobs": _optional(output, "prompt_logprobs", None),
        "skip_special_tokens": _optional(output, "skip_special_tokens", True),
    }
    return merge_sampling(overrides, model.sampling_defaults)


def _read_structured_output(message: generation_pb2.GenerateRequest) -> StructuredOutput | None:
    if not message.HasField("structured_output"):
        return None
    asked = message.structured_output
    match asked.WhichOneof("constraint"):
        case "json_object":
            if not asked.json_object:
                refuse(
                    "json_object is false, which is no form; leave it out",
                    "structured_output.json_object",
                )
            return StructuredOutput(kind="json_object")
        case "choice":
            return StructuredOutput(kind="choice", choices=tuple(asked.choice.choices))
        case "json_schema" | "regex" | "lark_grammar" as form:
            return StructuredOutput(kind=TEXT_FORMS[form], text=getattr(asked, form))
        case _:
            refuse(
                "structured_output has no form; set one of json_schema, json_object, regex, "
                "choice and lark_grammar, or leave it out",
                "structured_output",
            )


def _optional[T](message: Message, name: str, default: T) -> T:
    """Returns the field, or the default where it is not set: 0 that was sent is not unset."""
    return getattr(message, name) if message.HasField(name) else default


def read_seconds(duration: duration_pb2.Duration, field: str) -> float:
    """Returns a duration's seconds.

    Raises:
      InvalidRequestError: it is none: -1 s and 2 billion ns would be one second.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= NANOS or (seconds and nanos and (seconds < 0) != (nanos < 0)):
        refuse(
            f"{field} has seconds {seconds} and nanos {nanos}, but nanos must be less than a "
            "second and of the same sign",
            field,
        )
    return seconds + nanos / NANOS
