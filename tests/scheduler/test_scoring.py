"""Log-probabilities of the prompt: each position once, over chunks and preemptions."""

from typing import Literal

import pytest

from jaxserve.plan import PromptScoring
from jaxserve.request import FinishReason, SamplingParams
from tests.scheduler.loop import Loop

ONLY_SCORED = SamplingParams(temperature=0.0, prompt_logprobs=2)


def scorings(loop: Loop) -> list[PromptScoring | None]:
    return [chunk.scoring for plan in loop.plans for chunk in plan.chunks]


def test_each_chunk_scores_the_tokens_after_its_own() -> None:
    loop = Loop(depth=1)
    loop.add((1, 2, 3, 4, 5, 6, 7, 8), 2, sampling=ONLY_SCORED)
    loop.drain(max_steps=4)
    assert scorings(loop) == [
        PromptScoring(first=0, targets=(2, 3, 4, 5, 6), num_top=2),
        PromptScoring(first=5, targets=(7, 8), num_top=2),
        None,
    ]


def test_nothing_is_scored_unasked() -> None:
    loop = Loop()
    loop.add(8, 2)
    loop.drain(max_steps=8)
    assert set(scorings(loop)) == {None}


def test_without_output_the_last_prompt_token_is_not_computed() -> None:
    loop = Loop(depth=2)
    request = loop.add((1, 2, 3, 4, 5, 6), 0, sampling=ONLY_SCORED)
    loop.drain(max_steps=4)
    chunks = [chunk for plan in loop.plans for chunk in plan.chunks]
    assert [(c.start, c.num_tokens, c.samples) for c in chunks] == [(0, 5, False)]
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS
    assert len(loop.prompt_logprobs[request]) == 5
    assert loop.metrics.value("surplus_tokens_total") == 0
    assert loop.metrics.value("chunked_prompts_total") == 0
    assert loop.metrics.value("kv_pages_allocated_total") == 2


def test_a_prompt_of_one_token_has_nothing_to_score_and_ends() -> None:
    loop = Loop()
    request = loop.add(1, 0, sampling=ONLY_SCORED)
    loop.drain(max_steps=4)
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS
    assert loop.prompt_logprobs[request] == []


@pytest.mark.parametrize("reserve", ["on_demand", "max_length"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_requests_without_output_run_beside_others(reserve: str, batching: str) -> None:
    loop = Loop(reserve=reserve, batching=batching)  # type: ignore[arg-type]  # drawn by name
    scored = [loop.add(prompt_len, 0, sampling=ONLY_SCORED) for prompt_len in (2, 12, 40)]
    loop.add(3, 12)
    loop.drain(max_steps=40)
    assert [len(loop.prompt_logprobs[request]) for request in scored] == [1, 11, 39]


def test_choices_of_a_request_without_output_end_together() -> None:
    loop = Loop()
    params = SamplingParams(num_choices=3, prompt_logprobs=0)
    request = loop.add(8, 0, sampling=params)
    loop.drain(max_steps=4)
    assert [loop.ends[s] for s in request.sequences] == [FinishReason.MAX_TOKENS] * 3
    assert loop.metrics.value("forked_choices_total") == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_no_position_is_scored_twice_wherever_it_is_preempted(
    num_choices: int, max_tokens: int, depth: int
) -> None:
    for at_point in range(24):
        loop = Loop(depth=depth)
        params = SamplingParams(prompt_logprobs=2, num_choices=num_choices)
        request = loop.add(17, max_tokens, sampling=params)
        for _ in range(at_point):
            loop.advance()
        if request in loop.live:
            loop.preempt(request)
        loop.drain(max_steps=40)
        targets = [scoring.targets for scoring in scorings(loop) if scoring]
        assert sum(map(len, targets)) == 16
        assert len(loop.prompt_logprobs[request]) == 16


def test_scores_of_steps_in_flight_at_a_preemption_are_kept() -> None:
    loop = Loop(depth=2)
    request = loop.add(17, 2, sampling=ONLY_SCORED)
    loop.step()
    loop.step()  # two chunks computed, one of them not committed
    loop.preempt(request)
    loop.drain(max_steps=20)
    assert [scoring.first for scoring in scorings(loop) if scoring] == [0, 5, 10, 15]
    assert loop.metrics.value("recomputed_tokens_total") == 10


def test_a_request_that_is_preempted_with_its_last_scores_in_flight_is_not_computed_again() -> None:
    loop = Loop(depth=2)
    request = loop.add(6, 0, sampling=ONLY_SCORED)
    loop.step()
    loop.preempt(request)
    num_steps = loop.num_steps
    loop.drain(max_steps=4)
    assert loop.num_steps == num_steps
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS


def test_masked_and_scored_at_once() -> None:
    loop = Loop()
    params = SamplingParams(num_choices=2, prompt_logprobs=1, logprobs=1)
    request = loop.add(9, 5, sampling=params, is_masked=True)
    loop.drain(max_steps=20)
    assert [len(output) for output in loop.choices[request]] == [5, 5]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("bad_len", [2, 7, 11])
def test_scores_that_are_not_finite_end_that_request_alone(bad_len: int, max_tokens: int) -> None:
    bad_prompt = tuple(range(20, 32))

    def script(prompt: tuple[int, ...], index: int) -> Literal["not_finite"] | None:
        return "not_finite" if (prompt, index) == (bad_prompt[:bad_len], -1) else None

    loop = Loop(script=script)
    params = SamplingParams(num_choices=2, prompt_logprobs=1)
    bad = loop.add(bad_prompt, max_tokens, sampling=params)
    mate = loop.add(9, 4, sampling=ONLY_SCORED)
    loop.drain(max_steps=20)
    assert loop.outcomes == {bad: "not_finite", mate: FinishReason.MAX_TOKENS}
    assert len(loop.prompt_logprobs[bad]) == (bad_len - 1) // 5 * 5
