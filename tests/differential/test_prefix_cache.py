"""The prefix cache on the real runner: what is taken from it is what would be computed (C04, C17).

Prompts have beginnings in common that end inside a page and at its edge; each output is compared
with the whole model run without any cache.
"""

import functools

import pytest

from jaxserve.engine.start import find_changing_ropes
from jaxserve.identity import Digest, sha256
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.prefix_cache import PrefixCache
from tests.differential.small import Guest, Play, ask, oracle_output, prompt_of
from tests.differential.stage import MODEL, tiny_params
from tests.differential.test_windows_and_lengths import MODEL as WINDOWS
from tests.differential.test_windows_and_lengths import SMALL, params, right_output
from tests.oracle import oracle_greedy

NUM_TOKENS = 10
CHANGING = find_changing_ropes(layer.rope for layer in WINDOWS.layers)
BASE = prompt_of(30, salt=4)
SHARED = [
    BASE[:14],
    BASE[:14],  # all of it is there
    BASE[:15],
    (*BASE[:9], 1, 2, 3, 4),
    BASE[:12],
    BASE[:19],
    BASE[:19],
    BASE,
    (*BASE[:16], 5),
]


@functools.cache
def tiny_output(prompt: tuple[int, ...]) -> list[int]:
    return oracle_greedy(tiny_params(), prompt, MODEL, num_tokens=NUM_TOKENS)


def run_one_by_one(play: Play, asked: list[GenerationRequest]) -> list[Guest]:
    guests = []
    for request in asked:
        guests.append(play.submit(request))
        play.run()
    return guests


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_with_a_common_beginning_get_the_models_tokens(
    small_runner: Runner, overlap: bool
) -> None:
    play = Play(small_runner, overlap=overlap)
    guests = run_one_by_one(play, [ask(prompt, max_tokens=NUM_TOKENS) for prompt in SHARED])
    for prompt, guest in zip(SHARED, guests, strict=True):
        assert play.read(guest).token_ids == tiny_output(prompt), len(prompt)
    cached = [guest.request.num_cached for guest in guests]
    assert cached[:4] == [0, 13, 14, 9]
    assert min(cached[1:]) >= 9
    usages = [guest.request.num_cached for guest in guests]
    assert usages == cached


def test_all_at_once_and_preempted_they_get_the_same(small_runner: Runner) -> None:
    play = Play(small_runner)
    guests = []
    for number, prompt in enumerate(SHARED * 2):
        at = (1 + number % 5,) if number % 3 == 0 else ()
        guests.append(play.submit(ask(prompt, max_tokens=NUM_TOKENS), preempt_at=at))
        play.step()
    play.run()
    for prompt, guest in zip(SHARED * 2, guests, strict=True):
        assert play.read(guest).token_ids == tiny_output(prompt), len(prompt)
    assert sum(guest.num_preemptions for guest in guests) >= 6


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 11},
        {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "top_k": 5},
        {"logit_bias": {3: 2.0}, "min_tokens": 4},
    ],
    ids=["seeded", "penalties", "filters", "bias"],
)
def test_parameters_mean_the_same_on_a_cached_prompt(
    small_runner: Runner, sampling: dict[str, object]
) -> None:
    """Penalties count the prompt tokens that were not computed, too (C30)."""
    play = Play(small_runner)
    asked = [ask((*BASE[:13], *BASE[:3]), max_tokens=NUM_TOKENS, **sampling) for _ in range(2)]
    guests = run_one_by_one(play, asked)
    assert [guest.request.num_cached for guest in guests] == [0, 15]
    wanted = oracle_output(asked[0])
    assert [play.read(guest).token_ids for guest in guests] == [wanted, wanted]


