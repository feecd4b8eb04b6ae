"""What a replay needs of a target, whatever carries it."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from jaxserve.errors import JaxserveError
from jaxserve.measure.records import ServerPhases
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.request import FinishReason

if TYPE_CHECKING:  # a target brings only its own transport
    from jaxserve.client import Finish
    from jaxserve.engine import Finished

# By names of `SamplingParams`; what is left out is the target's own default.
Sampling = Mapping[str, bool | int | float]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Ask:
    """One request, ready to be sent.

    Attributes:
      at_s: when to send it, seconds since the replay's start; not read in a closed loop.
      wanted_tokens: output tokens it must have for `ok`; None leaves the end to the model.
      deadline_s: of the whole request, from its intended start; None is none.
      sampling: everything that is sent of it, lengths among it.
    """

    index: int
    request_id: str
    at_s: float
    prompt: str | tuple[int, ...]
    prompt_class: str = ""
    wanted_tokens: int | None = None
    deadline_s: float | None = None
    priority: int = 0
    sampling: Sampling = dataclasses.field(default_factory=dict)
    is_warm_up: bool = False


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Message:
    """Part of an output.

    Attributes:
      num_tokens: as the server says; None where it does not say.
      has_text: whether there was anything to show.
    """

    num_tokens: int | None
    has_text: bool = True


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class End:
    """The end without an error; what the server does not tell is None.

    Attributes:
      is_late: it was cut by a deadline.
    """

    finish_reason: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    phases: ServerPhases = dataclasses.field(default_factory=ServerPhases)
    is_late: bool = False


class TargetError(JaxserveError):
    """A request ended with an error.

    Attributes:
      outcome: what it counts as.
    """

    def __init__(self, message: str, *, outcome: Literal["refused", "failed", "timed_out"]) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Levels:
    """How full a server is at one moment; None is what it does not tell.

    Attributes:
      kv_usage: share of the pool's pages in use, 0 to 1.
      memory_bytes: resident memory of its process.
    """

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    memory_bytes: float | None = None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TargetFacts:
    """What prompts and results need to know of the served model; 0 and "" are not known.

    Attributes:
      special_ids: token ids that a made-up prompt must not hold.
    """

    backend: str
    model: str = ""
    vocab_size: int = 0
    special_ids: frozenset[int] = frozenset()
    max_model_tokens: int = 0


class Target(Protocol):
    """A server to replay against, for the tasks of one event loop."""

    async def describe(self) -> TargetFacts:
        """Returns what is served; raises TargetError where nobody answers."""

    def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        """Sends the request at the first step; yields its messages and then one `End`.

        Closing it early cancels the request.

        Args:
          left_s: until the request's own deadline, for a server that takes one; None is none.

        Raises:
          TargetError: the request ended with an error.
          ConfigError: it asks for what this target cannot be asked.
        """

    async def read_metrics(self) -> Snapshot | None:
        """Returns the server's metrics; None where they cannot be read."""

    async def read_levels(self) -> Levels:
        """Returns the same, as far as a timeline shows it."""

    async def close(self) -> None:
        """Gives connections back."""


def read_end(finish: "Finish | Finished", *, by: Literal["server", "engine"]) -> End:
    """Returns the end that the server or the engine told; what it did not tell is None.

    Raises:
      TargetError: it was cancelled; nobody here asks for that.
    """
    if finish.reason is FinishReason.CANCELLED:
        raise TargetError(f"the {by} cancelled it", outcome="failed")
    usage, timings = finish.usage, finish.timings
    phases = ServerPhases()
    if timings is not None:
        phases = ServerPhases(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            delivery_s=timings.delivery_s,
            compile_s=timings.compile_s,
        )
    return End(
        finish_reason=finish.reason.value,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage else None,
        phases=phases,
        is_late=finish.reason is FinishReason.DEADLINE,
    )
