"""A request may be given up at any moment: it ends once, and everything comes back."""

import itertools
import threading
from collections.abc import Callable

import pytest

from jaxserve.engine import Engine, Finished, Started
from jaxserve.plan import StepPlan
from jaxserve.request import FinishReason, SamplingParams
from tests.engines import Output, ask, build_engine, gather, serve
from tests.fakes import expected_output

PROMPT = tuple(range(30))
NUM_STEPS = 5 + 8  # chunks of 6, then a token a step: 30 + 10 fill the context
GREEDY = SamplingParams(temperature=0.0)


def run_with(act: Callable[[Engine], object], *, step: int, point: str, overlap: bool) -> Output:
    """Runs the long request and calls `act` on the engine thread at a point of one step."""
    engine: Engine
    results = itertools.count(1)

    def on_launch(plan: StepPlan) -> None:
        if point == "before launch" and plan.step_id == step:
            act(engine)

    def on_result(_: StepPlan) -> None:
        if next(results) == step and point == "after result":
            act(engine)

    engine, runner = build_engine(on_launch=on_launch, on_result=on_result, overlap=overlap)
    with serve(engine, runner):
        output = gather(engine.submit(ask(PROMPT, id="long", max_tokens=10, ignore_eos=True)))
        canary = gather(engine.submit(ask(PROMPT, max_tokens=3, ignore_eos=True)))
    assert canary.token_ids == expected_output(PROMPT, GREEDY, 3)
    return output


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("point", ["before launch", "after result"])
def test_an_abort_at_any_step_ends_it_once_and_gives_all_back(point: str, overlap: bool) -> None:
    whole = expected_output(PROMPT, GREEDY, 10)
    for step in range(1, NUM_STEPS + 2):
        output = run_with(
            lambda engine: engine.abort("long"), step=step, point=point, overlap=overlap
        )
        assert output.token_ids == whole[: len(output.token_ids)]
        is_whole = len(output.token_ids) == 10
        wanted = FinishReason.MAX_TOKENS if is_whole else FinishReason.CANCELLED
        assert output.finished.reason is wanted
        assert output.finished.usage.completion_tokens == len(output.token_ids)


def test_the_same_prompt_may_come_in_the_same_moment_as_the_abort() -> None:
    for step in range(1, NUM_STEPS):
        again: list[Output] = []
        threads: list[threading.Thread] = []

        def replace(
            engine: Engine, again: list[Output] = again, threads: list[threading.Thread] = threads
        ) -> None:
            engine.abort("long")
            stream = engine.submit(ask(PROMPT, max_tokens=4, ignore_eos=True))
            threads.append(threading.Thread(target=lambda: again.append(gather(stream))))
            threads[0].start()

        run_with(replace, step=step, point="before launch", overlap=True)
        threads[0].join(timeout=60)
        assert again[0].token_ids == expected_output(PROMPT, GREEDY, 4)


def test_a_reader_may_leave_after_any_event() -> None:
    for num_events in range(8):
        engine, runner = build_engine()
        with serve(engine, runner):
            stream = engine.submit(ask(PROMPT, max_tokens=10, ignore_eos=True))
            with stream:
                seen = list(itertools.islice(iter(stream), num_events))
            assert len(seen) <= num_events
            canary = gather(engine.submit(ask(PROMPT, max_tokens=3, ignore_eos=True)))
        assert len(canary.token_ids) == 3


def test_one_that_waits_can_be_aborted_and_is_never_computed() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        busy = [engine.submit(ask((n,), ignore_eos=True)) for n in range(4)]
        waiting = engine.submit(ask(PROMPT, id="w", max_tokens=10))
        waiting.cancel()
        waiting.cancel()
        engine.abort("w")
        runner.gate.set()
        output = gather(waiting)
        for stream in busy:
            gather(stream)
    assert output.finished.reason is FinishReason.CANCELLED
    assert (output.token_ids, output.finished.execution.prefill_chunks) == ([], 0)
    assert all(chunk.token_ids != PROMPT[:6] for plan in runner.plans for chunk in plan.chunks)
    assert engine.metrics.value("requests_finished_total", reason="cancelled") == 1


def test_an_abort_after_the_end_does_nothing_even_to_one_of_the_same_id() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        first = engine.submit(ask((1,), id="same"))
        gather(first)
        second = engine.submit(ask((1,), id="same"))
        first.cancel()
        engine.abort("unknown")
        assert gather(second).finished.reason is not FinishReason.CANCELLED
    assert engine.metrics.value("requests_finished_total", reason="cancelled") == 0


def test_an_abort_that_crosses_the_end_does_not_hit_the_next_request_of_that_id() -> None:
    engine: Engine

    def on_result(plan: StepPlan) -> None:
        if plan.step_id == 1:  # the result is the end; the idle engine finds the abort later
            engine.abort("same")

    engine, runner = build_engine(on_result=on_result)
    with serve(engine, runner):
        first = gather(engine.submit(ask((1,), id="same", max_tokens=1, ignore_eos=True)))
        assert first.finished.reason is FinishReason.MAX_TOKENS
        assert len(engine._intake._aborts) == 1
        second = gather(engine.submit(ask((9,), id="same", ignore_eos=True)))
    assert len(second.token_ids) == 8


def test_output_that_was_not_read_yet_stays_readable_after_the_abort() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        stream = engine.submit(ask((5,), max_tokens=30, ignore_eos=True))
        events = iter(stream)
        assert isinstance(next(events), Started)
        next(events)
        stream.cancel()
        rest = list(events)
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason in (FinishReason.CANCELLED, FinishReason.MAX_TOKENS)
