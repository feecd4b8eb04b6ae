"""Sliding windows, soft-caps and RoPE that follows the length, through the real engine (C17).

One model has all of it: two layers see six keys, the one between them sees all, with a RoPE that
changes once a sequence is longer than 16. Prompts are shorter and longer than both.
"""

import dataclasses
import functools

import pytest

from jaxserve.config import Config
from jaxserve.model.config import LayerConfig, ModelConfig
from jaxserve.model.params import Params
from jaxserve.runner.runner import Runner
from tests.differential.small import CONFIG, Play, ask, prompt_of
from tests.model.families import (
    DYNAMIC,
    GEMMA2,
    ROPE,
    Mutation,
    change,
    change_layers,
    random_params,
    turn_layers,
    widen_windows,
)
from tests.oracle import oracle_greedy

MODEL = dataclasses.replace(
    GEMMA2,
    max_position=128,
    # With a head of the embedding the next token would be the last one again, whatever is wrong.
    tied_head=False,
    embedding_scale=None,
    layers=(
        LayerConfig(rope=ROPE, window=6),
        LayerConfig(rope=DYNAMIC),
        LayerConfig(rope=ROPE, window=6),
    ),
)
# The chunks of E0 and its pages; one bucket of each kind, for compiling is what this costs.
SMALL = Config.model_validate(
    CONFIG.model_dump()
    | {
        "buckets": {
            "decode_seqs": (4,),
            "chunk_tokens": (10,),
            "chunk_decode_seqs": (4,),
            "chunk_tile": 2,
        }
    }
)
NUM_TOKENS = 10
PROMPTS = [prompt_of(length, salt=1) for length in (3, 7, 14, 15, 19, 30)]


@functools.cache
def params() -> Params:
    return random_params(MODEL, seed=3)


@functools.cache
def right_output(prompt: tuple[int, ...]) -> list[int]:
    return oracle_greedy(params(), prompt, MODEL, num_tokens=NUM_TOKENS)


def check_outputs(runner: Runner, *, preempt_at: dict[int, tuple[int, ...]]) -> list[int]:
    """Runs all prompts at once, each to be preempted at these output lengths; returns how often
    each was."""
    play = Play(runner, config=SMALL)
    guests = [
        play.submit(ask(prompt, max_tokens=NUM_TOKENS), preempt_at=preempt_at.get(index, ()))
        for index, prompt in enumerate(PROMPTS)
    ]
    play.run()
    for prompt, guest in zip(PROMPTS, guests, strict=True):
        assert play.read(guest).token_ids == right_output(prompt), len(prompt)
    return [guest.num_preemptions for guest in guests]


def test_mates_and_chunks_change_nothing(windows_runner: Runner) -> None:
    check_outputs(windows_runner, preempt_at={})


def test_preemptions_change_nothing(windows_runner: Runner) -> None:
    """Before the original length is passed, after it, and twice."""
    points = {0: (1, 8), 2: (1, 5), 3: (3,), 4: (2, 2), 5: (9,)}
    counts = check_outputs(windows_runner, preempt_at=points)
    assert all(counts[index] >= len(at) for index, at in points.items())


def test_a_prompt_alone_gets_the_same(windows_runner: Runner) -> None:
    for prompt in PROMPTS[-2:]:
        play = Play(windows_runner, config=SMALL, overlap=False)
        guest = play.submit(ask(prompt, max_tokens=NUM_TOKENS))
        play.run()
        assert play.read(guest).token_ids == right_output(prompt)


@pytest.mark.parametrize(
    "mutation",
    [
        widen_windows(1),
        widen_windows(-1),
        turn_layers,
        change_layers(rope=ROPE),
        change(attention_soft_cap=None),
    ],
    ids=["a key too many", "a key too few", "windows elsewhere", "one RoPE", "no cap"],
)
def test_the_tokens_see_a_wrong_detail(mutation: Mutation) -> None:
    wrong_params, wrong_model = mutation(params(), MODEL)
    assert _differs(wrong_params, wrong_model)


def test_the_tokens_see_where_the_prompt_ends() -> None:
    """Outputs that are taken for a part of the prompt would change the tokens before them."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + NUM_TOKENS:
            ids += oracle_greedy(params(), ids, MODEL, num_tokens=1)
        found.append(ids[len(prompt) :] != right_output(prompt))
    assert any(found)


def _differs(wrong_params: Params, wrong_model: ModelConfig) -> bool:
    return any(
        oracle_greedy(wrong_params, prompt, wrong_model, num_tokens=NUM_TOKENS)
        != right_output(prompt)
        for prompt in PROMPTS
    )
