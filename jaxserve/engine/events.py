"""What a stream carries: one start, deltas, one finish; and the accounts that come with the end."""

import dataclasses

from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Usage:
    """Tokens of one request, as they are charged: surplus tokens are not among them."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds; 0.0 for a phase that was never reached.

    Queue, prefill, decode and delivery follow each other without a gap. The end is when the last
    token was on the host, or what else ended the request: a cancel, a deadline, an error.

    Attributes:
      queue_s: arrival to first scheduled, or to the end where it never was.
      prefill_s: first scheduled to the first token on the host, or to the end where none was.
      time_to_first_token_s: arrival to the first token on the host.
      decode_s: first token to the end.
      compile_s: compilation this request waited for; 0.0 when every shape was warm.
      delivery_s: the end until the reader has the terminal event and all before it is accepted.
      delivery_sum_s: on the host until accepted, added up over the tokens accepted by then.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    delivery_s: float = 0.0
    delivery_sum_s: float = 0.0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ExecutionInfo:
    """How the engine ran a request.

    Attributes:
      prefill_bucket_tokens: tokens of the largest forward program that computed its prompt.
      prefill_chunks: steps that computed its prompt.
      padding_fraction: share of those steps' tokens that was padding, in [0, 1].
      preemptions: times its pages were taken back.
    """

    prefill_bucket_tokens: int = 0
    prefill_chunks: int = 0
    padding_fraction: float = 0.0
    preemptions: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Started:
    """The request left the queue. Comes first in every stream that does not end with an error; with
    the first token where the prompt's log-probabilities are asked for.

    Attributes:
      cached_prompt_tokens: of those, computed for earlier requests.
      prompt_logprobs: of the prompt's tokens from the second on; empty unless asked for.
    """

    request_id: str
    prompt_tokens: int
    cached_prompt_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Delta:
    """New output. Text and ids need not match one to one: text waits for whole characters.

    Attributes:
      index: which choice.
      logprobs: one for each of `token_ids`; empty unless asked for.
      ready_s: when each token was on the host, on the engine's clock; not compared.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    ready_s: tuple[float, ...] = dataclasses.field(default=(), compare=False, repr=False)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ChoiceFinished:
    """The end of one of several choices, while others go on; as in `Finished`."""

    index: int
    reason: FinishReason
    matched_stop: str | int | None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Finished:
    """The end of the last choice, and so of the request, without an error.

    Attributes:
      matched_stop: with STOP, the stop string or the stop token id that ended it.
      end_s: when it ended, on the engine's clock; not compared.
    """

    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    execution: ExecutionInfo
    end_s: float = dataclasses.field(default=0.0, compare=False, repr=False)


Event = Started | Delta | ChoiceFinished | Finished
