"""A request while it is in the engine: its choices, its stream, its stamps and accounts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from jaxserve.engine.events import ChoiceFinished, ExecutionInfo, Finished, Timings, Usage
from jaxserve.engine.live_choice import LiveChoice, StopText
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.engine.unread import UnreadTotal
from jaxserve.engine.waker import Waker
from jaxserve.errors import DeadlineError, JaxserveError
from jaxserve.metrics import error_label
from jaxserve.plan import Bucket, Chunk, StepPlan, StepResult, TokenLogprobs
from jaxserve.request import FinishReason, Request, RequestEnd
from jaxserve.scheduler.settlement import Update
from jaxserve.text.constraints import Constraint
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stops import StopMatcher
from jaxserve.text.tokenizer import Tokenizer

# With less room for what is unread, what waits for a turn could be too much.
MIN_FOLLOWED_BYTES: Final = 16 << 10
Outcome = FinishReason | JaxserveError  # how a request ended


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """What the engine thread knows of one request, from submit to its only end.

    Attributes:
      choices: by index.
      prompt_logprobs: of the prompt's tokens from the second on, as far as they are worked out and
        the reader does not have them.
      is_queued: counted in the bounded queue; until first scheduled.
      scheduled_s: first scheduled; None until then.
      num_prefill_tokens: tokens that its prefill steps computed, batch mates' among them.
      num_prefill_padded: tokens of those steps' buckets.
      on_end: as in `GenerationRequest`.
    """

    request: Request
    stream: Stream
    choices: list[LiveChoice] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    is_queued: bool = True
    scheduled_s: float | None = None
    first_token_s: float | None = None
    prefill_chunks: int = 0
    prefill_bucket_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefill_padded: int = 0
    compile_s: float = 0.0
    on_end: Callable[[RequestEnd], None] | None = None

    @property
    def num_output(self) -> int:
        """Tokens in the stream, of all choices."""
        return sum(choice.num_output for choice in self.choices)

    @property
    def longest_output(self) -> int:
        """Tokens in the stream of the choice with the most."""
        return max(choice.num_output for choice in self.choices)

    @property
    def last_token_s(self) -> float | None:
        """When the last token of all choices was on the host; None before the first."""
        last_s = (choice.last_token_s for choice in self.choices)
        return max((s for s in last_s if s is not None), default=None)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether the stream starts only with the prompt's log-probabilities."""
        return self.request.sampling.prompt_logprobs is not None and len(self.request.prompt) > 1

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Takes the next of the prompt's log-probabilities; the last of them start the stream."""
        self.prompt_logprobs += entries
        if len(self.prompt_logprobs) == len(self.request.prompt) - 1:
            num_cached = self.request.num_cached
            self.stream.start(tuple(self.prompt_logprobs), cached_prompt_tokens=num_cached)
            self.prompt_logprobs = []

    def put(self, choice: LiveChoice, update: Update, *, now_s: float) -> bool:
        """Hands a choice's token to the reader; False where the reader is too slow."""
        token_id = update.token_id
        assert token_id is not None
        text = choice.text_of(update.finish)
        if self.request.is_followed:
            self._put_followed(is_last=update.finish is not None, is_silent=text is not None)
        elif self.stream.put(
            token_id, text=text, now_s=now_s, index=choice.index, logprobs=update.logprobs
        ):
            choice.num_output += 1
        else:
            return False
        if self.first_token_s is None:
            self.first_token_s = now_s
        return True

    def _put_followed(self, *, is_last: bool, is_silent: bool) -> None:
        if is_last:
            self.catch_up(is_last_silent=is_silent)  # handed over with the end
        else:
            self.stream.hand_over()

    def catch_up(self, *, is_last_silent: bool = False) -> None:
        """Has the stream take all tokens of a request that is followed: it is to end."""
        if self.request.is_followed:
            self.stream.catch_up(is_last_silent=is_last_silent)
            (choice,) = self.choices
            choice.num_output = len(choice.output)

    def note_prefill(self, *, num_tokens: int, bucket: Bucket) -> None:
        """Accounts a step that computed a part of the prompt."""
        self.prefill_chunks += 1
        self.prefill_bucket_tokens = max(self.prefill_bucket_tokens, bucket.num_tokens)
        self.num_prefill_tokens += num_tokens
        self.num_prefill_padded += bucket.num_tokens

    def end_choice(self, choice: LiveChoice, reason: FinishReason) -> None:
        """Gives the reader the end of a choice that others outlive."""
        choice.has_ended = True
        choice.reason = reason
        ended = ChoiceFinished(
            index=choice.index, reason=reason, matched_stop=choice.matched_stop(reason)
        )
        self.stream.finish_choice(ended, last_text=choice.flush())

    def end(self, outcome: Outcome, *, now_s: float) -> None:
        """Gives the reader the ends of all choices that have none, and so the terminal event."""
        if isinstance(outcome, JaxserveError):
            self.stream.finish(outcome)
            return
        *others, last = (choice for choice in self.choices if not choice.has_ended)
        for choice in others:
            self.end_choice(choice, outcome)
        finished = Finished(
            index=last.index,
            reason=outcome,
            matched_stop=last.matched_stop(outcome),
            usage=Usage(
                prompt_tokens=len(self.request.prompt),
                completion_tokens=self.num_output,
                cached_prompt_tokens=self.request.num_cached,
            ),
            timings=self.timings(now_s),
            execution=self._execution(),
            end_s=now_s,
        )
        last.has_ended = True
        last.reason = outcome
        self.stream.finish(finished, last_text=last.flush())

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

    def tell_end(self, outcome: Outcome, *, now_s: float) -> None:
        """Tells who asked for it; its stream has its end."""
        if self.on_end is None:
            return
        arrival_s, scheduled_s = self.request.arrival_s, self.scheduled_s
        first_s, last_s = self.first_token_s, self.last_token_s
        prefill_s = decode_s = None
        if scheduled_s is not None and first_s is not None and last_s is not None:
            prefill_s, decode_s = first_s - scheduled_s, last_s - first_s
        reasons = tuple(choice.reason for choice in self.choices if choice.reason is not None)
        self.on_end(
            RequestEnd(
                request=self.request,
                outcome=outcome,
                reasons=() if isinstance(outcome, JaxserveError) else reasons,
                completion_tokens=self.num_output,
                queue_s=(now_s if scheduled_s is None else scheduled_s) - arrival_s,
                time_to_first_token_s=None if first_s is None else first_s - arrival_s,
                prefill_s=prefill_s,
                decode_s=decode_s,
                e2e_s=now_s - arrival_s,
                preemptions=self.num_preemptions,
            )
        )

    @property
    def num_preemptions(self) -> int:
        """Times that pages were taken back, of all choices."""
        return sum(sequence.num_preemptions for sequence in self.request.sequences)

    def _execution(self) -> ExecutionInfo:
        padded = self.num_prefill_padded
        return ExecutionInfo(
            prefill_bucket_tokens=self.prefill_bucket_tokens,
            prefill_chunks=self.prefill_chunks,
            padding_fraction=1 - self.num_prefill_tokens / padded if padded else 0.0,
            preemptions=self.num_preemptions,
        )


