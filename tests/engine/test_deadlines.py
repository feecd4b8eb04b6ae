"""Who is late: in the queue nothing is computed, while decoding the output so far stands."""

import dataclasses

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import Finished
from jaxserve.errors import DeadlineError
from jaxserve.plan import StepPlan
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from tests.engines import ONE_ROW, Clock, ask, build_engine, gather, serve
from tests.fakes import expected_output


def late_at(request: GenerationRequest, deadline_s: float) -> GenerationRequest:
    return dataclasses.replace(request, deadline_s=deadline_s)


def test_a_deadline_in_the_queue_is_an_error_without_any_prefill() -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock)
    runner.gate.clear()
    with serve(engine, runner):
        busy = [engine.submit(ask((n,), max_tokens=20, ignore_eos=True)) for n in range(4)]
        late = [
            engine.submit(late_at(ask((100 + n, 7, 7), max_tokens=5), clock.now_s + 0.05))
            for n in range(20)
        ]
        clock.now_s += 0.2
        runner.gate.set()
        for stream in late:
            with pytest.raises(DeadlineError, match="before the first token"):
                gather(stream)
        outputs = [gather(stream) for stream in busy]
    assert all(len(output.token_ids) == 20 for output in outputs)
    prefilled = {
        chunk.token_ids[0]
        for plan in runner.plans
        for chunk in plan.chunks
        if chunk.token_ids and chunk.start == 0
    }
    assert prefilled == {0, 1, 2, 3}
    assert engine.metrics.value("requests_finished_total", reason="error_deadline") == 20


def test_a_deadline_while_decoding_keeps_the_output_so_far() -> None:
    clock = Clock()

    def on_result(plan: StepPlan) -> None:
        if plan.step_id == 3:
            clock.now_s += 10

    engine, runner = build_engine(clock=clock, on_result=on_result)
    with serve(engine, runner):
        stream = engine.submit(late_at(ask((1,), max_tokens=20, ignore_eos=True), clock.now_s + 5))
        output = gather(stream)
    assert output.finished.reason is FinishReason.DEADLINE
    assert output.token_ids == expected_output((1,), SamplingParams(temperature=0.0), 3)
    assert output.finished.usage.completion_tokens == 3
    assert engine.metrics.value("surplus_tokens_total") == 1


def test_a_deadline_in_the_prefill_is_an_error() -> None:
    clock = Clock()

    def on_launch(plan: StepPlan) -> None:
        if plan.step_id == 2:
            clock.now_s += 10

    engine, runner = build_engine(clock=clock, on_launch=on_launch)
    with serve(engine, runner):
        stream = engine.submit(late_at(ask(tuple(range(30))), clock.now_s + 5))
        with pytest.raises(DeadlineError, match="before the first token"):
            gather(stream)


def test_the_queue_timeout_names_itself_and_ends_only_who_waits() -> None:
    clock = Clock()
    bounds = LimitsSection(queue_timeout_s=30)
    engine, runner = build_engine(clock=clock, bounds=bounds, step_limits=ONE_ROW)
    runner.gate.clear()
    with serve(engine, runner):
        events = iter(engine.submit(ask((1,), max_tokens=10, ignore_eos=True)))
        next(events)  # the one row is taken
        waiting = engine.submit(ask((9,)))
        shorter = engine.submit(dataclasses.replace(ask((8,)), queue_timeout_s=2.0))
        clock.now_s += 31
        runner.gate.set()
        for stream in (waiting, shorter):
            with pytest.raises(DeadlineError, match=r"queue_timeout passed: waited 31\.000 s"):
                gather(stream)
        *_, finished = events
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.MAX_TOKENS


def test_timings_say_where_the_time_went() -> None:
    clock = Clock()

    def on_launch(_: StepPlan) -> None:
        clock.now_s += 1

    engine, runner = build_engine(clock=clock, on_launch=on_launch, overlap=False)
    with serve(engine, runner):
        output = gather(engine.submit(ask(tuple(range(12)), max_tokens=4, ignore_eos=True)))
    timings = output.finished.timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (0, 2, 3)
    assert timings.time_to_first_token_s == 2
    assert output.finished.execution.prefill_chunks == 2
    assert output.finished.execution.prefill_bucket_tokens == 6
    assert output.finished.execution.padding_fraction == 0
    metrics = engine.metrics
    assert metrics.value("time_to_first_token_seconds_sum") == 2
    assert metrics.value("inter_token_seconds_count") == 3
    assert metrics.value("inter_token_seconds_sum") == 3
    assert metrics.value("queue_seconds_count") == 1
    assert metrics.value("request_seconds_sum") == 5
