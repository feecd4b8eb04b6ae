"""Sequences of any lengths side by side, in pages of any size, are what each is alone (C53)."""

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential import small
from tests.differential.small import NUM_ROWS, Play, oracle_output, prompt_of
from tests.differential.stage import MODEL, tiny_params

LENGTHS = (1, 3, 4, 5, 8, 9, 15, 16, 17)


def config_of(page_size: int) -> Config:
    """Returns E0 with other pages, enough of them, and as few programs as can be."""
    values = small.CONFIG.model_dump()
    values["kv"] |= {"page_size": page_size, "num_pages": 1 + 96 // page_size}
    values["buckets"] |= {"capture": False}
    return Config.model_validate(values)


@functools.cache
def asked_of(length: int, place: int) -> tuple[GenerationRequest, list[int]]:
    """Returns a request of this length, another at each place of a batch, and its output."""
    request = small.ask(prompt_of(length, salt=place), max_tokens=4)
    return request, oracle_output(request)


def check(runner: Runner, config: Config, lens: Sequence[int], num_steps_between: int) -> None:
    play = Play(runner, config=config)
    guests = []
    for place, length in enumerate(lens):
        guests.append(play.submit(asked_of(length, place)[0]))
        for _ in range(num_steps_between):  # the first decodes while the next is prefilled
            play.step()
    play.run()
    for place, (length, guest) in enumerate(zip(lens, guests, strict=True)):
        assert play.read(guest).token_ids == asked_of(length, place)[1], lens


def batches() -> list[tuple[int, ...]]:
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    rng = random.Random(53)
    more = [tuple(rng.choices(LENGTHS, k=size)) for size in (3, NUM_ROWS) for _ in range(15)]
    return [*((length,) for length in LENGTHS), *pairs, *more]


def test_lengths_beside_each_other_in_the_small_engines_own_pages(small_runner: Runner) -> None:
    for index, lens in enumerate(batches()):
        check(small_runner, small.CONFIG, lens, index % 3)


@pytest.mark.parametrize("page_size", [1, 16])
def test_lengths_beside_each_other_in_pages_of_other_sizes(
    page_size: int, small_cache: Path
) -> None:
    config = config_of(page_size)
    # The output programs do not know of pages: the cache may have them.
    runner = Runner(tiny_params(), MODEL, config, metrics=Metrics(), cache_dir=small_cache)
    for index, lens in enumerate(batches()):
        check(runner, config, lens, index % 3)
