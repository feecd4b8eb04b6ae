"""A request's output is its own, whoever its neighbours are (C22, C24)."""

import itertools
import random

import pytest

from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential.small import (
    NUM_ROWS,
    Guest,
    Play,
    ask,
    bucket_steps,
    oracle_output,
    prompt_of,
    run_all,
)

PROMPT = prompt_of(11)
SEEDED = ask(PROMPT, temperature=0.8, seed=42)
MATES = {
    "seeded": ask(prompt_of(5, salt=1), temperature=0.8, seed=43),
    "of the same seed": ask(prompt_of(5, salt=1), temperature=0.8, seed=42),
    "unseeded": ask(prompt_of(3, salt=2), temperature=1.1),
    "greedy": ask(prompt_of(4, salt=3)),
    "with penalties": ask(prompt_of(4, salt=4), repetition_penalty=1.4, temperature=0.7, seed=1),
}


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return oracle_output(SEEDED)


def run_in_row(
    runner: Runner, row: int, mates: list[GenerationRequest], *, overlap: bool = True
) -> tuple[Guest, Play]:
    """Runs the seeded request in that row: as many mates before it, the rest some steps later."""
    play = Play(runner, overlap=overlap)
    for mate in mates[:row]:
        play.submit(mate)
    while play.engine._scheduler.num_running < row:
        play.step()
    target = play.submit(SEEDED)
    play.step()
    play.step()
    assert target.request.sequences[0].row == row
    for mate in mates[row:]:
        play.submit(mate)
        play.step()
    return target, play


def test_a_seeded_request_alone_is_what_the_oracle_says(
    small_runner: Runner, wanted: list[int]
) -> None:
    for overlap in (True, False):
        (output,) = run_all(small_runner, [SEEDED], overlap=overlap)
        assert output.token_ids == wanted


@pytest.mark.parametrize("row", range(NUM_ROWS))
def test_a_seeded_request_is_the_same_in_every_row_beside_any_mates(
    small_runner: Runner, wanted: list[int], row: int
) -> None:
    before = bucket_steps(small_runner)
    for kind, mate in MATES.items():
        for num_mates in range(row, NUM_ROWS):
            target, play = run_in_row(small_runner, row, [mate] * num_mates)
            play.run()
            assert play.read(target).token_ids == wanted, (kind, num_mates)
    after = bucket_steps(small_runner)
    ran = {name for name in after if after[name] > before[name]}
    assert row > 0 or ran == set(after), "a bucket was not forced"


@pytest.mark.parametrize("row", range(NUM_ROWS))
def test_mates_that_abort_and_preemptions_change_no_seeded_token(
    small_runner: Runner, wanted: list[int], row: int
) -> None:
    for at in (1, 5, 9):
        mates = [*MATES.values()][:3]
        target, play = run_in_row(small_runner, row, mates)
        target.preempt_at = [at]
        gone: list[Guest] = []

        def abort_a_mate(
            play: Play = play, target: Guest = target, gone: list[Guest] = gone
        ) -> None:
            others = [g for g in play.guests if g is not target and g.is_running and g.output]
            if others and play.num_steps % 4 == 0:
                others[0].stream.cancel()
                gone.append(others[0])
                play.submit(MATES["greedy"])  # another takes its place

        for _ in range(12):
            abort_a_mate()
            play.step()
        play.run()
        assert play.read(target).token_ids == wanted
        ends = [play.read(guest).finished.reason for guest in gone]
        assert FinishReason.CANCELLED in ends


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 9, 10, 11, 19, 20, 21])
def test_a_seeded_request_is_the_same_however_its_prompt_is_cut(
    small_runner: Runner, prompt_len: int
) -> None:
    asked = ask(prompt_of(prompt_len), temperature=0.8, seed=42, max_tokens=9)
    decoding = ask(prompt_of(2), max_tokens=30)
    for num_mates in range(NUM_ROWS):  # each takes a token of the budget
        play = Play(small_runner)
        for _ in range(num_mates):
            play.submit(decoding)
        play.step()
        play.step()
        target = play.submit(asked)
        play.run()
        assert play.read(target).token_ids == oracle_output(asked)


def test_unseeded_requests_differ_and_seeds_make_them_differ(small_runner: Runner) -> None:
    unseeded = run_all(small_runner, [ask(PROMPT, temperature=0.8)] * 8)
    assert len({output.text for output in unseeded}) >= 2
    seeded = run_all(small_runner, [ask(PROMPT, temperature=0.8, seed=s) for s in range(8)])
    assert len({output.text for output in seeded}) >= 2


SIX = [
    ask(prompt_of(9, salt=0), max_tokens=12),
    ask(prompt_of(3, salt=1), temperature=0.3, top_k=2, seed=1, max_tokens=5),
    ask(prompt_of(6, salt=2), temperature=1.0, top_p=0.5, seed=2, max_tokens=9),
    ask(prompt_of(4, salt=3), repetition_penalty=1.8, max_tokens=14),
    ask(prompt_of(1, salt=4), temperature=1.0, logit_bias={3: 5.0}, seed=4, max_tokens=7),
    ask(prompt_of(12, salt=5), temperature=1.0, min_p=0.3, seed=5, max_tokens=8),
]


def test_sampling_state_stays_with_its_request_in_any_order_of_arrival(
    small_runner: Runner,
) -> None:
    wanted = [oracle_output(request) for request in SIX]
    orders = random.Random(24).sample(list(itertools.permutations(range(6))), 60)
    for index, order in enumerate(orders):
        play = Play(small_runner, overlap=index % 2 == 0)
        guests = {}
        for n, number in enumerate(order):
            guests[number] = play.submit(SIX[number])
            for _ in range((index + n) % 4):  # some come together, some while others run
                play.step()
        play.run()
        for number, guest in guests.items():
            assert play.read(guest).token_ids == wanted[number], order


def test_each_of_the_six_needs_its_parameters() -> None:
    """Otherwise parameters that are lost or swapped could not be seen."""
    for request in SIX[1:]:
        assert isinstance(request.prompt, tuple)
        plain = ask(
            request.prompt,
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
            max_tokens=request.sampling.max_tokens,
        )
        assert oracle_output(plain) != oracle_output(request)
