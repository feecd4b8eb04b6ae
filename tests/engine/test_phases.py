"""Where time goes: nothing of a request, of the loop or of the device is lost or counted twice.

Every look at the clock takes a while here, so a phase that began at another moment than the one
before it ended would show.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxserve.config import Config, LimitsSection, MeasureSection
from jaxserve.engine import Engine, EngineState, Finished, Stream
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.step_clock import StepClock
from jaxserve.engine.trace_ring import RequestTrace
from jaxserve.metrics import Metrics
from jaxserve.plan import HOST_PHASES, Bucket, HostPhase, StepMasks, StepPlan, StepResult
from jaxserve.request import GenerationRequest
from tests.engine.test_stream import Letters
from tests.engines import ONE_ROW, Clock, ask, build_engine
from tests.fakes import EOS_ID, say

TICK_S = 1 / 64  # sums of these are exact
TRACED = MeasureSection(trace_steps=100)
LETTERS = say({None: b"abcdefghij"})


class TickingClock:
    """Time passes with each look."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


class Stage:
    """An engine that is moved step by step in the test's own thread."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  # of build_engine
        self.clock = TickingClock()
        options = {"script": LETTERS, "measure": TRACED, **options}
        self.engine, self.runner = build_engine(clock=self.clock, **options)
        self.engine._change_state(EngineState.SERVING)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine._loop.step()

    def run(self) -> None:
        while self.engine._loop._in_flight or not self.engine._intake.is_empty:
            self.engine._loop.step()

    def traced(self) -> Mapping[str, RequestTrace]:
        assert self.engine.trace is not None
        return {request.request_id: request for request in self.engine.trace.requests}


def finish(stage: Stage) -> None:
    """Eight tokens, to the limit."""
    stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.run()


def end_by_eos(stage: Stage) -> None:
    stage.engine.submit(ask((EOS_ID, 2, 3), id="a"))
    stage.run()


def cancel_while_queued(stage: Stage) -> None:
    stage.engine.submit(ask((9,), id="before"))
    stage.step()
    stream = stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.step(2)
    stream.cancel()
    stage.run()


def cancel_in_its_prompt(stage: Stage) -> None:
    stream = stage.engine.submit(ask(tuple(range(20)), id="a"))
    stage.step(2)
    stream.cancel()
    stage.run()


def cancel_after_tokens(stage: Stage) -> None:
    stream = stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.step(5)
    stream.cancel()
    stage.run()


def be_late_after_tokens(stage: Stage) -> None:
    stage.engine.submit(GenerationRequest(prompt=(1, 2), id="a", deadline_s=stage.clock.now_s + 1))
    stage.step(5)
    stage.clock.now_s += 5
    stage.run()


def be_late_before_a_token(stage: Stage) -> None:
    late = GenerationRequest(prompt=tuple(range(20)), id="a", deadline_s=stage.clock.now_s + 1)
    stage.engine.submit(late)
    stage.step(2)
    stage.clock.now_s += 5
    stage.run()


def wait_too_long(stage: Stage) -> None:
    stage.engine.submit(ask((9,), id="before"))
    stage.step()
    stage.engine.submit(GenerationRequest(prompt=(1, 2), id="a", queue_timeout_s=1.0))
    stage.clock.now_s += 5
    stage.run()


def fail_by_numbers(stage: Stage) -> None:
    stage.runner.script = lambda prompt, index: "not_finite" if index == 2 else 97
    finish(stage)


def not_be_read(stage: Stage) -> None:
    finish(stage)


def be_preempted(stage: Stage) -> None:
    """Both grow until one loses its pages, and is computed again later."""
    for name in ("before", "a"):
        stage.engine.submit(ask((1, 2, 3, 4, 5, 6), id=name, max_tokens=12, ignore_eos=True))
    stage.run()


def be_stopped(stage: Stage) -> None:
    stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.step(3)
    stage.engine._intake.cut()
    stage.engine._loop._end_rest()


def die(stage: Stage) -> None:
    stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.step(3)
    stage.engine._fail(RuntimeError("planted"))


ONE = {"step_limits": ONE_ROW}
ENDINGS: Mapping[str, tuple[Callable[[Stage], None], Mapping[str, object]]] = {
    "max_tokens": (finish, {}),
    "eos": (end_by_eos, {"script": say({(EOS_ID, 2, 3): [97, EOS_ID]})}),
    "cancelled queued": (cancel_while_queued, ONE),
    "cancelled prompt": (cancel_in_its_prompt, {}),
    "cancelled decoding": (cancel_after_tokens, {}),
    "deadline": (be_late_after_tokens, {}),
    "error_deadline prompt": (be_late_before_a_token, {}),
    "error_deadline queued": (wait_too_long, ONE),
    "error_numerics": (fail_by_numbers, {}),
    "error_slow_reader": (not_be_read, {"bounds": LimitsSection(stream_buffer_bytes=20)}),
    "max_tokens preempted": (be_preempted, {"num_pages": 1 + 6}),
    "error_not_serving": (be_stopped, {}),
    "error_engine_dead": (die, {}),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_phases_of_a_request_are_its_time_whatever_its_end(name: str) -> None:
    play, options = ENDINGS[name]
    stage = Stage(**options)
    play(stage)
    ended = stage.traced()["a"]
    timings = ended.timings
    assert ended.end == name.split()[0]
    assert timings.queue_s + timings.prefill_s + timings.decode_s == ended.end_s - ended.arrival_s
    is_queued, has_tokens = name.endswith("queued"), bool(ended.output_tokens)
    assert timings.queue_s > 0
    assert (timings.prefill_s > 0, timings.decode_s > 0) == (not is_queued, has_tokens)
    assert (ended.preemptions > 0) == name.endswith("preempted")


def test_the_end_and_its_delivery_go_on_from_the_phases() -> None:
    stage = Stage()
    stream = stage.engine.submit(ask((1, 2, 3), id="a", max_tokens=3))
    stage.run()
    *_, finished = list(stream)
    ended = stage.traced()["a"]
    assert isinstance(finished, Finished)
    timings = finished.timings
    assert ended.reader.delivered_s is not None
    phases_s = timings.queue_s + timings.prefill_s + timings.decode_s + timings.delivery_s
    assert phases_s == ended.reader.delivered_s - ended.arrival_s
    assert timings.delivery_s > 0
    # each of the three was on the host at most at the end, and is taken before it
    assert timings.delivery_sum_s > 3 * (timings.delivery_s - 2 * TICK_S)
    assert timings.delivery_sum_s == stage.engine.metrics.value("delivery_seconds_sum")


def test_a_request_ends_with_its_last_token() -> None:
    """What the engine does after that is no part of its decode."""
    stage = Stage()
    stream = stage.engine.submit(ask((1, 2, 3), id="a", max_tokens=3))
    stage.run()
    ready_s = [at for event in stream for at in getattr(event, "ready_s", ())]
    ended = stage.traced()["a"]
    assert ended.end_s == ready_s[-1]
    assert ended.timings.decode_s == ready_s[-1] - ready_s[0]


class ScriptedWaits:
    """Stands in for the intake's wait: time passes, a request comes, and in the end the cut."""

    def __init__(self, engine: Engine, clock: TickingClock, asked: list[GenerationRequest]) -> None:
        self._engine = engine
        self._clock = clock
        self._asked = iter(asked)
        self.idle_s = 0.0
        self.streams: list[Stream] = []

    def __call__(self) -> None:
        self._clock.now_s += 7
        self.idle_s += 7
        request = next(self._asked, None)
        if request is None:
            self._engine._intake.cut()
        else:
            self.streams.append(self._engine.submit(request))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_phases_of_the_loop_are_its_time_and_so_is_the_devices(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = TickingClock()

    def pass_time(plan: StepPlan) -> None:
        clock.now_s += 0.5

    engine, _ = build_engine(
        clock=clock, script=LETTERS, overlap=overlap, on_launch=pass_time, on_result=pass_time
    )
    engine._change_state(EngineState.SERVING)
    asked = [ask((1, 2, 3), stop_strings=("e",)), ask((4, 5), max_tokens=3)]
    waits = ScriptedWaits(engine, clock, asked)
    monkeypatch.setattr(engine._intake, "wait_for_work", waits)
    began_s = clock.now_s + TICK_S  # its first look
    engine._run()
    loop_s = clock.now_s - began_s
    read = engine.metrics.value
    by_phase = {
        phase: read("step_host_seconds_total", phase=phase)
        for phase in ("idle", "schedule", "dispatch", "wait", "detokenize", "commit")
    }
    assert sum(by_phase.values()) + read("step_host_seconds_total", phase="readback") == loop_s
    assert all(by_phase.values())
    assert by_phase["idle"] > waits.idle_s == 21
    busy_s, gap_s = read("step_device_seconds_total"), read("step_gap_seconds_total")
    assert busy_s + gap_s + by_phase["idle"] == loop_s
    num_steps = 5 + 3 + (1 if overlap else 0)  # launched before the stop string was seen
    assert read("step_tokens_count") == num_steps
    if not overlap:
        assert busy_s == num_steps * (0.5 + TICK_S)  # a look is taken when it is ready
    assert read("host_gap_ratio") == gap_s / (busy_s + gap_s)


class Flight:
    """A launched step that the test makes ready."""

    def __init__(self) -> None:
        self.has_ended = False

    def is_ready(self) -> bool:
        return self.has_ended

    def launch_output(self, masks: StepMasks) -> None:
        raise AssertionError("nothing is masked here")

    def wait(self) -> None:
        return None

    def result(self) -> StepResult:
        return RESULT


RESULT = StepResult(
    token_ids={},
    not_finite=frozenset(),
    bucket=Bucket(decode_seqs=8, verify_tokens=1, chunk_tokens=64),
)


class Loop:
    """A step clock alone, told of laps by their lengths."""

    def __init__(self) -> None:
        self.metrics, self.clock = Metrics(), Clock()
        self.steps = StepClock(TRACED, self.metrics, self.clock, name_of=lambda id: f"r{id}")
        self.num_steps = 0

    def lap(self, phase: HostPhase, seconds: float) -> None:
        self.clock.now_s += seconds
        self.steps.lap(phase)

    def launch(self) -> Flight:
        flight = Flight()
        self.steps.note_launch(StepPlan(step_id=self.num_steps), flight)
        self.num_steps += 1
        return flight

    def value(self, name: str) -> float:
        return self.metrics.value(f"step_{name}_seconds_total")


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_step_launched_ahead_is_not_counted_while_it_waits(loop: Loop) -> None:
    loop.lap("dispatch", 1)
    first = loop.launch()  # at 1
    loop.lap("dispatch", 1)
    second = loop.launch()  # at 2
    first.has_ended = True
    loop.lap("wait", 4)  # until 6
    loop.steps.note_result(RESULT)
    loop.steps.end_turn()
    second.has_ended = True
    loop.lap("wait", 2)  # until 8
    loop.steps.note_result(RESULT)
    loop.steps.end_turn()
    assert (loop.value("device"), loop.value("gap")) == (5 + 2, 1)
    assert loop.steps.trace is not None
    traced = [turn.retired for turn in loop.steps.trace.rounds if turn.retired]
    assert [(step.start_s, step.ready_s) for step in traced] == [(1001, 1006), (1006, 1008)]


def test_a_step_that_ends_while_the_host_is_busy_leaves_a_gap_from_when_that_was_seen(
    loop: Loop,
) -> None:
    loop.lap("dispatch", 1)
    first = loop.launch()
    first.has_ended = True
    loop.lap("schedule", 3)  # seen ready at 4
    loop.lap("build", 2)
    loop.lap("dispatch", 1)
    second = loop.launch()  # at 7
    loop.lap("wait", 0)
    loop.steps.note_result(RESULT)
    second.has_ended = True
    loop.lap("wait", 1)
    loop.steps.note_result(RESULT)
    loop.steps.end_turn()
    assert (loop.value("device"), loop.value("gap")) == (3 + 1, 1 + 3)
    assert loop.metrics.value("host_gap_ratio") == 0.5


def test_time_without_requests_is_no_gap(loop: Loop) -> None:
    loop.lap("dispatch", 1)
    loop.launch().has_ended = True
    loop.lap("wait", 2)
    loop.steps.note_result(RESULT)
    loop.lap("commit", 0.25)
    loop.lap("idle", 50)
    loop.lap("schedule", 0.5)
    loop.steps.end()
    assert loop.value("gap") == 1 + 0.25 + 0.5
    assert loop.value("host") == 2 + 50 + 1.75


def test_the_end_asks_nothing_of_a_device_that_may_have_failed(loop: Loop) -> None:
    loop.lap("dispatch", 1)
    loop.launch().is_ready = fail  # type: ignore[method-assign]
    loop.clock.now_s += 2
    loop.steps.end()
    assert (loop.value("host"), loop.value("device"), loop.value("gap")) == (3, 0, 3)


def fail() -> bool:
    raise AssertionError("it was asked")


def test_the_counters_wait_a_tenth_of_a_second_at_most(loop: Loop) -> None:
    loop.lap("schedule", 0.0625)
    loop.steps.end_turn()
    assert loop.value("host") == 0
    loop.lap("schedule", 0.0625)
    loop.steps.end_turn()
    assert loop.value("host") == 0.125
    loop.lap("schedule", 0.0625)
    loop.steps.rest()  # nothing may come for an hour
    assert loop.value("host") == 0.1875


def test_switched_off_no_clock_is_read_and_nothing_is_kept() -> None:
    def fail() -> float:
        raise AssertionError("the clock was read")

    metrics = Metrics()
    steps = StepClock(MeasureSection(phases=False), metrics, fail, name_of=str)
    steps.begin()
    for phase in HOST_PHASES:
        steps.lap(phase)
    steps.note_launch(StepPlan(step_id=1), Flight())
    steps.note_result(RESULT)
    for end in (steps.end_turn, steps.rest, steps.end):
        end()
    assert metrics.value("step_host_seconds_total") == 0
    reader = ReaderAccount(metrics, fail, times_decoding=False)
    assert reader.decode(Letters(), list(b"text"), is_last=True) == "text"


def test_the_switch_of_the_configuration_takes_the_stamps_away() -> None:
    num_looks = {}
    for phases in (True, False):
        clock = TickingClock()
        engine, _ = build_engine(clock=clock, script=LETTERS, measure=MeasureSection(phases=phases))
        engine._change_state(EngineState.SERVING)
        stream = engine.submit(ask((1, 2, 3)))
        while engine._loop._in_flight or not engine._intake.is_empty:
            engine._loop.step()
        list(stream)
        num_looks[phases] = (clock.now_s - 1000) / TICK_S
        assert (engine.metrics.value("step_host_seconds_total") > 0) is phases
        assert (engine.metrics.value("reader_detokenize_seconds_total") > 0) is phases
    assert num_looks[True] > num_looks[False] + 9 * 5  # nine steps


def test_a_trace_without_phases_is_refused() -> None:
    with pytest.raises(ValueError, match="trace_steps needs phases = true"):
        Config(measure=MeasureSection(phases=False, trace_steps=3))


def test_the_ring_keeps_the_last() -> None:
    stage = Stage(measure=MeasureSection(trace_steps=3))
    ring = stage.engine.trace
    assert ring is not None
    for name in "abcde":
        stage.engine.submit(ask((1, 2), id=name, max_tokens=2))
    stage.run()
    assert [request.request_id for request in ring.requests] == ["c", "d", "e"]
    assert len(ring.rounds) == 3
    assert ring.rounds[-1].retired is not None


def test_reader_times_are_counted_though_it_leaves_early() -> None:
    stage = Stage()
    stream = stage.engine.submit(ask((1, 2, 3), id="a"))
    stage.step(3)
    for _ in stream:
        if stage.engine.metrics.value("delivery_seconds_count"):
            break
    del stream
    assert stage.engine.metrics.value("reader_detokenize_seconds_total") > 0
    stage.run()
