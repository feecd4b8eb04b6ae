"""Protobuf messages to the engine's records and back. Values are checked by the engine's limits;
here is checked only what the records cannot say."""

import json
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from jaxserve.engine import events
from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import InvalidRequestError, ModelNotFoundError, UnsupportedError
from jaxserve.gen import generation_pb2, model_pb2
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from jaxserve.server.json_text import parse_json

FINISH_REASONS: Final[Mapping[FinishReason, generation_pb2.FinishReason]] = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: generation_pb2.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: generation_pb2.FINISH_REASON_DEADLINE,
}


# in


def check_model(asked: str, model: ServedModel, *, field: str = "model") -> None:
    """Raises ModelNotFoundError unless the name is the served model's, or empty."""
    if asked not in ("", model.name):
        raise ModelNotFoundError(
            f"model {asked!r} is not served here; use {model.name!r} or leave it empty",
            field=field,
        )


def read_generate(
    message: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    deadline_s: float | None,
    model: ServedModel,
) -> GenerationRequest:
    """Returns what is asked, its fields having passed `refuse_unsupported`.

    Raises:
      InvalidRequestError: no prompt, a template variable that is not JSON, a delta of 0 tokens.
      UnsupportedError: more than one choice.
    """
    prompt: str | tuple[int, ...] | ChatPrompt
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
        case "token_ids":
            prompt = _read_token_ids(message.token_ids.ids, model)
        case "chat":
            prompt = read_chat(message.chat)
        case _:
            _refuse("prompt is missing; set one of text, token_ids and chat", "prompt")
    if message.output.HasField("stream_interval") and message.output.stream_interval < 1:
        _refuse(
            "stream_interval is 0, but must be ≥ 1; leave it out for 1", "output.stream_interval"
        )
    return GenerationRequest(
        prompt=prompt,
        sampling=_read_sampling(message, model),
        id=request_id,
        priority=message.priority,
        deadline_s=deadline_s,
        queue_timeout_s=_seconds(message.queue_timeout)
        if message.HasField("queue_timeout")
        else None,
    )


def read_chat(message: generation_pb2.ChatPrompt) -> ChatPrompt:
    """Returns the conversation.

    Raises:
      InvalidRequestError: template_kwargs_json is not a JSON object.
    """
    return ChatPrompt(
        messages=tuple(
            ChatMessage(role=turn.role, content=turn.content, name=turn.name)
            for turn in message.messages
        ),
        add_generation_prompt=_optional(message, "add_generation_prompt", True),
        template_kwargs=_read_json_object(
            message.template_kwargs_json, "chat.template_kwargs_json"
        ),
    )