def build_live_request(
    request: Request,
    *,
    tokenizer: Tokenizer,
    constraint: Constraint | None,
    max_bytes: int,
    waker: Waker,
    on_cancel: Callable[[], None],
    reader: ReaderAccount,
    delivery: Delivery,
    total: UnreadTotal[Stream],
    on_end: Callable[[RequestEnd], None] | None = None,
) -> LiveRequest:
    """Returns the request with its stream; with stop strings its text is made on this side.

    Args:
      constraint: of the first choice; the others get forks of it.
    """
    sampling = request.sampling
    indices = range(sampling.num_choices)
    decoders = [
        Detokenizer(
            tokenizer,
            sampling.skip_special_tokens,
            kept_special_ids=sampling.kept_special_ids,
            prompt=request.prompt,
        )
        for _ in indices
    ]
    stream = Stream(
        request_id=request.id,
        prompt_tokens=len(request.prompt),
        prompt=request.prompt,
        max_bytes=max_bytes,
        decoders=[None] * len(decoders) if sampling.stop_strings else decoders,
        waker=waker,
        on_cancel=on_cancel,
        reader=reader,
        delivery=delivery,
        total=total,
    )
    live = LiveRequest(request=request, stream=stream, on_end=on_end)
    constraints = [constraint.fork() if constraint and index else constraint for index in indices]
    request.is_followed = (
        max_bytes >= MIN_FOLLOWED_BYTES
        and sampling.num_choices == 1
        and not sampling.stop_strings
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
    )
    live.choices += [
        LiveChoice(
            live=live,
            index=index,
            stops=_build_stops(request, decoders[index]) if sampling.stop_strings else None,
            constraint=constraints[index],
        )
        for index in indices
    ]
    return live


def _build_stops(request: Request, decoder: Detokenizer) -> StopText:
    sampling = request.sampling
    matcher = StopMatcher(sampling.stop_strings, sampling.include_stop_text)
    return StopText(decoder=decoder, matcher=matcher, min_tokens=sampling.min_tokens)


def note_step(plan: StepPlan, result: StepResult, choices: Mapping[int, LiveChoice]) -> None:
    """Accounts a step that was read to the requests in it, once each.

    Args:
      choices: those that have not ended, by sequence id.
    """
    chunks: Sequence[Chunk]
    if result.compile_s:
        chunks = plan.chunks
    else:  # nothing to note of those behind their prompts
        chunks = [chunk for chunk in plan.others if chunk.start < chunk.prompt_len]
    found = (choices.get(chunk.sequence_id) for chunk in chunks)
    for live in dict.fromkeys(choice.live for choice in found if choice is not None):
        live.compile_s += result.compile_s
        if live.first_token_s is None:
            live.note_prefill(num_tokens=plan.num_tokens, bucket=result.bucket)


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
