"""One request's events as VllmEngine's messages: token ids, never text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from smg_grpc_proto import vllm_engine_pb2

from jaxserve.engine.events import ChoiceFinished, Delta, Event, Finished, Started
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason

FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "abort",
}


class Replies:
    """Each choice's chunks, in a stream, and its complete message, which has all its ids.

    Log-probabilities come once: with the chunks of a stream, else with the complete message. Those
    of the prompt come with the first message of each choice.

    Attributes:
      num_bytes: of what is held back until a choice is complete.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        is_streamed: bool,
        has_prompt_logprobs: bool,
        complete: Callable[[Finished], Finished],
    ) -> None:
        """Args:
        complete: told of the end, when all before it is sent.
        """
        self.num_bytes = 0
        self._prompt = tuple(prompt)
        self._is_streamed = is_streamed
        self._has_prompt_logprobs = has_prompt_logprobs
        self._complete = complete
        self._input_logprobs: vllm_engine_pb2.InputLogProbs | None = None
        self._choices: dict[int, vllm_engine_pb2.GenerateComplete] = {}
        self._sent_s: list[float] = []

    def push(self, event: Event) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yields the messages that are due with this event."""
        match event:
            case Started():
                if self._has_prompt_logprobs:
                    self._input_logprobs = _build_input(self._prompt, event.prompt_logprobs)
            case Delta():
                self._sent_s += event.ready_s
                if event.token_ids:
                    yield from self._push_tokens(event)
            case ChoiceFinished() | Finished():
                yield from self._finish(event)

    def take_sent(self) -> list[float]:
        """Returns when each token of the messages since the last call was on the host."""
        sent_s, self._sent_s = self._sent_s, []
        return sent_s

    def _push_tokens(self, delta: Delta) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        is_first = delta.index not in self._choices
        complete = self._choice(delta.index)
        complete.output_ids.extend(delta.token_ids)
        logprobs = _build_output(delta.logprobs) if delta.logprobs else None
        if self._is_streamed:
            yield self._build_chunk(delta, logprobs, is_first=is_first)
            return
        if logprobs is not None:
            complete.output_logprobs.MergeFrom(logprobs)
            self.num_bytes += logprobs.ByteSize()

    def _build_chunk(
        self,
        delta: Delta,
        logprobs: vllm_engine_pb2.OutputLogProbs | None,
        *,
        is_first: bool,
    ) -> vllm_engine_pb2.GenerateResponse:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(delta.token_ids),  # of this chunk: clients add them up
            output_logprobs=logprobs,
            input_logprobs=self._input_logprobs if is_first else None,
            index=delta.index,
        )
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _finish(
        self, finished: ChoiceFinished | Finished
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        has_begun = finished.index in self._choices
        complete = self._choice(finished.index)
        complete.finish_reason = FINISH_REASONS[finished.reason]
        complete.completion_tokens = len(complete.output_ids)
        match finished.matched_stop:
            case str() as text if finished.reason is FinishReason.STOP:
                complete.matched_stop_str = text
            case int() as token_id if finished.reason is FinishReason.STOP:
                complete.matched_token_id = token_id
        if self._input_logprobs is not None and not (self._is_streamed and has_begun):
            complete.input_logprobs.CopyFrom(self._input_logprobs)
        if isinstance(finished, Finished):
            self._complete(finished)
        yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _choice(self, index: int) -> vllm_engine_pb2.GenerateComplete:
        if index not in self._choices:
            self._choices[index] = vllm_engine_pb2.GenerateComplete(
                index=index, prompt_tokens=len(self._prompt)
            )
        return self._choices[index]


def _build_output(entries: Sequence[TokenLogprobs]) -> vllm_engine_pb2.OutputLogProbs:
    message = vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
    )
    if any(entry.top_ids for entry in entries):
        message.top_logprobs.extend(map(_build_top, entries))
    return message


def _build_input(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs]
) -> vllm_engine_pb2.InputLogProbs:
    """Returns a prompt's: nothing predicts its first token, whose place is empty."""
    message = vllm_engine_pb2.InputLogProbs(token_ids=prompt)
    message.token_logprobs.add()
    for entry in entries:
        message.token_logprobs.add(value=entry.logprob)
    if any(entry.top_ids for entry in entries):
        message.top_logprobs.add()
        message.top_logprobs.extend(map(_build_top, entries))
    return message


def _build_top(entry: TokenLogprobs) -> vllm_engine_pb2.TopLogProbs:
    return vllm_engine_pb2.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)
