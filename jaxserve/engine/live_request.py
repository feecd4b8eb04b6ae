"""A request while it is in the engine: its stream, its stops, its stamps and accounts."""

import dataclasses
from collections.abc import Callable
from typing import Final

from jaxserve.engine.events import ExecutionInfo, Finished, Timings, Usage
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.stream import Decoder, Delivery, Stream, Waker
from jaxserve.errors import DeadlineError, JaxserveError
from jaxserve.metrics import error_label
from jaxserve.plan import Bucket
from jaxserve.request import FinishReason, Request
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stops import StopMatcher
from jaxserve.text.tokenizer import Tokenizer

Outcome = FinishReason | JaxserveError  # how a request ended

# without stop strings, STOP too is by a token id
ENDS_BY_ID: Final = frozenset({FinishReason.EOS, FinishReason.STOP})


class StopText:
    """The text of a request with stop strings, cut exactly where one matches.

    A stop that is complete before `min_tokens` does not count.

    Attributes:
      text: what the last token lets out; less than its own text while a stop may be beginning.
      matched: the stop string that was found.
    """

    def __init__(self, *, decoder: Decoder, matcher: StopMatcher, min_tokens: int) -> None:
        self.text = ""
        self.matched: str | None = None
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens

    def push(self, token_id: int, *, output_index: int) -> bool:
        """Takes the next token; True where a stop string is complete."""
        self.text = self._decoder.push([token_id])
        if output_index < self._min_tokens:
            self.text = self._matcher.push_unmatched(self.text)
            return False
        found = self._matcher.push(self.text)
        self.text, self.matched = found.text, found.matched
        return found.matched is not None

    def push_stop_id(self, token_id: int, *, is_text_kept: bool) -> None:
        """Takes a token that ends the request by its id: nothing is held back any more."""
        self.text = self._matcher.flush()
        self.text += self._decoder.push([token_id]) if is_text_kept else ""

    def flush(self) -> str:
        """Returns the text still held back at an end that no stop string made."""
        if self.matched is not None:
            return ""
        return self._matcher.flush() + self._decoder.flush()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """What the engine thread knows of one request, from submit to its only end.

    Attributes:
      is_queued: counted in the bounded queue; until first scheduled.
      num_output: tokens delivered.
      scheduled_s: first scheduled; None until then.
      num_prefill_tokens: tokens that its prefill steps computed, batch mates' among them.
      num_prefill_padded: tokens of those steps' buckets.
    """

    request: Request
    stream: Stream
    stops: StopText | None
    is_queued: bool = True
    num_output: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    last_token_id: int | None = None
    prefill_chunks: int = 0
    prefill_bucket_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefill_padded: int = 0
    compile_s: float = 0.0

    def match(self, token_id: int) -> bool:
        """Searches the next token's text; True where a stop string ends the request with it."""
        if self.stops is None:
            return False
        sampling = self.request.sampling
        if token_id in self.request.stop_ids and self.num_output >= sampling.min_tokens:
            self.stops.push_stop_id(token_id, is_text_kept=sampling.include_stop_text)
            return False
        return self.stops.push(token_id, output_index=self.num_output)

    def put(self, token_id: int, *, now_s: float, finish: FinishReason | None) -> bool:
        """Hands a token to the reader; False where the reader is too slow."""
        text: str | None = None  # the reader decodes it
        if self.stops is not None:
            text = self.stops.text
        elif finish in ENDS_BY_ID and not self.request.sampling.include_stop_text:
            text = ""
        if not self.stream.put(token_id, text=text, now_s=now_s):
            return False
        self.num_output += 1
        self.last_token_id = token_id
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        return True

    def note_prefill(self, *, num_tokens: int, bucket: Bucket) -> None:
        """Accounts a step that computed a part of the prompt."""
        self.prefill_chunks += 1
        self.prefill_bucket_tokens = max(self.prefill_bucket_tokens, bucket.num_tokens)
        self.num_prefill_tokens += num_tokens
        self.num_prefill_padded += bucket.num_tokens

    def end(self, outcome: Outcome, *, now_s: float) -> None:
        """Gives the reader the terminal event, after any text that was held back."""
        if isinstance(outcome, JaxserveError):
            self.stream.finish(outcome)
            return
        finished = Finished(
            index=0,
            reason=outcome,
            matched_stop=self._matched_stop(outcome),
            usage=Usage(prompt_tokens=len(self.request.prompt), completion_tokens=self.num_output),
            timings=self.timings(now_s),
            execution=self._execution(),
            end_s=now_s,
        )
        self.stream.finish(finished, last_text=self.stops.flush() if self.stops else "")

    def _matched_stop(self, reason: FinishReason) -> str | int | None:
        if reason is not FinishReason.STOP:
            return None
        if self.stops is not None and self.stops.matched is not None:
            return self.stops.matched
        return self.last_token_id

    def timings(self, end_s: float) -> Timings:
        """Returns the phases of a request that ends then, delivery excepted."""
        arrival_s = self.request.arrival_s
        scheduled_s = end_s if self.scheduled_s is None else self.scheduled_s
        first_s = end_s if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_s=scheduled_s - arrival_s,
            prefill_s=first_s - scheduled_s,
            time_to_first_token_s=0.0 if self.first_token_s is None else first_s - arrival_s,
            decode_s=end_s - first_s,
            compile_s=self.compile_s,
        )

    def _execution(self) -> ExecutionInfo:
        padded = self.num_prefill_padded
        sequences = self.request.sequences
        return ExecutionInfo(
            prefill_bucket_tokens=self.prefill_bucket_tokens,
            prefill_chunks=self.prefill_chunks,
            padding_fraction=1 - self.num_prefill_tokens / padded if padded else 0.0,
            preemptions=sum(sequence.num_preemptions for sequence in sequences),
        )


