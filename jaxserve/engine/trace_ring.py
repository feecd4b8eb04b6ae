"""The last steps and requests of an engine, kept for a trace. Ids and counts, never contents."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.engine.events import Timings
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.plan import HostPhase


class Span(NamedTuple):
    """A stretch of the engine thread's time."""

    phase: HostPhase
    start_s: float
    end_s: float


class RowTrace(NamedTuple):
    """What a step computed for one state row."""

    row: int
    request_id: str
    num_tokens: int
    samples: bool


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StepTrace:
    """A step that has retired.

    Attributes:
      dispatched_s: when the host had handed all of it to the device.
      start_s: when the device began it: dispatched and the step before it done.
      ready_s: when the host first saw it done.
    """

    step_id: int
    bucket: str
    num_tokens: int
    dispatched_s: float
    start_s: float
    ready_s: float
    rows: tuple[RowTrace, ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Round:
    """One turn of the engine's loop.

    Attributes:
      spans: without a gap from the end of the round before.
      launched: the id of the step that it launched.
      retired: the step whose result it read.
    """

    spans: tuple[Span, ...]
    launched: int | None
    retired: StepTrace | None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RequestTrace:
    """A request that has ended.

    Attributes:
      timings: its phases, from its arrival to its end without a gap; delivery is the reader's.
      end: the metrics' word for how it ended.
      reader: knows when all of it was delivered, which may be still to come.
    """

    request_id: str
    arrival_s: float
    end_s: float
    timings: Timings
    end: str
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    reader: ReaderAccount


class TraceRing:
    """Holds the last so many rounds, and as many requests. The engine thread alone writes."""

    def __init__(self, max_steps: int) -> None:
        self._rounds: collections.deque[Round] = collections.deque(maxlen=max_steps)
        self._requests: collections.deque[RequestTrace] = collections.deque(maxlen=max_steps)

    def add_round(self, done: Round) -> None:
        self._rounds.append(done)

    def add_request(self, ended: RequestTrace) -> None:
        self._requests.append(ended)

    @property
    def rounds(self) -> Sequence[Round]:
        """What is there now, oldest first; any thread may ask."""
        return tuple(self._rounds.copy())

    @property
    def requests(self) -> Sequence[RequestTrace]:
        """In the order of their ends."""
        return tuple(self._requests.copy())
