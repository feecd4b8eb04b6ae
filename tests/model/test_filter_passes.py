"""The thresholds that a GPU finds in passes: exactly those of integers summed one by one.

That the tokens are a CPU's is held by every test of the sampler (`sampling_rows.run_sample`).
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model import filter_passes, filters
from tests.model.reference_sampler import Row
from tests.model.sampling_rows import run

WIDE = 8192
SIZES = (64, 192, WIDE)  # parts of one id, of three, of many
OFF = (0, 1.0, 0.0)
# top-k, top-p and min-p: each off and at its ends, and together.
ASKED: list[tuple[int, float, float]] = [
    OFF, (1, 1.0, 0.0), (2, 1.0, 0.0), (63, 1.0, 0.0), (64, 1.0, 0.0), (65, 1.0, 0.0),
    (66, 1.0, 0.0), (700, 1.0, 0.0), (WIDE, 1.0, 0.0), (WIDE + 1, 1.0, 0.0), (-3, 1.0, 0.0),
    (0, 0.0, 0.0), (0, 1e-30, 0.0), (0, 1e-6, 0.0), (0, 0.05, 0.0), (0, 0.6, 0.0),
    (0, 0.999, 0.0), (0, 0.9999999, 0.0), (0, 7.0, 0.0), (0, 1.0, 1e-30), (0, 1.0, 0.3),
    (0, 1.0, 1.0), (40, 0.8, 0.0), (65, 0.99, 0.0), (300, 0.9, 0.01), (0, 0.9, 0.2),
    (1, 0.5, 0.5), (100, 1.0, 0.5), (0, float("nan"), float("nan")),
]  # fmt: skip


def random_scores(vocab_size: int, *, stddev: float, grid: float) -> np.ndarray:
    """Returns a row of scores for each of `ASKED`, the best 0; on a grid, where many are equal."""
    rng = np.random.default_rng(vocab_size)
    logits_BV = stddev * rng.standard_normal((len(ASKED), vocab_size))
    logits_BV = np.round(logits_BV / grid) * grid if grid else logits_BV
    scores_BV: np.ndarray = (logits_BV - logits_BV.max(1, keepdims=True)).astype(np.float32)
    return scores_BV


def find(score_BV: np.ndarray, asked: list[tuple[int, float, float]] = ASKED) -> np.ndarray:
    top_k, top_p, min_p = zip(*asked, strict=True)
    key_B = jax.jit(filter_passes.find_thresholds)(
        jnp.asarray(score_BV),
        top_k_B=jnp.array(top_k, jnp.int32),
        top_p_B=jnp.array(top_p, jnp.float32),
        min_p_B=jnp.array(min_p, jnp.float32),
    )
    return np.asarray(key_B)


def kept_of(score_V: np.ndarray, asked: tuple[int, float, float]) -> np.ndarray:
    """Returns which ids are kept: sorted, and their masses added up as Python's integers."""
    (top_k, top_p, min_p), V = asked, len(score_V)
    key_V = np.asarray(filters.key_of(jnp.asarray(score_V))).astype(np.int64)
    high_V, low_V = map(np.asarray, filters.mass_of(jnp.asarray(score_V), num_tokens=V))
    bits = 31 - V.bit_length()
    mass_V = [(int(high) << bits) + int(low) for high, low in zip(high_V, low_V, strict=True)]
    order = np.argsort(-key_V, kind="stable")
    least = 0
    if 0 < top_k < V:
        least = int(key_V[order[top_k - 1]])
    if top_p < 1.0:
        kept = [int(v) for v in order if key_V[v] >= least]
        digits = [sum(int(digit_V[v]) for v in kept) for digit_V in (high_V, low_V)]
        # The share is a float32, as the sampler's is; all else is exact.
        total = np.float32(digits[0]) * np.float32(1 << bits) + np.float32(digits[1])
        target, mass = int(max(total * np.float32(top_p), np.float32(1))), 0
        for v in kept:
            mass += mass_V[v]
            if mass >= target:
                least = max(least, int(key_V[v]))
                break
    if min_p > 0.0:
        least = max(least, int(filters.key_of(jnp.log(jnp.float32(min_p)))))
    return np.nonzero(key_V >= least)[0]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("grid", [0.0, 0.5], ids=["apart", "equal"])
