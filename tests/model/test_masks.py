"""Token masks: what they take away, and that a mask of ones takes nothing."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.model.masks import keep_allowed, num_words
from jaxserve.model.sampling import Sampled
from tests.model.reference_sampler import Row, reference_token
from tests.model.sampling_rows import build_rows, run_sample

VOCAB, PADDED = 131, 192
B = 64


def pack(is_allowed_BV: np.ndarray) -> np.ndarray:
    """Returns the words, least bit first."""
    padded = np.zeros((len(is_allowed_BV), PADDED), bool)
    padded[:, : is_allowed_BV.shape[1]] = is_allowed_BV
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def draw(logits_BV: np.ndarray, rows: list[Row], is_allowed_BV: np.ndarray | None) -> Sampled:
    """Returns what `full` draws from real logits [B, VOCAB]; the padding would win."""
    padded_BV = np.full((B, PADDED), 9e9, np.float32)
    padded_BV[:, :VOCAB] = logits_BV
    return run_sample(
        padded_BV,
        build_rows(rows, padded_vocab_size=PADDED),
        np.array([row.output_index for row in rows], np.int32),
        vocab_size=VOCAB,
        variant="full",
        mask_BW=None if is_allowed_BV is None else pack(is_allowed_BV),
    )


ROWS = [
    dataclasses.replace(row, seed=b, output_index=b % 3)
    for b, row in enumerate(
        [
            Row(temperature=0.0),
            Row(),
            Row(temperature=5.0),
            Row(top_k=3),
            Row(top_p=0.7),
            Row(min_p=0.2),
            Row(repetition=1.7, frequency=0.5, prompt=(1, 2), output=(3, 3)),
            Row(bias=((3, 5.0),), bans=(4,), min_tokens=2),
        ]
        * (B // 8)
    )
]


def random_logits(seed: int) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal((B, VOCAB))
    return (2 * normal).astype(np.float32)


def test_bits_allow_their_ids_and_zeros_take_the_rest_away() -> None:
    rng = np.random.default_rng(0)
    logits_BV = rng.standard_normal((5, PADDED)).astype(np.float32)
    is_allowed_BV = rng.random((5, PADDED)) < 0.5
    got = np.asarray(jax.jit(keep_allowed)(logits_BV, pack(is_allowed_BV)))
    np.testing.assert_array_equal(got, np.where(is_allowed_BV, logits_BV, -np.inf))


def test_a_mask_of_ones_changes_no_bit() -> None:
    logits_BV = np.random.default_rng(1).standard_normal((3, PADDED)).astype(np.float32)
    logits_BV[0, :4] = -0.0, 0.0, np.inf, -np.inf
    logits_BV[1, :2] = np.nan, np.float32(1e-42)
    ones_BW = np.full((3, num_words(PADDED)), 0xFFFFFFFF, np.uint32)
    got = np.asarray(jax.jit(keep_allowed)(logits_BV, ones_BW))
    np.testing.assert_array_equal(got.view(np.uint32), logits_BV.view(np.uint32))


def test_a_mask_of_ones_draws_what_no_mask_draws() -> None:
    for seed in range(3):
        logits_BV = random_logits(seed)
        free = draw(logits_BV, ROWS, None)
        masked = draw(logits_BV, ROWS, np.ones((B, VOCAB), bool))
        np.testing.assert_array_equal(masked.token_B, free.token_B)
        np.testing.assert_array_equal(masked.is_finite_B, free.is_finite_B)


def test_a_mask_acts_after_penalties_and_before_the_filters() -> None:
    """As if the ids were not there: top-k, top-p and min-p are shares of what is left."""
    rng = np.random.default_rng(2)
    is_allowed_BV = rng.random((B, VOCAB)) < 0.1
    is_allowed_BV[:, 7] = True
    for seed in range(3):
        logits_BV = random_logits(10 + seed)
        got = draw(logits_BV, ROWS, is_allowed_BV)
        masked_BV = np.where(is_allowed_BV, logits_BV, -np.inf)
        wanted = [reference_token(l_V, row) for l_V, row in zip(masked_BV, ROWS, strict=True)]
        assert np.asarray(got.token_B).tolist() == wanted
        assert np.asarray(got.is_finite_B).all()


def test_a_bias_brings_no_id_back() -> None:
    is_allowed_BV = np.ones((B, VOCAB), bool)
    is_allowed_BV[:, 3] = False
    rows = [dataclasses.replace(row, bias=((3, 1e9),)) for row in ROWS]
    assert 3 not in np.asarray(draw(random_logits(4), rows, is_allowed_BV).token_B)


def test_one_id_left_is_drawn_whatever_its_logit() -> None:
    only_B = np.arange(B) * 2
    is_allowed_BV = np.arange(VOCAB)[None, :] == only_B[:, None]
    logits_BV = random_logits(3)
    logits_BV[np.arange(B), only_B] = -1e30
    sampled = draw(logits_BV, ROWS, is_allowed_BV)
    np.testing.assert_array_equal(sampled.token_B, only_B)
    assert np.asarray(sampled.is_finite_B).all()


def test_the_padding_is_not_drawn_even_where_its_bits_are_set() -> None:
    ones_BW = np.full((B, num_words(PADDED)), 0xFFFFFFFF, np.uint32)
    sampled = run_sample(
        np.full((B, PADDED), -5.0, np.float32),
        build_rows([Row(seed=s, temperature=5.0) for s in range(B)], padded_vocab_size=PADDED),
        np.zeros(B, np.int32),
        vocab_size=VOCAB,
        variant="full",
        mask_BW=ones_BW,
    )
    assert int(sampled.token_B.max()) < VOCAB


def test_a_row_of_which_a_mask_leaves_nothing_is_told_and_no_other() -> None:
    is_allowed_BV = np.ones((B, VOCAB), bool)
    is_allowed_BV[5] = False
    logits_BV = random_logits(5)
    is_allowed_BV[9] = np.arange(VOCAB) == 20
    logits_BV[9, 20] = -np.inf  # the model rules out what the mask leaves
    sampled = draw(logits_BV, ROWS, is_allowed_BV)
    assert np.flatnonzero(~np.asarray(sampled.is_finite_B)).tolist() == [5, 9]
    assert ((np.asarray(sampled.token_B) >= 0) & (np.asarray(sampled.token_B) < VOCAB)).all()


def test_nan_behind_a_mask_is_told() -> None:
    is_allowed_BV = np.ones((B, VOCAB), bool)
    is_allowed_BV[6, 4] = False
    logits_BV = random_logits(6)
    logits_BV[6, 4] = np.nan
    sampled = draw(logits_BV, ROWS, is_allowed_BV)
    assert np.flatnonzero(~np.asarray(sampled.is_finite_B)).tolist() == [6]


def test_a_mask_of_another_width_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"mask_BW has 5 words for 192 ids, expected 6"):
        keep_allowed(jnp.zeros((2, PADDED)), jnp.zeros((2, 5), jnp.uint32))
    with pytest.raises(ShapeError, match="mask_BW: B is 1"):
        keep_allowed(jnp.zeros((2, PADDED)), jnp.zeros((1, 6), jnp.uint32))
