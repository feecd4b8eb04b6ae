"""A preempted request goes on as if nothing had happened, on the real runner (C12, C14, C30)."""

import dataclasses
import itertools

import pytest

from jaxserve.config import PrefixCacheSection
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential.small import (
    NUM_ROWS,
    Play,
    ask,
    bucket_steps,
    constant_params,
    oracle_output,
    prompt_of,
    run_all,
    set_params,
)
from tests.differential.stage import MODEL
from tests.engines import Output

PROMPT = prompt_of(7)
INDICES = range(1, 13)
# Each index alone, and twice in one request: in a row, at once again, and far apart.
POINTS = [
    *((i,) for i in INDICES),
    *itertools.pairwise(INDICES),
    *((i, i) for i in (1, 5, 12)),
    (1, 12),
    (4, 9),
]
SETTINGS = {
    "greedy": ask(PROMPT),
    "seeded": ask(PROMPT, temperature=0.8, seed=7),
    "repetition": ask(PROMPT, repetition_penalty=1.3),
    "presence": ask(PROMPT, presence_penalty=0.5),
    "all penalties, seeded": ask(
        PROMPT,
        temperature=0.8,
        seed=7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
    "bias": ask(PROMPT, temperature=0.8, seed=7, logit_bias={3: 4.0, 60: 3.0, 61: -100.0}),
}


def facts(output: Output) -> tuple[object, ...]:
    """All of an output that a preemption must not change; those after the first find its prompt."""
    finished = output.finished
    usage = dataclasses.replace(finished.usage, cached_prompt_tokens=0)
    return output.text, output.token_ids, finished.reason, finished.matched_stop, usage


def check_everywhere(runner: Runner, asked: GenerationRequest, *, overlap: bool) -> Output:
    """Preempts the request at every point, all of them mates of each other; returns the unhurt.

    With overlap they find their pages in the prefix cache again, without it all is computed again.
    """
    cache = PrefixCacheSection(enabled=overlap)
    (unhurt,) = run_all(runner, [asked], overlap=overlap, cache=cache)
    asked_all = [asked] * len(POINTS)
    hurt = run_all(
        runner, asked_all, preempt_at=POINTS, overlap=overlap, max_at_once=2, cache=cache
    )
    for points, output in zip(POINTS, hurt, strict=True):
        assert facts(output) == facts(unhurt), points
        assert output.finished.execution.preemptions >= len(points)
    return unhurt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_stream_is_the_same_wherever_it_is_preempted(
    small_runner: Runner, name: str, overlap: bool
) -> None:
    unhurt = check_everywhere(small_runner, SETTINGS[name], overlap=overlap)
    assert unhurt.token_ids == oracle_output(SETTINGS[name])


@pytest.mark.parametrize("overlap", [True, False])
def test_min_tokens_are_counted_through_a_preemption(small_runner: Runner, overlap: bool) -> None:
    prompt = prompt_of(7, salt=6)
    banned = oracle_output(ask(prompt))[2]
    asked = ask(prompt, stop_token_ids=(banned,), min_tokens=6)
    unhurt = check_everywhere(small_runner, asked, overlap=overlap)
    assert unhurt.token_ids == oracle_output(asked)
    assert unhurt.finished.reason is FinishReason.STOP
    assert unhurt.token_ids.index(banned) == len(unhurt.token_ids) - 1 > max(INDICES)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_string_that_has_begun_is_found_after_the_preemption(
    small_runner: Runner, overlap: bool, include: bool
) -> None:
    letters = {ord(letter): 6.0 for letter in "ab"}  # text, not control characters
    plain = ask(PROMPT, temperature=1.2, seed=7, logit_bias=letters)
    (whole,) = run_all(small_runner, [plain])
    # It begins with the twelfth token, so the last preemption falls into it.
    stop = whole.text[11:14]
    assert len(whole.text) == 16
    assert whole.text.find(stop) == 11
    asked = ask(
        PROMPT, temperature=1.2, seed=7, logit_bias=letters,
        stop_strings=(stop, "absent"), include_stop_text=include,
    )  # fmt: skip
    unhurt = check_everywhere(small_runner, asked, overlap=overlap)
    assert unhurt.text == whole.text[: 14 if include else 11]
    assert unhurt.token_ids == whole.token_ids[:14]
    assert unhurt.finished.matched_stop == stop


def test_requests_that_outgrow_the_pool_together_get_what_each_would_alone(
    small_runner: Runner,
) -> None:
    asked = [
        ask(prompt_of(8, salt=n), temperature=[0.0, 0.8][n % 2], seed=n, max_tokens=32)
        for n in range(NUM_ROWS)
    ]
    play = Play(small_runner)
    guests = [play.submit(request) for request in asked]
    play.run()
    for request, guest in zip(asked, guests, strict=True):
        assert play.read(guest).token_ids == oracle_output(request)
    counts = [guest.num_preemptions for guest in guests]
    assert counts[0] == 0
    assert 1 <= max(counts) <= 3
    assert play.num_steps <= 6 * 34


# Prompt 5 5 9; without penalties the logits are these, and -1 for all other ids.
LOGITS = {5: 4.0, 9: 3.2, 2: 2.5, 7: 2.2}
BY_HAND: dict[str, tuple[dict[str, float], list[int]]] = {
    "none": ({}, [5, 5, 5, 5]),
    # 5: 2.0 and 9: 1.6 from the prompt on, though 5 is in it twice; then 2: 1.25 and 7: 1.1
    "repetition": ({"repetition_penalty": 2.0}, [2, 7, 5, 5]),
    # the prompt does not count: 5 is 3.0 after its first time, and after its second; 9 is 2.2
    "presence": ({"presence_penalty": 1.0}, [5, 9, 5, 5]),
    # 5 is 3.0, then 2.0; 9 is 2.2
    "frequency": ({"frequency_penalty": 1.0}, [5, 9, 5, 2]),
    # repetition as above, and 2 less for what was output once: 5 is 0.0 after its first time
    "all": (
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        [2, 7, 5, 9],
    ),
}


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_are_as_worked_out_by_hand_with_preemptions_too(
    small_runner: Runner, overlap: bool
) -> None:
    set_params(small_runner, constant_params(LOGITS, rest=-1.0))
    points = [(), (1,), (2,), (3,), (1, 2), (2, 2)]
    cases = [(case, at) for case in BY_HAND.values() for at in points]
    outputs = run_all(
        small_runner,
        [ask((5, 5, 9), max_tokens=4, **penalties) for (penalties, _), _ in cases],
        preempt_at=[at for _, at in cases],
        overlap=overlap,
    )
    for ((penalties, wanted), at), output in zip(cases, outputs, strict=True):
        assert output.token_ids == wanted, (penalties, at)


def test_every_bucket_was_met(small_runner: Runner) -> None:
    """Of the tests above: otherwise a wrong bucket could hide."""
    run_all(small_runner, [ask(PROMPT)] * 5)
    assert min(bucket_steps(small_runner).values()) > 0
    assert small_runner.spec.model == MODEL
