"""The engine's events and accounts as protobuf messages."""

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf import duration_pb2

from jaxserve.engine import events
from jaxserve.engine.served_model import ServedModel
from jaxserve.gen import generation_pb2
from jaxserve.request import FinishReason

FINISH_REASONS: Final[Mapping[FinishReason, generation_pb2.FinishReason]] = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: generation_pb2.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: generation_pb2.FINISH_REASON_DEADLINE,
    FinishReason.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
}


def build_start(started: events.Started, model: ServedModel) -> generation_pb2.GenerationStart:
    """Returns the start without the prompt's log-probabilities."""
    return generation_pb2.GenerationStart(
        request_id=started.request_id,
        model=model.name,
        prompt_tokens=started.prompt_tokens,
        cached_prompt_tokens=started.cached_prompt_tokens,
    )


def build_finish(
    finished: events.ChoiceFinished | events.Finished,
    reason: FinishReason,
    output: generation_pb2.OutputOptions,
) -> generation_pb2.GenerationFinish:
    """Returns the end of a choice; with the accounts where it is the last one's.

    Args:
      reason: the engine's, or TOOL_CALLS in its place.
    """
    finish = generation_pb2.GenerationFinish(index=finished.index, reason=FINISH_REASONS[reason])
    match finished.matched_stop:
        case str() as text if reason is FinishReason.STOP:
            finish.stop_string = text
        case int() as token_id if reason is FinishReason.STOP:
            finish.stop_token_id = token_id
    if isinstance(finished, events.Finished):
        finish.usage.CopyFrom(build_usage(finished.usage))
        finish.timings.CopyFrom(build_timings(finished.timings))
        if output.include_execution_info:
            finish.execution.CopyFrom(build_execution(finished.execution))
    return finish


class Response:
    """A stream's messages put together to the answer of a unary call."""

    def __init__(self) -> None:
        self._response = generation_pb2.GenerateResponse()
        self._choices: dict[int, _Choice] = {}

    def add(self, message: generation_pb2.StreamGenerateResponse) -> None:
        """Adds the next message."""
        match message.WhichOneof("event"):
            case "start":
                self._add_start(message.start)
            case "delta":
                self._choice(message.delta.index).add(message.delta)
            case "finish":
                self._add_finish(message.finish)

    def build(self) -> generation_pb2.GenerateResponse:
        """Returns the answer, all messages having been added."""
        for _, choice in sorted(self._choices.items()):
            self._response.choices.append(choice.build())
        return self._response

    def _choice(self, index: int) -> "_Choice":
        return self._choices.setdefault(index, _Choice(index))

    def _add_start(self, start: generation_pb2.GenerationStart) -> None:
        self._response.request_id = start.request_id
        self._response.model = start.model
        if start.HasField("prompt_logprobs"):
            self._response.prompt_logprobs.MergeFrom(start.prompt_logprobs)

    def _add_finish(self, finish: generation_pb2.GenerationFinish) -> None:
        self._choice(finish.index).finish(finish)
        if finish.HasField("usage"):
            self._response.usage.CopyFrom(finish.usage)
            self._response.timings.CopyFrom(finish.timings)
        if finish.HasField("execution"):
            self._response.execution.CopyFrom(finish.execution)


class _Choice:
    """One choice of it. Texts are joined once: appending to a message copies what it has."""

    def __init__(self, index: int) -> None:
        self._choice = generation_pb2.Choice(index=index)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []  # of each call

    def add(self, delta: generation_pb2.GenerationDelta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._choice.token_ids.extend(delta.token_ids)
        if delta.HasField("logprobs"):
            self._choice.logprobs.MergeFrom(delta.logprobs)
        for call in delta.tool_calls:
            if call.index == len(self._arguments):
                self._choice.tool_calls.add(id=call.id, name=call.name)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    def finish(self, finish: generation_pb2.GenerationFinish) -> None:
        self._choice.finish_reason = finish.reason
        match finish.WhichOneof("matched_stop"):
            case "stop_string":
                self._choice.stop_string = finish.stop_string
            case "stop_token_id":
                self._choice.stop_token_id = finish.stop_token_id

    def build(self) -> generation_pb2.Choice:
        self._choice.text = "".join(self._texts)
        self._choice.reasoning = "".join(self._reasoning)
        for call, pieces in zip(self._choice.tool_calls, self._arguments, strict=True):
            call.arguments_json = "".join(pieces)
        return self._choice


def sum_usage(parts: Iterable[events.Usage]) -> generation_pb2.Usage:
    """Returns the accounts of several requests in one."""
    total = generation_pb2.Usage()
    for part in parts:
        total.prompt_tokens += part.prompt_tokens
        total.completion_tokens += part.completion_tokens
        total.cached_prompt_tokens += part.cached_prompt_tokens
    return total


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


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