def test_choices_fork_from_a_cached_prompt(small_runner: Runner) -> None:
    play = Play(small_runner)
    asked = [ask(BASE[:10], max_tokens=6, temperature=0.9, seed=3, num_choices=3) for _ in range(2)]
    guests = run_one_by_one(play, asked)
    assert guests[1].request.num_cached == 9
    wanted = [oracle_output(asked[0], choice=choice) for choice in range(3)]
    for guest in guests:
        assert play.read_choices(guest).token_ids == wanted


def test_the_first_tokens_log_probability_is_the_same_cached_or_not(small_runner: Runner) -> None:
    play = Play(small_runner)
    guests = run_one_by_one(play, [ask(BASE[:16], max_tokens=2, logprobs=3) for _ in range(3)])
    firsts = [play.read_choices(guest).choices[0].logprobs[0] for guest in guests]
    assert [guest.request.num_cached for guest in guests] == [0, 15, 15]
    for first in firsts[1:]:
        assert first.token_id == firsts[0].token_id
        assert first.logprob == pytest.approx(firsts[0].logprob, abs=1e-5)
        assert first.top_logprobs == pytest.approx(firsts[0].top_logprobs, abs=1e-5)


def one_for_all(message: bytes) -> bytes:
    return b"always the same"


def eight_bytes(message: bytes) -> bytes:
    return sha256(message)[:8]


def play_with(digest: Digest, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many tokens each found; all have the model's own."""
    monkeypatch.setattr(
        "jaxserve.engine.engine.PrefixCache", functools.partial(PrefixCache, digest=digest)
    )
    play = Play(runner)
    guests = run_one_by_one(play, [ask(prompt, max_tokens=NUM_TOKENS) for prompt in SHARED])
    for prompt, guest in zip(SHARED, guests, strict=True):
        assert play.read(guest).token_ids == tiny_output(prompt), len(prompt)
    return [guest.request.num_cached for guest in guests]


def test_a_shorter_digest_and_one_that_always_collides_change_no_token(
    small_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost hits at most (C03)."""
    found = play_with(sha256, small_runner, monkeypatch)
    assert play_with(eight_bytes, small_runner, monkeypatch) == found
    assert play_with(one_for_all, small_runner, monkeypatch) == [0] + [4] * 8
    assert min(found[1:]) > 4


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_only_mask_what_is_shared(windows_runner: Runner, overlap: bool) -> None:
    """Beginnings longer and shorter than the window of 6, and a RoPE that changes at 16."""
    play = Play(windows_runner, config=SMALL, overlap=overlap, changing_ropes=CHANGING)
    guests = run_one_by_one(play, [ask(prompt, max_tokens=NUM_TOKENS) for prompt in SHARED])
    for prompt, guest in zip(SHARED, guests, strict=True):
        assert play.read(guest).token_ids == right_output(prompt), len(prompt)
    cached = [guest.request.num_cached for guest in guests]
    # 19 tokens and 30 have positions of their own; the second of 19 finds the first
    assert cached == [0, 13, 14, 9, 11, 0, 18, 0, 0]


def test_without_the_prompts_length_in_the_identity_the_tokens_would_be_wrong(
    windows_runner: Runner,
) -> None:
    play = Play(windows_runner, config=SMALL, changing_ropes=())
    guests = run_one_by_one(play, [ask(prompt, max_tokens=NUM_TOKENS) for prompt in SHARED])
    right = [right_output(prompt) for prompt in SHARED]
    assert [play.read(guest).token_ids for guest in guests] != right


def test_a_decode_far_past_the_window_goes_on_from_a_hit(windows_runner: Runner) -> None:
    prompt = BASE[:16]
    play = Play(windows_runner, config=SMALL, changing_ropes=CHANGING)
    guests = run_one_by_one(play, [ask((*prompt[:14], last), max_tokens=24) for last in (1, 2)])
    assert guests[1].request.num_cached == 14
    wanted = oracle_greedy(params(), (*prompt[:14], 2), WINDOWS, num_tokens=24)
    assert play.read(guests[1]).token_ids == wanted
