"""K/V of one byte on the real runner: a request's tokens are the same however it is served.

Each is compared with its own run alone, in one piece and without a cache: that such a run is near
the model's own is tested elsewhere (tests/model/test_quantized_kv.py).
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.host_pages import SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential import small
from tests.differential.small import NUM_ROWS, Play, ask, prompt_of
from tests.differential.stage import MODEL, tiny_params

BASE = prompt_of(28, salt=4)
ASKED = [
    ask(BASE[:9]),
    ask((*BASE[:13], 1, 2), temperature=0.8, seed=5),
    ask(BASE[:21]),
    ask(prompt_of(10, salt=9), repetition_penalty=1.4),
    ask(BASE[:28], max_tokens=8),
    ask(prompt_of(2, salt=3)),
]


def config_of(kv_dtype: str) -> Config:
    values = small.CONFIG.model_dump()
    values["kv"]["dtype"] = kv_dtype
    values["host_tier"] = {"enabled": True, "max_bytes": 1 << 20}
    return Config.model_validate(values)


@pytest.fixture(scope="module", params=["int8", "float8_e4m3fn"])
def runner(request: pytest.FixtureRequest, small_cache: Path) -> Runner:
    config = config_of(request.param)
    runner = Runner(tiny_params(), MODEL, config, metrics=Metrics(), cache_dir=small_cache)
    assert runner.host_pages is not None
    # a model so small is computed sooner than copied
    runner.host_pages.costs = SwapCosts(run_pages=16, run_s=1e-9, token_s=1.0)
    return runner


@pytest.fixture(scope="module")
def config(runner: Runner) -> Config:
    return config_of(runner.spec.kv_dtype)


@pytest.fixture(scope="module")
def wanted(runner: Runner, config: Config) -> list[list[list[int]]]:
    return [alone(runner, config, asked) for asked in ASKED]


@pytest.fixture(autouse=True)
def spoiled(runner: Runner) -> None:
    """Nobody may read what the last test left in the pool."""
    rng = np.random.default_rng(0)
    runner._kv = jax.tree.map(
        lambda pool: jax.device_put(np.abs(9 * rng.standard_normal(pool.shape)).astype(pool.dtype)),
        runner._kv,
    )


def alone(runner: Runner, config: Config, asked: GenerationRequest) -> list[list[int]]:
    """Returns the tokens of each choice, of a run without mates and without a cache."""
    off = config.model_copy(
        update={
            "prefix_cache": config.prefix_cache.model_copy(update={"enabled": False}),
            "host_tier": config.host_tier.model_copy(update={"enabled": False}),
        }
    )
    play = Play(runner, config=off)
    guest = play.submit(asked)
    play.run()
    assert guest.request.num_cached == 0
    return play.read_choices(guest).token_ids


def test_a_prompt_that_was_computed_before_goes_on_the_same(
    runner: Runner, config: Config, wanted: list[list[list[int]]]
) -> None:
    play = Play(runner, config=config)
    cached = []
    for asked, tokens in zip(ASKED * 2, wanted * 2, strict=True):
        guest = play.submit(asked)
        play.run()
        assert play.read_choices(guest).token_ids == tokens
        cached.append(guest.request.num_cached)
    assert sum(count > 0 for count in cached) >= 7


def test_what_went_through_host_memory_goes_on_the_same(
    runner: Runner, config: Config, wanted: list[list[list[int]]]
) -> None:
    before = runner._metrics.total("host_tier_pages_in_total")
    play = Play(runner, config=config)
    others = [ask(prompt_of(30, salt=20 + number), max_tokens=4) for number in range(3)]
    for asked, tokens in zip(ASKED * 2, wanted * 2, strict=True):
        guest = play.submit(asked)
        play.run()
        assert play.read_choices(guest).token_ids == tokens
        for other in others:  # together they take all of the pool
            play.submit(other)
            play.run()
    assert runner._metrics.total("host_tier_pages_in_total") > before


@pytest.mark.parametrize("overlap", [False, True])
def test_mates_chunks_and_preemptions_change_no_token(
    runner: Runner, config: Config, wanted: list[list[list[int]]], overlap: bool
) -> None:
    play = Play(runner, config=config, overlap=overlap)
    guests = []
    for number, asked in enumerate(ASKED * 3):
        at = (1 + number % 5,) if number % 2 == 0 else ()
        guests.append(play.submit(asked, preempt_at=at))
        for _ in range(number % NUM_ROWS):  # each that decodes takes a token of the next's chunks
            play.step()
    play.run()
    for guest, tokens in zip(guests, wanted * 3, strict=True):
        assert play.read_choices(guest).token_ids == tokens
    assert sum(guest.num_preemptions for guest in guests) >= 9


def test_choices_fork_with_the_scales_of_the_page_they_copy(runner: Runner, config: Config) -> None:
    asked = ask(BASE[:10], max_tokens=6, temperature=0.9, seed=3, num_choices=3)
    tokens = alone(runner, config, asked)
    single = ask(BASE[:10], max_tokens=6, temperature=0.9, seed=3)
    assert tokens[:1] == alone(runner, config, single)
    assert len(set(map(tuple, tokens))) == 3
    play = Play(runner, config=config)
    for _ in range(2):
        guest = play.submit(asked)
        play.run()
        assert play.read_choices(guest).token_ids == tokens
    assert guest.request.num_cached == 9
