"""Several choices on the real runner: each is what the oracle says of its noise (C14, C22, C30)."""

import dataclasses
import itertools

import pytest

from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential.small import Play, ask, oracle_output, prompt_of
from tests.engines import Outputs

DRAWN = ask(prompt_of(7), temperature=0.8, seed=7, max_tokens=8)
SETTINGS = {
    "plain": DRAWN,
    "filters": ask(prompt_of(7), temperature=0.9, seed=2**50 + 1, top_k=9, top_p=0.9, max_tokens=8),
    "penalties": ask(
        prompt_of(7), temperature=0.8, seed=5, max_tokens=8,
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5,
    ),
    "bias": ask(prompt_of(7), temperature=0.8, seed=7, max_tokens=8, logit_bias={3: 4.0, 60: 3.0}),
    "greedy": ask(prompt_of(7), max_tokens=8),
}  # fmt: skip


def with_choices(asked: GenerationRequest, num_choices: int, **fields: object) -> GenerationRequest:
    sampling = dataclasses.replace(asked.sampling, num_choices=num_choices, **fields)  # type: ignore[arg-type]  # by name
    return dataclasses.replace(asked, sampling=sampling)


def wanted(asked: GenerationRequest) -> list[list[int]]:
    """Returns what each choice must be."""
    return [oracle_output(asked, choice=n) for n in range(asked.sampling.num_choices)]


def run_one(runner: Runner, asked: GenerationRequest, *, overlap: bool = True) -> Outputs:
    play = Play(runner, overlap=overlap)
    guest = play.submit(asked)
    play.run()
    return play.read_choices(guest)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_choice_is_the_oracles_of_its_noise(
    small_runner: Runner, name: str, overlap: bool
) -> None:
    asked = with_choices(SETTINGS[name], 3)
    outputs = run_one(small_runner, asked, overlap=overlap)
    assert outputs.token_ids == wanted(asked)
    num_different = len({tuple(token_ids) for token_ids in outputs.token_ids})
    assert num_different == (1 if name == "greedy" else 3)


def test_each_choice_is_the_separate_request_of_that_choice(small_runner: Runner) -> None:
    """The noise of a choice depends on its number, not on who is beside it."""
    together = run_one(small_runner, with_choices(DRAWN, 4))
    for choice in range(4):
        play = Play(small_runner)
        guest = play.submit(DRAWN)
        play.engine._loop._take_inbox()
        guest.request.sequences[0].choice = choice
        play.run()
        assert play.read(guest).token_ids == together.token_ids[choice]


@pytest.mark.parametrize("num_choices", [2, 4])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 7, 8, 9, 12, 19])
def test_the_last_page_of_the_prompt_may_be_filled_to_any_place(
    small_runner: Runner, prompt_len: int, num_choices: int
) -> None:
    """One token, a page less one, whole pages, one more; in one chunk and in several."""
    prompt = prompt_of(prompt_len, salt=3)
    asked = with_choices(ask(prompt, temperature=0.8, seed=9, max_tokens=6), num_choices)
    assert run_one(small_runner, asked).token_ids == wanted(asked)


@pytest.mark.parametrize("max_tokens", [1, 2, 14])
def test_a_page_that_is_full_for_all_and_choices_of_one_token(
    small_runner: Runner, max_tokens: int
) -> None:
    asked = with_choices(ask(prompt_of(6), temperature=0.8, seed=4, max_tokens=max_tokens), 3)
    assert run_one(small_runner, asked).token_ids == wanted(asked)


@pytest.mark.parametrize("overlap", [True, False])
def test_choices_are_the_same_wherever_they_are_preempted(
    small_runner: Runner, overlap: bool
) -> None:
    """Before the prompt is done, in the step of the fork, and after each token; twice as well."""
    for name in ("plain", "penalties"):
        asked = with_choices(SETTINGS[name], 3)
        whole = wanted(asked)
        for points in (*itertools.combinations(range(1, 11), 1), (2, 3), (3, 8), (4, 4)):
            play = Play(small_runner, overlap=overlap)
            guest = play.submit(asked)
            due = list(points)
            while play.has_work:
                if due and play.num_steps >= due[0] and guest.is_running:
                    del due[0]
                    play.engine._scheduler.preempt(guest.request)
                play.step()
            play.run()
            assert play.read_choices(guest).token_ids == whole, points


def test_choices_that_outgrow_the_pool_preempt_each_other_and_lose_nothing(
    small_runner: Runner,
) -> None:
    asked = with_choices(ask(prompt_of(8), temperature=0.8, seed=1, max_tokens=32), 4)
    before = small_runner._metrics.value("preemptions_total")
    outputs = run_one(small_runner, asked)
    assert outputs.token_ids == wanted(asked)
    assert small_runner._metrics.value("preemptions_total") > before


def test_choices_have_mates_that_come_and_go(small_runner: Runner) -> None:
    requests = [
        with_choices(ask(prompt_of(5, salt=1), temperature=0.8, seed=1, max_tokens=9), 2),
        ask(prompt_of(9, salt=2), repetition_penalty=1.5, max_tokens=12),
        with_choices(ask(prompt_of(4, salt=3), temperature=1.1, seed=2, max_tokens=5), 3),
        ask(prompt_of(2, salt=4), temperature=0.7, seed=3, max_tokens=7),
        with_choices(
            ask(prompt_of(6, salt=5), temperature=0.9, seed=8, top_p=0.8, max_tokens=6), 2
        ),
    ]
    play = Play(small_runner)
    guests = []
    for asked in requests:
        guests.append(play.submit(asked))
        play.step()
        play.step()
    play.run()
    for asked, guest in zip(requests, guests, strict=True):
        assert play.read_choices(guest).token_ids == wanted(asked)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_choice_that_ends_leaves_its_pages_to_the_others(
    small_runner: Runner, overlap: bool
) -> None:
    whole = wanted(with_choices(DRAWN, 3, max_tokens=16))
    stop = next(
        token for token in whole[1][2:6] if token not in {*whole[0], *whole[2], *whole[1][:2]}
    )
    asked = with_choices(DRAWN, 3, max_tokens=16, stop_token_ids=(stop,))
    outputs = run_one(small_runner, asked, overlap=overlap)
    assert outputs.token_ids == [whole[0], whole[1][: whole[1].index(stop) + 1], whole[2]]


def test_page_copies_and_forks_were_met(small_runner: Runner) -> None:
    run_one(small_runner, with_choices(DRAWN, 3))
    value = small_runner._metrics.value
    assert value("kv_page_copies_total") > 0
    assert value("forked_choices_total") > 0