def build_live_request(
    request: Request,
    *,
    tokenizer: Tokenizer,
    max_bytes: int,
    waker: Waker,
    on_cancel: Callable[[], None],
    reader: ReaderAccount,
    delivery: Delivery,
) -> LiveRequest:
    """Returns the request with its stream; with stop strings its text is made on this side."""
    sampling = request.sampling
    decoder = Detokenizer(
        tokenizer,
        sampling.skip_special_tokens,
        kept_special_ids=sampling.kept_special_ids,
        prompt=request.prompt,
    )
    stops = None
    if sampling.stop_strings:
        stops = StopText(
            decoder=decoder,
            matcher=StopMatcher(sampling.stop_strings, sampling.include_stop_text),
            min_tokens=sampling.min_tokens,
        )
    stream = Stream(
        request_id=request.id,
        prompt_tokens=len(request.prompt),
        prompt=request.prompt,
        max_bytes=max_bytes,
        decoder=None if stops else decoder,
        waker=waker,
        on_cancel=on_cancel,
        reader=reader,
        delivery=delivery,
    )
    return LiveRequest(request=request, stream=stream, stops=stops)


def late_outcome(request: Request, now_s: float) -> FinishReason | DeadlineError:
    """Returns how a request ends whose time is over: its output so far stands, if there is any."""
    if request.deadline_s is None or now_s < request.deadline_s:
        waited_s = now_s - request.arrival_s
        return DeadlineError(
            f"queue_timeout passed: waited {waited_s:.3f} s for admission; try again later",
            field="queue_timeout",
        )
    if any(sequence.output for sequence in request.sequences):
        return FinishReason.DEADLINE
    return DeadlineError(
        "the deadline passed before the first token; allow more time, or try again later"
    )


def outcome_label(outcome: Outcome) -> str:
    """Returns the metrics' word for an end: `eos`, `max_tokens`, …, `error_numerics`, …"""
    if isinstance(outcome, FinishReason):
        return outcome.value
    return f"error_{error_label(outcome)}"