def _read_token_ids(ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Refuses by length before millions of ids are copied."""
    if len(ids) > model.max_model_tokens:
        _refuse(
            f"the prompt is {len(ids)} tokens, but this model's limit is "
            f"{model.max_model_tokens}; shorten it",
            "token_ids",
        )
    return tuple(ids)


def _read_sampling(message: generation_pb2.GenerateRequest, model: ServedModel) -> SamplingParams:
    sampling, stop = message.sampling, message.stop
    num_choices = _optional(sampling, "n", 1)
    if num_choices > 1:
        raise UnsupportedError(
            f"n is {num_choices}, but this version writes one choice; leave it out, or send the "
            "request several times",
            field="sampling.n",
        )
    if num_choices < 1:
        _refuse("n is 0, but must be 1; leave it out", "sampling.n")
    scalars = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
    )
    overrides: dict[str, object] = {name: _optional(sampling, name, None) for name in scalars}
    overrides |= {
        "logit_bias": dict(sampling.logit_bias) or None,
        "max_tokens": _optional(stop, "max_tokens", None),
        "min_tokens": _optional(stop, "min_tokens", None),
        "stop_strings": tuple(stop.stop_strings) or None,
        "stop_token_ids": tuple(stop.stop_token_ids) or None,
        "ignore_eos": stop.ignore_eos,
        "include_stop_text": stop.include_stop_text,
        "skip_special_tokens": _optional(message.output, "skip_special_tokens", True),
    }
    return merge_sampling(overrides, model.sampling_defaults)


def _optional[T](message: Message, name: str, default: T) -> T:
    """Returns the field, or the default where it is not set: 0 that was sent is not unset."""
    return getattr(message, name) if message.HasField(name) else default


def _read_json_object(text: str, field: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"template_kwargs_json is not a JSON object ({error}); send an object such as "
            '{"enable_thinking": false}',
            field=field,
        ) from error
    if not isinstance(value, dict):
        _refuse(
            f"template_kwargs_json is a JSON {type(value).__name__}, but must be an object", field
        )
    return value


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field=field)


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


# out


def build_start(started: events.Started, model: ServedModel) -> generation_pb2.GenerationStart:
    return generation_pb2.GenerationStart(
        request_id=started.request_id, model=model.name, prompt_tokens=started.prompt_tokens
    )


def build_delta(
    texts: Sequence[str], token_ids: Sequence[int], output: generation_pb2.OutputOptions
) -> generation_pb2.GenerationDelta | None:
    """Returns what was gathered, as far as it was asked for; None where nothing is left."""
    text = "" if output.omit_text else "".join(texts)
    shown_ids = token_ids if output.include_token_ids else ()
    if not text and not shown_ids:
        return None
    return generation_pb2.GenerationDelta(index=0, text=text, token_ids=shown_ids)


def build_finish(
    finished: events.Finished, output: generation_pb2.OutputOptions
) -> generation_pb2.GenerationFinish:
    string, token_id = _matched_stop(finished)
    return generation_pb2.GenerationFinish(
        index=finished.index,
        reason=FINISH_REASONS[finished.reason],
        stop_string=string,
        stop_token_id=token_id,
        usage=build_usage(finished.usage),
        timings=build_timings(finished.timings),
        execution=build_execution(finished.execution) if output.include_execution_info else None,
    )


def build_response(
    messages: Sequence[generation_pb2.StreamGenerateResponse],
) -> generation_pb2.GenerateResponse:
    """Returns a whole stream's messages put together."""
    start, finish = messages[0].start, messages[-1].finish
    deltas = [message.delta for message in messages[1:-1]]
    choice = generation_pb2.Choice(
        index=finish.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=finish.reason,
        stop_string=_optional(finish, "stop_string", None),
        stop_token_id=_optional(finish, "stop_token_id", None),
    )
    return generation_pb2.GenerateResponse(
        request_id=start.request_id,
        model=start.model,
        choices=[choice],
        usage=finish.usage,
        timings=finish.timings,
        execution=_optional(finish, "execution", None),
    )


def build_usage(usage: events.Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def build_timings(timings: events.Timings) -> generation_pb2.Timings:
    return generation_pb2.Timings(
        queue=_duration(timings.queue_s),
        prefill=_duration(timings.prefill_s),
        time_to_first_token=_duration(timings.time_to_first_token_s),
        decode=_duration(timings.decode_s),
        compile=_duration(timings.compile_s),
        delivery=_duration(timings.delivery_s),
        delivery_sum=_duration(timings.delivery_sum_s),
    )


def build_execution(execution: events.ExecutionInfo) -> generation_pb2.ExecutionInfo:
    return generation_pb2.ExecutionInfo(
        prefill_bucket_tokens=execution.prefill_bucket_tokens,
        prefill_chunks=execution.prefill_chunks,
        padding_fraction=execution.padding_fraction,
        preemptions=execution.preemptions,
    )


def build_model(model: ServedModel) -> model_pb2.Model:
    return model_pb2.Model(
        name=model.name,
        architectures=[model.architecture] if model.architecture else [],
        max_model_tokens=model.max_model_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_ids),
        bos_token_id=model.bos_id,
        weight_dtype=model.dtype,
        quantization=model.quantization,
        default_sampling_json=json.dumps(dict(model.sampling_defaults), sort_keys=True),
        has_chat_template=model.has_chat_template,
    )


def _matched_stop(finished: events.Finished) -> tuple[str | None, int | None]:
    """Returns (stop string, stop token id): one of them, or neither."""
    match finished.matched_stop:
        case str() as text:
            return text, None
        case token_id:
            return None, token_id


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
