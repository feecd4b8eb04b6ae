"""Where the time of the engine's loop and of its device goes, measured at each turn."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Final

from jaxserve.config import MeasureSection
from jaxserve.engine.trace_ring import Round, RowTrace, Span, StepTrace, TraceRing
from jaxserve.metrics import Metrics
from jaxserve.plan import HOST_PHASES, HostPhase, InFlight, StepPlan, StepResult

FLUSH_S: Final = 0.1  # counters are at most this old: a step of milliseconds need not pay for them


@dataclasses.dataclass(slots=True, kw_only=True)
class _Flight:
    """A step on the device; its device time is known once it is seen ready."""

    plan: StepPlan
    in_flight: InFlight
    dispatched_s: float
    rows: tuple[RowTrace, ...]
    start_s: float = 0.0
    ready_s: float | None = None


class StepClock:
    """Gives every moment of the engine's loop to exactly one phase, and finds the device's part.

    - The host's phases are cut by `lap`, so their sum is the loop's time.
    - The device is busy with a step from when all of it was dispatched, or from the end of the step
      before it if that came later, until it is ready. Whether it is ready is asked at every lap, so
      it is known to a lap's length, and exactly where the host waits for it.
    - The gap is the rest, less the time without requests: busy + gap + idle = the loop's time.

    Off, it does nothing and reads no clock. All of it is the engine thread's.

    Attributes:
      trace: where the last turns are kept; None where none are.
    """

    def __init__(
        self,
        section: MeasureSection,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        name_of: Callable[[int], str],
    ) -> None:
        """Args:
        name_of: a sequence's request id, for the trace.
        """
        self.trace = TraceRing(section.trace_steps) if section.trace_steps else None
        self._is_on = section.phases
        self._metrics = metrics
        self._clock = clock
        self._name_of = name_of
        self._flights: collections.deque[_Flight] = collections.deque()
        self._host_s: dict[HostPhase, float] = dict.fromkeys(HOST_PHASES, 0.0)
        self._device_s: dict[str, float] = {}
        self._gap_s = 0.0
        self._all_busy_s = self._all_gap_s = 0.0  # flushed ones, for the ratio
        self._idle_s = 0.0  # since the device was last busy
        self._last_s = self._free_s = self._flushed_s = 0.0  # last lap; device done; last flush
        # of this turn
        self._spans: list[Span] = []
        self._launched: int | None = None
        self._retired: StepTrace | None = None
        self.begin()

    def begin(self) -> None:
        """The loop begins."""
        if self._is_on:
            self._last_s = self._free_s = self._flushed_s = self._clock()

    def lap(self, phase: HostPhase) -> None:
        """Gives the time since the last lap to `phase`."""
        if not self._is_on:
            return
        since_s, now_s = self._last_s, self._clock()
        self._last_s = now_s
        self._host_s[phase] += now_s - since_s
        if phase == "idle":
            self._idle_s += now_s - since_s
        if self.trace is not None and now_s > since_s:
            self._spans.append(Span(phase, since_s, now_s))
        for flight in self._flights:
            if flight.ready_s is None:
                if not flight.in_flight.is_ready():
                    break
                self._note_ready(flight)

    def _note_ready(self, flight: _Flight) -> None:
        flight.start_s = max(flight.dispatched_s, self._free_s)
        flight.ready_s = self._last_s
        # never below 0: the idle time was added up in pieces, which rounds
        self._gap_s += max(0.0, flight.start_s - self._free_s - self._idle_s)
        self._free_s, self._idle_s = self._last_s, 0.0

    def note_launch(self, plan: StepPlan, in_flight: InFlight) -> None:
        """A step was dispatched, as of the last lap."""
        if not self._is_on:
            return
        rows: tuple[RowTrace, ...] = ()
        if self.trace is not None:
            rows = tuple(
                RowTrace(
                    chunk.row, self._name_of(chunk.sequence_id), chunk.num_tokens, chunk.samples
                )
                for chunk in plan.chunks
            )
        self._flights.append(
            _Flight(plan=plan, in_flight=in_flight, dispatched_s=self._last_s, rows=rows)
        )
        self._launched = plan.step_id

    def note_result(self, result: StepResult) -> None:
        """The oldest step's result was read, its laps with it."""
        if not self._is_on:
            return
        flight = self._flights.popleft()
        ready_s, bucket = flight.ready_s, result.bucket.name
        assert ready_s is not None, "a result that was read was ready"
        self._device_s[bucket] = self._device_s.get(bucket, 0.0) + ready_s - flight.start_s
        if self.trace is not None:
            self._retired = StepTrace(
                step_id=flight.plan.step_id,
                bucket=bucket,
                num_tokens=flight.plan.num_tokens,
                dispatched_s=flight.dispatched_s,
                start_s=flight.start_s,
                ready_s=ready_s,
                rows=flight.rows,
            )

    def end_turn(self) -> None:
        """The rest of the turn was `commit`."""
        self.lap("commit")
        if self.trace is not None:
            self.trace.add_round(
                Round(spans=tuple(self._spans), launched=self._launched, retired=self._retired)
            )
            self._spans, self._launched, self._retired = [], None, None
        if self._last_s - self._flushed_s >= FLUSH_S:
            self._flush()

    def rest(self) -> None:
        """Nothing is to do from now on; the counters are up to date meanwhile."""
        self.lap("commit")
        self._flush()

    def end(self) -> None:
        """The loop ends; what is on the device now is not waited for."""
        self._flights.clear()
        self.lap("commit")
        self._gap_s += max(0.0, self._last_s - self._free_s - self._idle_s)
        self._flush()

    def _flush(self) -> None:
        metrics = self._metrics
        for phase, seconds in self._host_s.items():
            if seconds:
                metrics.step_host_seconds.labels(phase=phase).inc(seconds)
                self._host_s[phase] = 0.0
        for bucket, seconds in self._device_s.items():
            metrics.step_device_seconds.labels(bucket=bucket).inc(seconds)
            self._all_busy_s += seconds
        metrics.step_gap_seconds.inc(self._gap_s)
        self._all_gap_s += self._gap_s
        if known_s := self._all_gap_s + self._all_busy_s:
            metrics.host_gap_ratio.set(self._all_gap_s / known_s)
        self._device_s, self._gap_s = {}, 0.0
        self._flushed_s = self._last_s
