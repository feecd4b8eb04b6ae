"""A preempted sequence goes on as if nothing had happened (C14)."""

import pytest

from jaxserve.request import FinishReason, SamplingParams
from tests.scheduler.loop import GREEDY, Loop

SETTINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.3),
    "presence": SamplingParams(temperature=0.0, presence_penalty=0.5),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=6),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 2.0}),
}
LONG = (3, 1, 4, 1, 5, 9, 2)  # two chunks
SHORT = (3, 1, 4)  # with the outputs more than a chunk, which it ends in the middle of
STOP_IDS = dict.fromkeys(range(40), FinishReason.EOS)


def run(
    name: str,
    *,
    preempt_at: tuple[int, ...],
    depth: int,
    stop_at: int | None,
    prompt: tuple[int, ...] = LONG,
) -> list[int]:
    """Returns the stream of one request that is preempted once it has so many tokens."""
    loop = Loop(depth=depth)
    stop_ids = STOP_IDS if name == "min_tokens" else {}
    request = loop.add(prompt, 16, sampling=SETTINGS[name], seed=7, stop_ids=stop_ids)
    if stop_at is not None:
        loop.stops_at[request] = stop_at
    loop.add(5, 16)  # a batch mate
    waiting_for = list(preempt_at)
    while request in loop.live:
        loop.advance()
        if waiting_for and len(loop.outputs[request]) >= waiting_for[0]:
            waiting_for.pop(0)
            loop.preempt(request)
    loop.drain(max_steps=80)
    return loop.outputs[request]


@pytest.mark.parametrize("prompt", [LONG, SHORT])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_stream_is_the_same_wherever_it_is_preempted(
    name: str, depth: int, prompt: tuple[int, ...]
) -> None:
    unhurt = run(name, preempt_at=(), depth=depth, stop_at=None, prompt=prompt)
    assert len(unhurt) >= 6
    for index in range(1, 13):
        for points in ((index,), (index, index + 2), (index, index)):
            hurt = run(name, preempt_at=points, depth=depth, stop_at=None, prompt=prompt)
            assert hurt == unhurt, points


def test_a_stop_string_after_a_preemption_ends_at_the_same_token() -> None:
    for index in range(1, 12):
        assert len(run("seeded", preempt_at=(index,), depth=2, stop_at=11)) == 11


def test_a_token_in_flight_at_the_preemption_is_delivered_and_computed_again() -> None:
    loop = Loop(depth=2)
    request = loop.add(4, 6)
    loop.step()
    loop.step()
    assert request.sequences[0].num_in_flight == 1
    loop.preempt(request)
    plan = loop.scheduler.schedule(0.0)
    assert (plan.has_work, plan.preempted) == (False, (1,))
    assert plan.retire_first is not None
    loop.drain(max_steps=20)
    assert len(loop.outputs[request]) == 6


def test_a_preempted_sequence_that_ends_with_the_token_in_flight_is_not_computed_again() -> None:
    loop = Loop(depth=2)
    request = loop.add(4, 2)
    loop.step()
    loop.step()
    loop.preempt(request)
    num_steps = loop.num_steps
    loop.drain(max_steps=20)
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS
    assert loop.num_steps == num_steps


def test_only_tokens_that_had_been_computed_count_as_recomputed() -> None:
    loop = Loop(depth=1)
    request = loop.add(8, 6)
    for _ in range(4):  # two chunks, then two tokens
        loop.step()
    assert request.sequences[0].num_computed == 10
    loop.preempt(request)
    loop.drain(max_steps=20)
    assert loop.metrics.value("recomputed_tokens_total") == 10
