"""Several choices of one request: each is what it would be alone, and ends by itself."""

import dataclasses
import itertools
from typing import Any

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError, NumericsError, SlowReaderError
from jaxserve.plan import StepPlan, StepResult
from jaxserve.request import FinishReason, SamplingParams
from tests.engines import (
    LIMITS,
    Clock,
    Outputs,
    ask,
    build_engine,
    gather,
    gather_choices,
    serve,
)
from tests.fake_logprobs import expected_logprobs
from tests.fakes import EOS_ID, VOCAB_SIZE, expected_output

PROMPT = (3, 1, 4, 1, 5)  # a page and a quarter
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7, "ignore_eos": True}


def alone(choice: int, *, n: int = 8, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """Returns the tokens of one choice."""
    return expected_output(prompt, SamplingParams(temperature=0.9), n, seed=7, choice=choice)


def answer(*, overlap: bool = True, **fields: Any) -> Outputs:  # noqa: ANN401
    engine, runner = build_engine(overlap=overlap)
    with serve(engine, runner):
        outputs = gather_choices(engine.submit(ask(PROMPT, **{**DRAWN, **fields})))
    num_output = sum(map(len, outputs.token_ids))
    value = engine.metrics.value
    assert value("output_tokens_total") == value("request_output_tokens_sum") == num_output
    assert (value("prompt_tokens_total"), value("requests_finished_total")) == (len(PROMPT), 1)
    assert outputs.finished.usage.prompt_tokens == len(PROMPT)
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_choices", [2, 3, 4])
def test_each_choice_is_the_request_of_its_noise_alone(num_choices: int, overlap: bool) -> None:
    outputs = answer(num_choices=num_choices, overlap=overlap)
    assert outputs.token_ids == [alone(choice) for choice in range(num_choices)]
    assert len({tuple(token_ids) for token_ids in outputs.token_ids}) == num_choices
    assert {choice.reason for choice in outputs.choices} == {FinishReason.MAX_TOKENS}


def test_greedy_choices_are_all_the_same() -> None:
    outputs = answer(num_choices=3, temperature=0.0)
    assert outputs.token_ids == [expected_output(PROMPT, SamplingParams(temperature=0.0), 8)] * 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("by", ["stop id", "stop string", "eos"])
def test_each_choice_ends_by_itself(by: str, overlap: bool) -> None:
    """Choice 1 first, then 2; the request with the last."""
    first, second = alone(1)[2], alone(2)[4]
    assert not {first, second} & {*alone(0), *alone(1)[:2], *alone(2)[:4]}
    fields: dict[str, Any] = {"stop_token_ids": (first, second)}
    outputs = answer(num_choices=3, overlap=overlap, **fields)
    assert outputs.token_ids == [alone(0), alone(1)[:3], alone(2)[:5]]
    assert [choice.reason for choice in outputs.choices] == [
        FinishReason.MAX_TOKENS, FinishReason.STOP, FinishReason.STOP,
    ]  # fmt: skip
    assert [choice.end.matched_stop for choice in outputs.choices if choice.end] == [
        None, first, second,
    ]  # fmt: skip
    assert outputs.finished.index == 0


def test_the_rows_of_a_choice_that_has_ended_go_to_others() -> None:
    """The engine has four rows: the fifth sequence comes in before the request has ended."""
    stop = alone(1)[1]
    assert stop not in {*alone(0, n=20), *alone(2, n=20), *alone(3, n=20), alone(1)[0]}
    engine, runner = build_engine(num_pages=40)
    runner.gate.clear()
    with serve(engine, runner):
        streams = [
            engine.submit(
                ask(PROMPT, **DRAWN, num_choices=4, max_tokens=20, stop_token_ids=(stop,))
            ),
            engine.submit(ask((9, 9), max_tokens=3, ignore_eos=True)),
        ]
        runner.gate.set()
        outputs = [gather_choices(stream) for stream in streams]
    assert [len(token_ids) for token_ids in outputs[0].token_ids] == [20, 2, 20, 20]
    order = [chunk.sequence_id for plan in runner.plans for chunk in plan.chunks if chunk.row == 1]
    assert set(order) == {2, 5}


def run_preempted(preempt_at: int, *, overlap: bool) -> Outputs:
    """Takes all rows and pages back once so many results have been read."""
    engine: Engine
    results = itertools.count(1)

    def on_result(_: StepPlan) -> None:
        if next(results) == preempt_at:
            for live in engine._intake.live():
                engine._scheduler.preempt(live.request)

    engine, runner = build_engine(on_result=on_result, overlap=overlap)
    with serve(engine, runner):
        return gather_choices(engine.submit(ask(PROMPT, **DRAWN, num_choices=3, logprobs=2)))


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_at_any_step_changes_no_choice(overlap: bool) -> None:
    for preempt_at in range(1, 12):
        outputs = run_preempted(preempt_at, overlap=overlap)
        assert outputs.token_ids == [alone(choice) for choice in range(3)], preempt_at
        for choice in outputs.choices:
            check_logprobs(choice.token_ids, choice.logprobs, num_top=2)


def check_logprobs(token_ids: list[int], logprobs: list[Any], *, num_top: int) -> None:
    assert logprobs == expected_logprobs(PROMPT, token_ids, num_top=num_top, vocab_size=VOCAB_SIZE)


def test_more_choices_than_the_pool_holds_at_once_still_get_theirs() -> None:
    """Four times 5 + 30 tokens: the pool holds 48."""
    engine, runner = build_engine()
    with serve(engine, runner):
        asked = ask(PROMPT, **DRAWN, num_choices=4, max_tokens=30)
        outputs = gather_choices(engine.submit(asked))
    assert outputs.token_ids == [alone(choice, n=30) for choice in range(4)]
    assert engine.metrics.value("preemptions_total") > 0


def test_all_choices_end_with_a_cancel_and_what_was_said_stands() -> None:
    engine: Engine

    def on_result(plan: StepPlan) -> None:
        if plan.step_id == 4:
            engine.abort("r")

    engine, runner = build_engine(on_result=on_result)
    stop = alone(1)[0]
    with serve(engine, runner):
        asked = ask(PROMPT, id="r", **DRAWN, num_choices=3, max_tokens=30, stop_token_ids=(stop,))
        outputs = gather_choices(engine.submit(asked))
    assert [choice.reason for choice in outputs.choices] == [
        FinishReason.CANCELLED, FinishReason.STOP, FinishReason.CANCELLED,
    ]  # fmt: skip
    for index, token_ids in enumerate(outputs.token_ids):
        assert token_ids
        assert token_ids == alone(index, n=30)[: len(token_ids)]


def test_a_cancel_in_the_queue_ends_every_choice() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        busy = [engine.submit(ask((n,), ignore_eos=True)) for n in range(4)]
        stream = engine.submit(ask(PROMPT, **DRAWN, num_choices=3))
        stream.cancel()
        runner.gate.set()
        outputs = gather_choices(stream)
        for other in busy:
            gather(other)
    assert outputs.token_ids == [[], [], []]
    assert {choice.reason for choice in outputs.choices} == {FinishReason.CANCELLED}


def test_a_deadline_ends_every_choice_that_still_runs() -> None:
    clock = Clock()

    def on_result(plan: StepPlan) -> None:
        if plan.step_id == 4:
            clock.now_s += 100

    engine, runner = build_engine(on_result=on_result, clock=clock)
    with serve(engine, runner):
        asked = ask(PROMPT, **DRAWN, num_choices=2, max_tokens=30)
        late = dataclasses.replace(asked, deadline_s=clock.now_s + 50)
        outputs = gather_choices(engine.submit(late))
    assert {choice.reason for choice in outputs.choices} == {FinishReason.DEADLINE}


def test_numbers_that_are_not_finite_in_one_choice_end_the_request() -> None:
    """The script does not know choices, so all of them fail at once: with one error."""
    engine, runner = build_engine(script=lambda prompt, index: "not_finite" if index == 2 else None)
    with serve(engine, runner):
        stream = engine.submit(ask(PROMPT, **DRAWN, num_choices=3))
        with pytest.raises(NumericsError, match="output token 2 are not finite"):
            list(stream)
        gather(engine.submit(ask((1,), max_tokens=2, ignore_eos=True)))  # the engine lives
    assert engine.metrics.value("requests_finished_total", reason="error_numerics") == 1


def test_a_reader_that_is_too_slow_for_all_choices_together_is_ended() -> None:
    bounds = LimitsSection(stream_buffer_bytes=8 * 10)
    engine, runner = build_engine(bounds=bounds)
    runner.gate.clear()
    with serve(engine, runner):
        stream = engine.submit(ask(PROMPT, **DRAWN, num_choices=4, max_tokens=5))
        runner.gate.set()
        engine._intake.wait_until_empty(60)
        with pytest.raises(SlowReaderError, match="more than 80 bytes"):
            list(stream)
    # all that was drawn is output or surplus: of the step that was too much, and of those behind it
    chunks = [chunk for plan in runner.plans for chunk in plan.chunks if chunk.samples]
    num_drawn = sum(1 + len(chunk.forks) for chunk in chunks)
    assert engine.metrics.value("output_tokens_total") == 10
    assert engine.metrics.value("surplus_tokens_total") == num_drawn - 10


def test_more_choices_than_rows_are_refused() -> None:
    engine, runner = build_engine()
    with serve(engine, runner), pytest.raises(InvalidRequestError, match="n is 5, but 4") as found:
        engine.submit(ask(PROMPT, num_choices=LIMITS.max_seqs + 1))
    assert found.value.field == "sampling.n"


def test_the_steps_of_a_request_are_counted_once_however_many_choices_it_has() -> None:
    outputs = answer(num_choices=3)
    assert outputs.finished.execution.prefill_chunks == 1
    assert outputs.finished.execution.prefill_bucket_tokens == 6


def test_times_between_tokens_are_each_choices_own() -> None:
    clock = Clock()

    def on_result(_: StepPlan) -> None:
        clock.now_s += 1

    engine, runner = build_engine(on_result=on_result, clock=clock)
    stop = alone(1)[2]
    with serve(engine, runner):
        asked = ask(PROMPT, **DRAWN, num_choices=3, stop_token_ids=(stop,))
        outputs = gather_choices(engine.submit(asked))
    value = engine.metrics.value
    assert [len(token_ids) for token_ids in outputs.token_ids] == [8, 3, 8]
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_seconds_count") == 7 + 2 + 7
    assert value("inter_token_seconds_sum") == 7 + 2 + 7
    assert value("time_per_output_token_seconds_sum") == 1.0  # of the longest choice


def test_what_a_step_compiled_is_waited_for_once_by_all_choices() -> None:
    engine, runner = build_engine()
    retire = engine._loop._in_flight.retire

    def retire_slowly() -> tuple[StepPlan, StepResult]:
        plan, result = retire()
        return plan, dataclasses.replace(result, compile_s=2.0)

    engine._loop._in_flight.retire = retire_slowly  # type: ignore[method-assign]
    with serve(engine, runner):
        outputs = gather_choices(engine.submit(ask(PROMPT, **DRAWN, num_choices=3)))
    assert outputs.finished.timings.compile_s == 2.0 * 8


def test_eos_of_one_choice_leaves_the_others() -> None:
    """Seeds are tried until one choice says EOS and the others do not, in the first tokens."""
    plain = SamplingParams(temperature=0.9)
    seed, ends = next(
        (seed, ends)
        for seed in range(5000)
        if sum(ends := [EOS_ID in expected_output(PROMPT, plain, 4, seed=seed, choice=choice)
                        for choice in range(2)]) == 1
    )  # fmt: skip
    outputs = answer(num_choices=2, seed=seed, ignore_eos=False, max_tokens=4)
    reasons = [choice.reason is FinishReason.EOS for choice in outputs.choices]
    assert reasons == ends


def test_the_prompt_is_computed_once_for_all_choices() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        gather_choices(engine.submit(ask(PROMPT, **DRAWN, num_choices=3)))
    chunks = [chunk for plan in runner.plans for chunk in plan.chunks]
    assert sum(chunk.num_tokens for chunk in chunks if chunk.start < len(PROMPT)) == len(PROMPT)
    assert sum(len(chunk.forks) for chunk in chunks) == 2
    assert engine.metrics.value("forked_choices_total") == 2
