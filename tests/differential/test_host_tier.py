"""The host tier on the real runner: what comes back from host memory is what would be computed.

Seven prompts, each of more than half the pool, take turns: by the time one returns, all that it
left has gone through host memory. Each output is compared with the whole model run without any
cache, and with an engine that has no tier.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.config import Config
from jaxserve.host_pages import SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.runner.runner import Runner
from tests.differential.small import CONFIG, Guest, Play, ask, oracle_output, prompt_of
from tests.differential.stage import MODEL, tiny_params
from tests.oracle import oracle_greedy

NUM_TOKENS = 6
COUNTERS = [
    f"host_tier_{name}_total"
    for name in ("hit_tokens", "declined_tokens", "dropped_pages", "pages_in", "pages_out")
]
TIER = CONFIG.model_copy(
    update={
        "host_tier": CONFIG.host_tier.model_copy(update={"enabled": True, "max_bytes": 1 << 20})
    }
)
PROMPTS = [prompt_of(30, salt=20 + number) for number in range(7)]


@functools.cache
def right_output(prompt: tuple[int, ...]) -> list[int]:
    return oracle_greedy(tiny_params(), prompt, MODEL, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def runner(small_cache: Path) -> Runner:
    runner = Runner(tiny_params(), MODEL, TIER, metrics=Metrics(), cache_dir=small_cache)
    assert runner.host_pages is not None
    # a model so small is computed sooner than copied
    runner.host_pages.costs = SwapCosts(run_pages=16, run_s=1e-9, token_s=1.0)
    return runner


class TierPlay(Play):
    """A play that knows what it was that the runner's other engines counted."""

    def __init__(self, runner: Runner, *, config: Config, overlap: bool = True) -> None:
        super().__init__(runner, config=config, overlap=overlap)
        self._before = {name: self.engine.metrics.total(name) for name in COUNTERS}

    def count(self, name: str) -> float:
        name = f"host_tier_{name}_total"
        return self.engine.metrics.total(name) - self._before[name]


def run_one_by_one(play: TierPlay, prompts: Sequence[tuple[int, ...]]) -> list[Guest]:
    guests = []
    for prompt in prompts:
        guests.append(play.submit(ask(prompt, max_tokens=NUM_TOKENS)))
        play.run()
        assert play.read(guests[-1]).token_ids == right_output(prompt)
    return guests


@pytest.mark.parametrize("overlap", [False, True])
def test_with_all_going_through_host_memory_the_tokens_are_the_models(
    runner: Runner, overlap: bool
) -> None:
    play = TierPlay(runner, config=TIER, overlap=overlap)
    for number in range(3):
        guests = run_one_by_one(play, PROMPTS)
        cached = [guest.request.num_cached for guest in guests]
        assert cached == ([0] * 7 if number == 0 else [28] * 7)
        assert play.count("hit_tokens") == 7 * 28 * number
    assert play.count("pages_in") * 4 == play.count("hit_tokens")
    assert play.count("pages_out") >= 7 * 7


def test_without_the_tier_nothing_of_a_prompt_is_left_when_it_returns(runner: Runner) -> None:
    play = TierPlay(runner, config=CONFIG)
    guests = run_one_by_one(play, PROMPTS * 2)
    assert [guest.request.num_cached for guest in guests] == [0] * 14
    assert play.count("hit_tokens") == 0


def test_all_at_once_and_preempted_they_get_the_same(runner: Runner) -> None:
    play = TierPlay(runner, config=TIER)
    guests = []
    for number, prompt in enumerate(PROMPTS * 3):
        at = (1 + number % 5,) if number % 3 == 0 else ()
        guests.append(play.submit(ask(prompt, max_tokens=NUM_TOKENS), preempt_at=at))
        play.step()
    play.run()
    for prompt, guest in zip(PROMPTS * 3, guests, strict=True):
        assert play.read(guest).token_ids == right_output(prompt)
    assert sum(guest.num_preemptions for guest in guests) >= 7
    assert play.count("hit_tokens") > 0


@pytest.mark.parametrize("kind", ["one bit of each is wrong", "they were lost"])
def test_what_host_memory_lost_is_computed_again(runner: Runner, kind: str) -> None:
    play = TierPlay(runner, config=TIER)
    run_one_by_one(play, PROMPTS)
    store = runner.host_pages
    assert store is not None
    for host_page in range(store.num_pages):
        if kind == "they were lost":
            store._checksums[host_page] = None
        else:
            store._bytes[host_page, host_page % 2, 7 * host_page % 100] ^= 1
    guests = run_one_by_one(play, PROMPTS)
    # the last was in the pool when it happened, and left it then
    assert [guest.request.num_cached for guest in guests] == [0] * 6 + [28]
    assert play.count("hit_tokens") == 28
    assert play.count("dropped_pages") == 6  # the first of each, and with it all behind it
    guests = run_one_by_one(play, PROMPTS)
    assert [guest.request.num_cached for guest in guests] == [28] * 7


def test_choices_fork_and_sample_behind_what_came_back(runner: Runner) -> None:
    play = TierPlay(runner, config=TIER)
    asked = ask(PROMPTS[0][:26], max_tokens=5, temperature=0.9, seed=3, num_choices=3)
    wanted = [oracle_output(asked, choice=choice) for choice in range(3)]
    for _ in range(2):
        guest = play.submit(asked)
        play.run()
        assert play.read_choices(guest).token_ids == wanted
        run_one_by_one(play, PROMPTS[1:])
    assert guest.request.num_cached == 24


def test_a_flush_empties_host_memory_too(runner: Runner) -> None:
    play = TierPlay(runner, config=TIER)
    run_one_by_one(play, PROMPTS)
    play.engine._pool.flush(lambda identity: True)
    guests = run_one_by_one(play, PROMPTS)
    assert [guest.request.num_cached for guest in guests] == [0] * 7


def test_what_is_computed_sooner_is_not_copied_back(runner: Runner) -> None:
    store = runner.host_pages
    assert store is not None
    before, store.costs = store.costs, SwapCosts(run_pages=16, run_s=29.0, token_s=1.0)
    try:
        play = TierPlay(runner, config=TIER)
        guests = run_one_by_one(play, PROMPTS * 2)
    finally:
        store.costs = before
    assert play.count("hit_tokens") == 0
    assert [guest.request.num_cached for guest in guests] == [0] * 14
    assert play.count("declined_tokens") == 7 * 28
