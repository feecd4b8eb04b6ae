"""The mixture of experts: which pairs are computed, and what comes out, in any company."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model.config import LayerConfig, ModelConfig
from jaxserve.model.experts import (
    MAX_BLOCK,
    MIN_BLOCK,
    block_size,
    experts_block,
    find_block,
    route,
    sort_pairs,
)
from jaxserve.model.params import Params
from tests import oracle
from tests.model.families import EXPERTS, FAMILIES, random_params
from tests.model.paged import T1

CONFIG = dataclasses.replace(FAMILIES["mixtral"], layers=(LayerConfig(rope=None, mlp="experts"),))
E, J, D = EXPERTS.num_experts, EXPERTS.num_active, T1.hidden_size
TOLERANCE = 1e-5

_experts_block = jax.jit(experts_block, static_argnames="config")


@functools.cache
def layer_params() -> Params:
    layer: Params = random_params(CONFIG)["layers"]["0"]
    return layer


def make_inputs(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, D)).astype(np.float32)


def run(y_TD: np.ndarray, is_real_T: object = None, config: ModelConfig = CONFIG) -> np.ndarray:
    real_T = np.ones(len(y_TD), bool) if is_real_T is None else np.asarray(is_real_T)
    out_TD = _experts_block(layer_params(), jnp.asarray(y_TD), jnp.asarray(real_T), config=config)
    assert out_TD.dtype == jnp.float32
    return np.asarray(out_TD)


def wanted(y_TD: np.ndarray, config: ModelConfig = CONFIG) -> np.ndarray:
    return oracle._experts(layer_params(), y_TD.astype(np.float64), config)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 90])
def test_each_token_gets_the_weighted_sum_of_its_experts(num_tokens: int) -> None:
    y_TD = make_inputs(num_tokens)
    right = wanted(y_TD)
    np.testing.assert_allclose(run(y_TD), right, atol=TOLERANCE * np.abs(right).max())


def test_bfloat16_weights_give_the_same_but_for_rounding() -> None:
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), layer_params())
    y_TD = jnp.asarray(make_inputs(20), jnp.bfloat16)
    out_TD = _experts_block(params, y_TD, jnp.ones(20, jnp.bool), config=CONFIG)
    right = oracle._experts(params, np.asarray(y_TD, np.float64), CONFIG)
    assert out_TD.dtype == jnp.float32
    assert np.abs(out_TD - right).max() < 1e-2 * np.abs(right).max()


def test_all_experts_of_a_token_may_be_active() -> None:
    experts = dataclasses.replace(EXPERTS, num_active=E, normalize=False)
    config = dataclasses.replace(CONFIG, experts=experts)
    y_TD = make_inputs(5)
    right = wanted(y_TD, config)
    np.testing.assert_allclose(run(y_TD, config=config), right, atol=1e-5 * np.abs(right).max())


def test_all_tokens_may_want_the_same_experts() -> None:
    y_TD = np.repeat(make_inputs(1), 90, axis=0)
    right = wanted(y_TD)
    got = run(y_TD)
    np.testing.assert_allclose(got, right, atol=TOLERANCE * np.abs(right).max())
    assert (got == got[0]).all()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    y_TD, others_TD = make_inputs(90), make_inputs(90, seed=1)
    is_mine_T = np.random.default_rng(2).random(90) < 0.3
    mixed_TD = np.where(is_mine_T[:, None], y_TD, others_TD)
    alone, mixed = run(y_TD), run(mixed_TD)
    scale = np.abs(alone).max()
    np.testing.assert_allclose(mixed[is_mine_T], alone[is_mine_T], atol=1e-6 * scale)
    assert np.abs(mixed - alone)[~is_mine_T].max() > 0.1 * scale


def test_padding_goes_nowhere_whatever_it_holds() -> None:
    y_TD = make_inputs(90)
    is_real_T = np.random.default_rng(3).random(90) < 0.4
    y_TD[~is_real_T] = np.nan
    got = run(y_TD, is_real_T)
    right = wanted(y_TD[is_real_T])
    np.testing.assert_allclose(got[is_real_T], right, atol=TOLERANCE * np.abs(right).max())
    assert (got[~is_real_T] == 0).all()
    assert (run(y_TD, np.zeros(90, bool)) == 0).all()


def blocks_of(expert_TJ: np.ndarray, size: int) -> list[tuple[int, list[int]]]:
    """Returns the expert of each block, and the tokens of the pairs in it that are its own."""
    pairs = sort_pairs(jnp.asarray(expert_TJ, jnp.int32), num_experts=3, size=size)
    blocks: list[tuple[int, list[int]]] = []
    for block in range(int(pairs.end_block_E[-1])):
        expert, start = map(int, find_block(pairs, jnp.int32(block), size=size))
        tokens = pairs.token_I[start : start + size].tolist()
        num_before = sum(len(own) for other, own in blocks if other == expert)
        blocks.append((expert, tokens[: int((expert_TJ == expert).sum()) - num_before]))
    return blocks


# The drawing in experts.py's docstring.
DRAWN_TJ = np.array([[0, 1], [0, 2], [0, 1], [0, 2], [0, 1]])


def test_pairs_are_cut_into_blocks_as_drawn() -> None:
    assert blocks_of(DRAWN_TJ, 4) == [(0, [0, 1, 2, 3]), (0, [4]), (1, [0, 2, 4]), (2, [1, 3])]


def test_padding_is_in_no_block_and_costs_none() -> None:
    is_real_T = jnp.arange(20) % 3 == 0
    _, routed_TJ = route(layer_params(), jnp.asarray(make_inputs(20)), is_real_T, experts=EXPERTS)
    np.testing.assert_array_equal((routed_TJ == E).all(axis=1), ~is_real_T)
    assert ((routed_TJ >= 0) & (routed_TJ < E))[is_real_T].all()
    expert_TJ = DRAWN_TJ.copy()
    expert_TJ[1:] = 3  # no such expert
    assert blocks_of(expert_TJ, 2) == [(0, [0]), (1, [0])]
    assert blocks_of(np.full((50, 2), 3), 2) == []


def test_an_expert_without_pairs_has_no_block() -> None:
    assert blocks_of(np.array([[2, 0], [2, 0]]), 2) == [(0, [0, 1]), (2, [0, 1])]
    assert blocks_of(np.array([[2], [2], [2]]), 2) == [(2, [0, 1]), (2, [2])]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_is_in_one_block_of_its_expert(seed: int) -> None:
    expert_TJ = np.random.default_rng(seed).permuted(np.tile(np.arange(4), (17, 1)), axis=1)[:, :2]
    blocks = blocks_of(expert_TJ, 4)
    done = sorted((expert, token) for expert, tokens in blocks for token in tokens)
    pairs = [(int(e), t) for t, row in enumerate(expert_TJ) for e in row if e < 3]
    assert done == sorted(pairs)
    assert [expert for expert, _ in blocks] == sorted(expert for expert, _ in blocks)


def test_where_the_sort_took_a_pair_is_known() -> None:
    pairs = sort_pairs(jnp.asarray(DRAWN_TJ, jnp.int32), num_experts=3, size=4)
    token_TJ = pairs.token_I[pairs.place_TJ]
    np.testing.assert_array_equal(token_TJ, np.arange(5)[:, None] * np.ones((1, 2), int))


def test_blocks_grow_with_the_pairs_of_an_expert() -> None:
    assert block_size(1, 2, 8) == MIN_BLOCK
    assert block_size(32, 8, 64) == 8
    assert block_size(100_000, 8, 64) == MAX_BLOCK


def test_shares_sum_to_one_only_where_they_are_normalized() -> None:
    y_TD = jnp.asarray(make_inputs(20))
    for normalize in (True, False):
        experts = dataclasses.replace(EXPERTS, normalize=normalize)
        share_TJ, expert_TJ = route(layer_params(), y_TD, jnp.ones(20, jnp.bool), experts=experts)
        assert share_TJ.dtype == jnp.float32
        assert (np.diff(share_TJ, axis=1) <= 0).all()
        assert all(len(set(row)) == J for row in np.asarray(expert_TJ).tolist())
        total_T = np.asarray(share_TJ).sum(axis=1)
        assert (np.abs(total_T - 1) < 1e-6).all() == normalize
        assert (total_T < 1 + 1e-6).all()


def test_a_very_sure_router_gives_no_nan() -> None:
    y_TD = 1e4 * make_inputs(20)  # all other probabilities are 0
    is_real_T = jnp.ones(20, jnp.bool)
    share_TJ, _ = route(layer_params(), jnp.asarray(y_TD), is_real_T, experts=EXPERTS)
    np.testing.assert_array_equal(share_TJ, [[1.0, 0.0]] * 20)
