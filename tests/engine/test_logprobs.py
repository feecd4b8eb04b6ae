"""Log-probabilities of output and prompt, as the device gave them, in their places."""

import itertools
from typing import Any

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import Delta, Engine, Finished, Started
from jaxserve.engine.unread import ENTRY_BYTES, TOKEN_BYTES
from jaxserve.errors import SlowReaderError
from jaxserve.plan import StepPlan, TokenLogprobs
from jaxserve.request import FinishReason, SamplingParams
from tests.engines import Output, ask, build_engine, check_accounts, gather, gather_choices, serve
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs
from tests.fakes import VOCAB_SIZE, expected_output

PROMPT = tuple(range(1, 18))  # three chunks of six, four pages and one token
GREEDY = SamplingParams(temperature=0.0)


def scores(prompt: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(expected_prompt_logprobs(prompt, num_top=num_top, vocab_size=VOCAB_SIZE))


def answer(
    prompt: tuple[int, ...] = PROMPT,
    *,
    overlap: bool = True,
    preempt_at: int | None = None,
    **fields: Any,  # noqa: ANN401
) -> Output:
    engine: Engine
    results = itertools.count(1)

    def on_result(_: StepPlan) -> None:
        if next(results) == preempt_at:
            for live in engine._intake.live():
                engine._scheduler.preempt(live.request)

    engine, runner = build_engine(overlap=overlap, on_result=on_result)
    with serve(engine, runner):
        output = gather(engine.submit(ask(prompt, **{"ignore_eos": True, **fields})))
    assert engine.metrics.value("prompt_tokens_total") == len(prompt)
    return output


def entries(output: Output) -> list[TokenLogprobs]:
    return [entry for delta in output.deltas for entry in delta.logprobs]


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_each_token_has_its_own_wherever_it_is_preempted(num_top: int, overlap: bool) -> None:
    for preempt_at in (None, *range(1, 12)):
        output = answer(logprobs=num_top, overlap=overlap, preempt_at=preempt_at)
        assert output.token_ids == expected_output(PROMPT, GREEDY, 8)
        assert entries(output) == expected_logprobs(
            PROMPT, output.token_ids, num_top=num_top, vocab_size=VOCAB_SIZE
        )


def test_without_being_asked_there_are_none() -> None:
    output = answer()
    assert entries(output) == []
    assert output.started.prompt_logprobs == ()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 6, 7, 12, 13, 17])
def test_the_prompts_come_with_the_start(prompt_len: int, max_tokens: int, overlap: bool) -> None:
    prompt = PROMPT[:prompt_len]
    for preempt_at in (None, 1, 2, 3):
        output = answer(
            prompt, prompt_logprobs=2, max_tokens=max_tokens, overlap=overlap, preempt_at=preempt_at
        )
        assert output.started.prompt_logprobs == scores(prompt, 2)
        assert output.token_ids == expected_output(prompt, GREEDY, max_tokens)
        assert output.finished.reason is FinishReason.MAX_TOKENS
        assert output.finished.usage.completion_tokens == max_tokens


def test_a_prompt_is_scored_once_for_all_choices() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        asked = ask(
            PROMPT, num_choices=3, temperature=0.9, seed=7, ignore_eos=True, logprobs=1,
            prompt_logprobs=1,
        )  # fmt: skip
        outputs = gather_choices(engine.submit(asked))
    assert outputs.started.prompt_logprobs == scores(PROMPT, 1)
    assert all(len(choice.logprobs) == 8 for choice in outputs.choices)


def test_the_start_is_held_until_the_prompt_is_scored_and_given_where_it_never_is() -> None:
    engine: Engine

    def on_result(plan: StepPlan) -> None:
        if plan.step_id == 1:  # of three that the prompt takes
            assert not stream._is_ready()
            engine.abort("r")

    engine, runner = build_engine(on_result=on_result)
    runner.gate.clear()
    with serve(engine, runner):
        stream = engine.submit(ask(PROMPT, id="r", prompt_logprobs=0))
        runner.gate.set()
        started, finished = list(stream)
    assert started == Started(request_id="r", prompt_tokens=len(PROMPT))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED


def test_a_scored_prompt_counts_as_a_prompt_and_as_no_token() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        gather(engine.submit(ask(PROMPT, prompt_logprobs=0, max_tokens=0)))
    value = engine.metrics.value
    assert (value("prompt_tokens_total"), value("output_tokens_total")) == (len(PROMPT), 0)
    assert (value("prefill_seconds_count"), value("time_to_first_token_seconds_count")) == (1, 0)
    assert value("step_tokens_sum") == len(PROMPT) - 1


def test_unread_logprobs_are_bounded_with_the_tokens() -> None:
    per_token = TOKEN_BYTES + 6 * ENTRY_BYTES
    engine, runner = build_engine(bounds=LimitsSection(stream_buffer_bytes=5 * per_token))
    with serve(engine, runner):
        fits = ask((1,), logprobs=5, max_tokens=5, ignore_eos=True)
        more = ask((1,), logprobs=5, max_tokens=6, ignore_eos=True)
        streams = [engine.submit(fits), engine.submit(more)]
        engine._intake.wait_until_empty(60)
        assert len(entries(gather(streams[0]))) == 5
        with pytest.raises(SlowReaderError, match="bytes of output are unread; read faster"):
            list(streams[1])


def test_what_all_streams_leave_unread_is_bounded_and_the_fullest_is_given_up() -> None:
    bounds = LimitsSection(total_buffer_bytes=30 * TOKEN_BYTES)
    engine, runner = build_engine(bounds=bounds)
    with serve(engine, runner):
        ended = engine.submit(ask((1,), max_tokens=12, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        small = engine.submit(ask((2,), max_tokens=4, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        large = engine.submit(ask((3,), max_tokens=30, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        with pytest.raises(SlowReaderError, match="unread in all streams, the most of them in"):
            list(large)
        assert len(gather(ended).token_ids) == 12
        again = engine.submit(ask((3,), max_tokens=30, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        assert len(gather(small).token_ids) == 4  # 4 + 30 is too much: the fuller one was ended
        with pytest.raises(SlowReaderError):
            list(again)
    assert engine.metrics.value("requests_finished_total", reason="error_slow_reader") == 2
    assert engine.metrics.value("given_up_streams_total") == 0
    check_accounts(engine)


def test_a_stream_that_has_ended_is_given_up_too_where_it_is_the_fullest() -> None:
    bounds = LimitsSection(total_buffer_bytes=30 * TOKEN_BYTES)
    engine, runner = build_engine(bounds=bounds)
    with serve(engine, runner):
        ended = engine.submit(ask((1,), max_tokens=25, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        other = engine.submit(ask((2,), max_tokens=10, ignore_eos=True))
        engine._intake.wait_until_empty(60)  # a reader that keeps up would leave room
        assert len(gather(other).token_ids) == 10
        events = iter(ended)
        assert isinstance(next(events), Started)
        with pytest.raises(SlowReaderError):
            next(events)
    assert engine.metrics.value("given_up_streams_total") == 1
    assert engine.metrics.value("requests_finished_total", reason="max_tokens") == 2


def test_deltas_that_merge_keep_their_logprobs() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        stream = engine.submit(ask((1,), logprobs=1, ignore_eos=True))
        engine._intake.wait_until_empty(60)
        (delta,) = [event for event in stream if isinstance(event, Delta)]
    assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    assert len(delta.logprobs) == 8