@pytest.mark.parametrize("stddev", [0.01, 2.5, 30.0], ids=["flat", "middling", "peaked"])
def test_exactly_the_ids_at_the_threshold_and_above_are_kept(
    vocab_size: int, grid: float, stddev: float
) -> None:
    score_BV = random_scores(vocab_size, stddev=stddev, grid=grid)
    score_BV[::3, 5 : vocab_size // 2] = -np.inf
    key_BV, least_B = np.asarray(filters.key_of(jnp.asarray(score_BV))), find(score_BV)
    for b, asked in enumerate(ASKED):
        kept = np.nonzero(key_BV[b] >= least_B[b])[0]
        np.testing.assert_array_equal(kept, kept_of(score_BV[b], asked), err_msg=str(asked))


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_threshold_is_the_key_that_the_search_of_one_row_finds(vocab_size: int) -> None:
    score_BV = random_scores(vocab_size, stddev=2.5, grid=0.0)
    score_BV[7, :] = np.nan
    score_BV[8, 3] = np.nan
    score_BV[9, 1:] = -np.inf
    least_B = find(score_BV, [(top_k, top_p, 0.0) for top_k, top_p, _ in ASKED])
    search = jax.jit(filters.search_threshold)
    for b, (top_k, top_p, _) in enumerate(ASKED):
        top_k = top_k if 0 < top_k < vocab_size else vocab_size
        wanted = search(score_BV[b], top_k=jnp.int32(top_k), top_p=jnp.float32(top_p))
        none = np.asarray(filters.key_of(jnp.float32(-np.inf)))
        assert least_B[b] == max(int(wanted), int(none)), ASKED[b]


def test_scores_that_differ_in_the_last_bit_are_told_apart() -> None:
    near = [np.float32(-0.1)]
    for _ in range(8):
        near.append(np.nextafter(near[-1], np.float32(-1.0)))
    score_BV = np.full((9, 64), -3.0, np.float32)
    score_BV[:, 20:29] = near
    asked = [(top_k, 1.0, 0.0) for top_k in range(1, 10)]
    key_BV, least_B = np.asarray(filters.key_of(jnp.asarray(score_BV))), find(score_BV, asked)
    assert (key_BV >= least_B[:, None]).sum(1).tolist() == list(range(1, 10))


def test_minus_zero_and_zero_tie() -> None:
    score_BV = np.full((2, 64), -3.0, np.float32)
    score_BV[:, 5], score_BV[:, 9] = -0.0, 0.0
    least_B = find(score_BV, [(1, 1.0, 0.0), (0, 1e-9, 0.0)])
    key_BV = np.asarray(filters.key_of(jnp.asarray(score_BV)))
    for b in range(2):
        assert np.nonzero(key_BV[b] >= least_B[b])[0].tolist() == [5, 9]


def test_a_row_is_the_same_whatever_the_others_ask() -> None:
    score_BV = random_scores(192, stddev=2.5, grid=0.5)
    together = find(score_BV)
    for b in range(len(ASKED)):
        others = [OFF] * len(ASKED)
        others[b] = ASKED[b]
        assert find(score_BV, others)[b] == together[b]


@pytest.mark.parametrize("padding", [np.nan, -np.inf], ids=["NaN", "nothing left"])
def test_rows_without_a_best_id_change_no_other(padding: float) -> None:
    """And draw the same in both forms, though it means nothing."""
    logits_BV = np.random.default_rng(3).standard_normal((8, 131)).astype(np.float32)
    rows = [Row(seed=s, top_k=5 * s, top_p=0.9) for s in range(8)]
    wanted = run(logits_BV, rows).token_B
    logits_BV[[2, 5]] = padding
    drawn = run(logits_BV, rows).token_B
    others = [0, 1, 3, 4, 6, 7]
    np.testing.assert_array_equal(np.asarray(drawn)[others], np.asarray(wanted)[others])


def test_a_wide_vocabulary_is_summed_without_overflow() -> None:
    """All ids equal: the sums are as large as they can be."""
    row = Row(top_p=0.5)
    rows = [dataclasses.replace(row, seed=s) for s in range(4)]
    drawn = run(np.zeros((4, 131072), np.float32), rows).token_B
    assert len(set(np.asarray(drawn).tolist())) == 4
