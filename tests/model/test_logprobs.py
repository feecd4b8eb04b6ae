"""Log-probabilities against numpy's in float64; ranks and alternatives against a stable sort."""

import functools

import jax
import numpy as np
import pytest

from jaxserve.errors import ShapeError
from jaxserve.kernels.choice import SamplingImpl
from jaxserve.model.config import LOWEST_LOGPROB
from jaxserve.model.logprobs import Logprobs, find_logprobs

B = 24
SIZES = [11, 64, 131, 8192]  # of one chunk, whole, padded, more chunks than alternatives

_jit = functools.partial(jax.jit, static_argnames=("vocab_size", "num_top", "impl"))
_run = _jit(find_logprobs)


def run(logits_BV: np.ndarray, token_B: np.ndarray, *, num_top: int = 20) -> Logprobs:
    """Pads real logits with what would win, were it looked at. Of what is finite a CPU's form and
    a GPU's find the same, bit for bit."""
    num_rows, vocab_size = logits_BV.shape
    padded_BV = np.full((num_rows, -(-vocab_size // 64) * 64), 9e9, np.float32)
    padded_BV[:, vocab_size:][:, ::2] = np.nan
    padded_BV[:, :vocab_size] = logits_BV

    def find(impl: SamplingImpl) -> Logprobs:
        found: Logprobs = _run(
            padded_BV, token_B.astype(np.int32), vocab_size=vocab_size, num_top=num_top, impl=impl
        )
        on_host: Logprobs = jax.tree.map(np.asarray, found)
        return on_host

    by_candidates, in_passes = find("candidates"), find("passes")
    rows = np.isfinite(logits_BV).all(axis=1)
    for name, leaf in vars(by_candidates).items():
        assert np.isfinite(leaf).all(), name
        real = (rows, slice(min(num_top, vocab_size))) if leaf.ndim == 2 else rows
        np.testing.assert_array_equal(getattr(in_passes, name)[real], leaf[real], err_msg=name)
    return in_passes


def log_softmax(logits_BV: np.ndarray) -> np.ndarray:
    wide_BV = logits_BV.astype(np.float64)
    shifted_BV = wide_BV - wide_BV.max(axis=1, keepdims=True)
    result_BV: np.ndarray = shifted_BV - np.log(np.exp(shifted_BV).sum(axis=1, keepdims=True))
    return result_BV


def random_logits(vocab_size: int, *, stddev: float = 3.0, grid: float = 0.0) -> np.ndarray:
    """Returns logits; on a grid, where many are equal."""
    logits_BV = stddev * np.random.default_rng(vocab_size).standard_normal((B, vocab_size))
    return (np.round(logits_BV / grid) * grid if grid else logits_BV).astype(np.float32)


def random_tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab_size, B)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("stddev", [0.01, 3.0, 50.0])
def test_a_log_probability_is_that_of_float64(vocab_size: int, stddev: float) -> None:
    logits_BV, token_B = random_logits(vocab_size, stddev=stddev), random_tokens(vocab_size)
    found, wanted_BV = run(logits_BV, token_B), log_softmax(logits_BV)
    assert found.logprob_B.dtype == np.float32
    np.testing.assert_allclose(
        found.logprob_B, wanted_BV[np.arange(B), token_B], rtol=2e-6, atol=2e-6
    )
    num_real = min(20, vocab_size)
    wanted_BJ = -np.sort(-wanted_BV, axis=1)[:, :num_real]
    np.testing.assert_allclose(found.top_logprobs_BJ[:, :num_real], wanted_BJ, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("grid", [0.0, 0.5, 1000.0], ids=["apart", "some_equal", "all_equal"])
def test_equal_ids_stand_in_the_order_of_the_ids(vocab_size: int, grid: float) -> None:
    logits_BV, token_B = random_logits(vocab_size, grid=grid), random_tokens(vocab_size)
    found = run(logits_BV, token_B)
    order_BV = np.argsort(-logits_BV, axis=1, kind="stable")
    num_real = min(20, vocab_size)
    np.testing.assert_array_equal(found.top_ids_BJ[:, :num_real], order_BV[:, :num_real])
    rank_BV = np.argsort(order_BV, axis=1) + 1
    np.testing.assert_array_equal(found.rank_B, rank_BV[np.arange(B), token_B])


def test_a_token_of_the_list_has_the_same_number_there() -> None:
    logits_BV = random_logits(8192)
    for place in range(5):
        token_B = np.argsort(-logits_BV, axis=1, kind="stable")[:, place]
        found = run(logits_BV, token_B)
        np.testing.assert_array_equal(found.rank_B, place + 1)
        np.testing.assert_array_equal(found.top_ids_BJ[:, place], token_B)
        np.testing.assert_array_equal(found.top_logprobs_BJ[:, place], found.logprob_B)  # bitwise


def test_minus_zero_and_zero_are_equal() -> None:
    logits_BV = np.full((2, 131), -1.0, np.float32)
    logits_BV[0, [3, 9]] = -0.0, 0.0
    logits_BV[1, [3, 9]] = 0.0, -0.0
    found = run(logits_BV, np.array([9, 9]))
    assert found.top_ids_BJ[:, :3].tolist() == [[3, 9, 0]] * 2
    assert found.rank_B.tolist() == [2, 2]


def test_the_padding_has_no_share() -> None:
    """All real logits lie far below the 0 that a padding row of the head gives."""
    logits_BV = np.full((131, 131), -5.0, np.float32)
    found = run(logits_BV, np.arange(131), num_top=64)
    assert np.exp(found.logprob_B.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert found.top_ids_BJ.max() < 131
    assert found.rank_B.tolist() == list(range(1, 132))


def test_an_impossible_id_gets_the_lowest_number_and_the_others_stay() -> None:
    logits_BV = random_logits(131)
    logits_BV[:, 5:] = -np.inf
    wanted_BV = log_softmax(logits_BV[:, :5])
    found = run(logits_BV, np.full(B, 8), num_top=7)
    np.testing.assert_array_equal(found.logprob_B, LOWEST_LOGPROB)
    np.testing.assert_array_equal(
        found.rank_B, 5 + 4
    )  # 5, 6 and 7 are as impossible, and come first
    np.testing.assert_array_equal(found.top_ids_BJ[:, 5:], [[5, 6]] * B)
    np.testing.assert_array_equal(found.top_logprobs_BJ[:, 5:], LOWEST_LOGPROB)
    np.testing.assert_allclose(
        found.top_logprobs_BJ[:, :5], -np.sort(-wanted_BV, axis=1), atol=1e-5
    )


def test_nothing_lies_below_the_lowest_number() -> None:
    logits_BV = np.zeros((2, 131), np.float32)
    logits_BV[:, 1] = -9000.0, -20000.0
    found = run(logits_BV, np.array([1, 1]))
    assert found.logprob_B[0] == pytest.approx(-9000 - np.log(130), abs=1e-2)
    assert found.logprob_B[1] == LOWEST_LOGPROB
    assert found.rank_B.tolist() == [131, 131]


def test_a_row_that_is_not_finite_is_finite_here_and_spoils_no_other() -> None:
    logits_BV, token_B = random_logits(131), random_tokens(131)
    wanted = run(logits_BV, token_B)
    logits_BV[3, 7] = np.nan
    logits_BV[4, 7] = np.inf
    logits_BV[5] = -np.inf
    found = run(logits_BV, token_B)
    others = np.setdiff1d(np.arange(B), [3, 4, 5])
    for name, leaf in vars(found).items():
        assert np.isfinite(leaf).all(), name
        np.testing.assert_array_equal(leaf[others], getattr(wanted, name)[others])
    assert ((found.rank_B >= 1) & (found.rank_B <= 131)).all()
    assert (found.logprob_B[3:6] == LOWEST_LOGPROB).all()


@pytest.mark.parametrize("num_top", [0, 1, 64])
def test_any_number_of_alternatives_comes_back(num_top: int) -> None:
    logits_BV, token_B = random_logits(8192, grid=0.5), random_tokens(8192)
    found = run(logits_BV, token_B, num_top=num_top)
    wanted_BJ = np.argsort(-logits_BV, axis=1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(found.top_ids_BJ, wanted_BJ)
    assert found.top_logprobs_BJ.shape == (B, num_top)


def test_a_row_depends_on_no_other() -> None:
    logits_BV, token_B = random_logits(131), random_tokens(131)
    found = run(logits_BV, token_B)
    order = np.random.default_rng(1).permutation(B)
    moved = run(logits_BV[order], token_B[order])
    alone = run(logits_BV[[4, 9]], token_B[[4, 9]])
    for name, leaf in vars(found).items():
        np.testing.assert_array_equal(getattr(moved, name), leaf[order], err_msg=name)
        # Of another number of rows a sum may be taken in another order.
        np.testing.assert_allclose(getattr(alone, name), leaf[[4, 9]], rtol=1e-6, err_msg=name)


def test_odd_shapes_are_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"token_B: B is 2 in \(2,\), expected 3"):
        run(np.zeros((3, 11), np.float32), np.zeros(2))
