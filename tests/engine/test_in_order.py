"""Many requests through one engine: order, errors in place, full batches, bounded memory."""

from collections.abc import Iterator

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import Completion, Started, run_in_order
from jaxserve.engine.in_order import HELD_PER_ROW
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestError
from jaxserve.plan import StepPlan
from jaxserve.request import GenerationRequest
from tests.engines import LIMITS, ONE_ROW, ask, build_engine, serve
from tests.fakes import EOS_ID, expected_output, say


def token_ids(result: Completion | RequestError) -> list[int]:
    assert isinstance(result, Completion), result
    return list(result.token_ids)


def test_results_come_in_order_and_an_error_stands_in_its_place() -> None:
    engine, runner = build_engine(bounds=LimitsSection(max_waiting_requests=3))
    prompts = [(n % 256, n // 256) for n in range(100)]
    requests = [ask(prompt, ignore_eos=True, max_tokens=1 + prompt[0] % 7) for prompt in prompts]
    requests[10] = ask((999,))
    with serve(engine, runner):
        results = list(run_in_order(engine, requests))
    assert isinstance(results[10], InvalidRequestError)
    for n in (n for n in range(100) if n != 10):
        sampling = requests[n].sampling
        assert token_ids(results[n]) == expected_output(prompts[n], sampling, 1 + n % 7)


def test_beside_one_slow_request_as_many_wait_as_run() -> None:
    def hold(plan: StepPlan) -> None:
        intake = engine._intake
        if plan.step_id <= 25:  # the slow one has some more to go
            with intake._changed:
                is_full = intake._changed.wait_for(lambda: len(intake._live) >= 8, 60)
            assert is_full, f"{len(intake._live)} requests at step {plan.step_id}"

    engine, runner = build_engine(num_pages=60, on_launch=hold)
    slow = ask((1,), max_tokens=30, ignore_eos=True)
    quick = [ask((2, n), max_tokens=2, ignore_eos=True) for n in range(200)]
    with serve(engine, runner):
        results = run_in_order(engine, [slow, *quick])
        assert len(token_ids(next(results))) == 30
        results.close()


def test_no_more_are_in_hand_than_the_rows_allow() -> None:
    engine, runner = build_engine(
        script=say({(1,): [65] * 39, None: [EOS_ID]}), num_pages=60, max_model_tokens=40
    )
    drawn: list[int] = []

    def requests() -> Iterator[GenerationRequest]:
        yield ask((1,), max_tokens=39)
        for n in range(100_000):
            drawn.append(n)
            yield ask((2, n % 256))

    with serve(engine, runner):
        results = run_in_order(engine, requests())
        next(results)
        results.close()
    assert len(drawn) <= HELD_PER_ROW * LIMITS.max_seqs


def test_who_stops_reading_cancels_the_rest() -> None:
    engine, runner = build_engine()
    requests = [ask((n,), ignore_eos=True, max_tokens=20) for n in range(20)]
    with serve(engine, runner):
        results = run_in_order(engine, requests)
        next(results)
        results.close()
    assert engine.metrics.value("requests_finished_total", reason="cancelled") > 0


def test_a_dead_engine_ends_the_results() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id > 5:
            raise ZeroDivisionError("planted")

    engine, runner = build_engine(on_launch=fail)
    requests = [ask((n,), ignore_eos=True) for n in range(20)]
    with serve(engine, runner):
        with pytest.raises(EngineDeadError):
            list(run_in_order(engine, requests))


def test_a_queue_full_of_others_is_an_error_and_no_wait_without_end() -> None:
    engine, runner = build_engine(bounds=LimitsSection(max_waiting_requests=1), step_limits=ONE_ROW)
    with serve(engine, runner):
        runner.gate.clear()
        with engine.submit(ask((1,))) as running:
            events = iter(running)
            assert isinstance(next(events), Started), "it has the only row"
            with engine.submit(ask((2,))):
                with pytest.raises(QueueFullError):
                    list(run_in_order(engine, [ask((7,))]))
