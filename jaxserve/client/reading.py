"""Messages of the server as the records of `results`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from google.protobuf import duration_pb2

from jaxserve.client.results import (
    Choice,
    Delta,
    Event,
    Execution,
    Finish,
    Generation,
    Model,
    Score,
    Scores,
    Start,
    Timings,
    TokenLogprob,
    Tokens,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from jaxserve.gen import generation_pb2, model_pb2
from jaxserve.request import FinishReason

FINISH_REASONS: Final[Mapping[int, FinishReason]] = {
    generation_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    generation_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP,
    generation_pb2.FINISH_REASON_MAX_TOKENS: FinishReason.MAX_TOKENS,
    generation_pb2.FINISH_REASON_CONTEXT_LENGTH: FinishReason.CONTEXT_LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    generation_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    generation_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


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


class EventReader:
    """Reads a stream's messages. A start that came in several, for its size, becomes one."""

    def __init__(self) -> None:
        self._start: Start | None = None

    def read(self, message: generation_pb2.StreamGenerateResponse) -> Iterable[Event]:
        """Returns the events that this message completes; at most two."""
        event = _read_event(message)
        held, self._start = self._start, None
        if not isinstance(event, Start):
            return (event,) if held is None else (held, event)
        if held is not None:
            whole = held.prompt_logprobs + event.prompt_logprobs
            event = dataclasses.replace(event, prompt_logprobs=whole)
        if event.prompt_logprobs and len(event.prompt_logprobs) < event.prompt_tokens - 1:
            self._start = event  # the rest is in the next message
            return ()
        return (event,)


def _read_event(message: generation_pb2.StreamGenerateResponse) -> Event:
    match message.WhichOneof("event"):
        case "start":
            start = message.start
            return Start(
                request_id=start.request_id,
                model=start.model,
                prompt_tokens=start.prompt_tokens,
                cached_prompt_tokens=start.cached_prompt_tokens,
                prompt_logprobs=_logprobs(start.prompt_logprobs),
            )
        case "delta":
            return _read_delta(message.delta)
        case _:
            finish = message.finish
            return Finish(
                index=finish.index,
                reason=FINISH_REASONS[finish.reason],
                matched_stop=_matched_stop(finish),
                usage=_usage(finish.usage) if finish.HasField("usage") else None,
                timings=_timings(finish.timings) if finish.HasField("timings") else None,
                execution=_execution(finish),
            )


def _read_delta(delta: generation_pb2.GenerationDelta) -> Delta:
    return Delta(
        index=delta.index,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=_logprobs(delta.logprobs),
        reasoning=delta.reasoning,
        tool_calls=tuple(
            ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in delta.tool_calls
        ),
    )


def read_generation(message: generation_pb2.GenerateResponse) -> Generation:
    """Returns a unary answer.

    Raises:
      LookupError: it is not jaxserve's: it lacks its accounts, or a reason is not one of ours.
    """
    for field in ("usage", "timings"):
        if not message.HasField(field):
            raise LookupError(f"the answer has no {field}")
    return Generation(
        request_id=message.request_id,
        model=message.model,
        choices=tuple(_read_choice(choice) for choice in message.choices),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        execution=_execution(message),
    )


def _read_choice(choice: generation_pb2.Choice) -> Choice:
    return Choice(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=FINISH_REASONS[choice.finish_reason],
        matched_stop=_matched_stop(choice),
        logprobs=_logprobs(choice.logprobs),
        reasoning=choice.reasoning,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in choice.tool_calls
        ),
    )


def read_scores(message: generation_pb2.ScoreResponse) -> Scores:
    return Scores(
        request_id=message.request_id,
        model=message.model,
        results=tuple(
            Score(
                sum_logprob=result.sum_logprob,
                num_tokens=result.num_tokens,
                is_greedy=result.is_greedy,
                token_logprobs=_logprobs(result.token_logprobs),
            )
            for result in message.results
        ),
        usage=_usage(message.usage),
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
            tool_parser=message.tool_parser,
            reasoning_parser=message.reasoning_parser,
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


def _logprobs(message: generation_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    tops = [_top(top) for top in message.top] or [()] * len(message.token_ids)
    rows = zip(message.token_ids, message.logprobs, message.ranks, message.token_bytes, strict=True)
    return tuple(
        TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, token_bytes=spelled, top=top)
        for (token_id, logprob, rank, spelled), top in zip(rows, tops, strict=True)
    )


def _top(message: generation_pb2.TopLogprobs) -> tuple[TopLogprob, ...]:
    rows = zip(message.token_ids, message.logprobs, message.token_bytes, strict=True)
    return tuple(
        TopLogprob(token_id=token_id, logprob=logprob, token_bytes=spelled)
        for token_id, logprob, spelled in rows
    )


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
