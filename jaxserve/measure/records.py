"""What a replay knows of each request: facts as they were seen, nothing worked out."""

import dataclasses
from typing import Literal

# ok: ended as asked. short: ended without error before the tokens it was to have. refused: an
# error before anything ran. failed: an error later. timed_out: the client's own limit, or the
# server's deadline. cancelled: by the replay's end.
Outcome = Literal["ok", "short", "refused", "failed", "timed_out", "cancelled"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Arrival:
    """A message of a stream as the client saw it.

    Attributes:
      time_s: when it was read, seconds since the replay's start.
      num_tokens: output tokens it carries, as the server says; may be 0, or more than 1.
    """

    time_s: float
    num_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ServerPhases:
    """Where the server says the time went, seconds; None for what it does not tell."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    delivery_s: float | None = None
    compile_s: float | None = None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RequestRecord:
    """One request of a replay. Times are seconds since the replay's start, on one monotonic clock.

    Attributes:
      index: place in the workload.
      prompt_class: the workload's word for its kind; "" is none.
      intended_s: when the workload wants it sent: what latencies count from.
      sent_s: when it really was sent; sent_s - intended_s is the send lag.
      arrivals: messages with tokens, in order.
      end_s: when its last byte, or its error, was read.
      prompt_tokens, output_tokens, cached_prompt_tokens: the server's usage; None where none came.
      wanted_tokens: output tokens that the workload asks for; None leaves the end to the model.
      deadline_s: limit of the whole request from its intended start; None is none.
      finish_reason: the server's word; "" where it did not end by itself.
      error: what the client was told; "" for none.
      is_warm_up: left out of every figure.
      are_tokens_assumed: the server tells the tokens of the whole, not of each message; they are
        spread evenly over the messages.
    """

    index: int
    request_id: str
    prompt_class: str
    intended_s: float
    sent_s: float
    arrivals: tuple[Arrival, ...]
    end_s: float
    outcome: Outcome
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    wanted_tokens: int | None = None
    deadline_s: float | None = None
    finish_reason: str = ""
    error: str = ""
    phases: ServerPhases = ServerPhases()
    is_warm_up: bool = False
    are_tokens_assumed: bool = False
