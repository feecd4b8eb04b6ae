"""The native product, against the same bfloat16 numbers multiplied in float64."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.dot import (
    MAX_NATIVE_ROWS,
    NATIVE_COLUMNS,
    find_matmul_problem,
    project,
    project_transposed,
)

pytestmark = pytest.mark.native

ROWS = (1, 2, 3, 4, 5, 11, 12, 13, 24, 25, 31, 47, 63, 64)
# Of a sum over the sum of its magnitudes: K roundings of float32 that mostly cancel.
TOLERANCE = 2e-6

_project = jax.jit(project, static_argnames="impl")
_project_transposed = jax.jit(project_transposed, static_argnames="impl")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)


def multiply(x_MK: np.ndarray, *weights_KN: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(y_MN) for y_MN in _project(x_MK, *weights_KN, impl="native")]


def multiply_transposed(x_MK: np.ndarray, w_NK: np.ndarray) -> np.ndarray:
    return np.asarray(_project_transposed(x_MK, w_NK, impl="native"))


def largest_error(y_MN: np.ndarray, x_MK: np.ndarray, w_KN: np.ndarray) -> float:
    x, w = x_MK.astype(np.float64), w_KN.astype(np.float64)
    return float((np.abs(y_MN - x @ w) / (np.abs(x) @ np.abs(w) + 1e-30)).max())


def random_cases(count: int) -> Sequence[tuple[int, int, int]]:
    rng = np.random.default_rng(7)
    return [
        (int(rng.integers(1, 65)), 2 * int(rng.integers(1, 400)), 32 * int(rng.integers(1, 30)))
        for _ in range(count)
    ]


# Around a block of 256 by 256, the smallest sizes, and a last block that is not full.
EDGES = [
    (M, K, N)
    for M in ROWS[::3]
    for K, N in ((2, 32), (254, 256), (256, 288), (258, 224), (576, 544))
]


@pytest.mark.parametrize("case", [*EDGES, *random_cases(12)], ids=str)
def test_a_product_is_right(case: tuple[int, int, int]) -> None:
    M, K, N = case
    x_MK, w_KN = normal(1, M, K), normal(2, K, N)
    (y_MN,) = multiply(x_MK, w_KN)
    assert y_MN.dtype == np.float32
    assert largest_error(y_MN, x_MK, w_KN) < TOLERANCE


@pytest.mark.parametrize("M", ROWS)
def test_a_transposed_product_is_bit_for_bit_that_of_the_other_layout(M: int) -> None:
    for K, N in ((32, 32), (288, 96), (544, 800)):
        x_MK, w_KN = normal(3, M, K), normal(4, K, N)
        y_MN = multiply_transposed(x_MK, np.ascontiguousarray(w_KN.T))
        assert largest_error(y_MN, x_MK, w_KN) < TOLERANCE
        np.testing.assert_array_equal(y_MN, multiply(x_MK, w_KN)[0])


def test_several_weights_in_one_call_are_each_right() -> None:
    x_MK = normal(5, 8, 96)
    weights = [normal(seed, 96, N) for seed, N in enumerate((32, 576, 192))]
    for y_MN, w_KN in zip(multiply(x_MK, *weights), weights, strict=True):
        np.testing.assert_array_equal(y_MN, multiply(x_MK, w_KN)[0])
        assert largest_error(y_MN, x_MK, w_KN) < TOLERANCE


def test_a_weight_with_more_dimensions_gives_them_back() -> None:
    x_MK, w_KNH = normal(6, 3, 64), normal(7, 64, 3, 32)
    (y_MNH,) = multiply(x_MK, w_KNH)
    assert y_MNH.shape == (3, 3, 32)
    np.testing.assert_array_equal(y_MNH.reshape(3, 96), multiply(x_MK, w_KNH.reshape(64, 96))[0])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_does_not_depend_on_how_many_there_are_nor_on_the_others(is_transposed: bool) -> None:
    K, N = 544, 352
    x_MK, w_KN = normal(8, MAX_NATIVE_ROWS, K), normal(9, K, N)
    w_NK = np.ascontiguousarray(w_KN.T)

    def run(rows_MK: np.ndarray) -> np.ndarray:
        return multiply_transposed(rows_MK, w_NK) if is_transposed else multiply(rows_MK, w_KN)[0]

    wanted_MN = run(x_MK)
    for M in ROWS:
        np.testing.assert_array_equal(run(x_MK[:M]), wanted_MN[:M])
        np.testing.assert_array_equal(run(x_MK[-M:]), wanted_MN[-M:])
    others_MK = normal(10, MAX_NATIVE_ROWS, K)
    others_MK[17] = x_MK[17]
    np.testing.assert_array_equal(run(others_MK)[17], wanted_MN[17])


@pytest.mark.parametrize("M", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad: float, M: int) -> None:
    x_MK, w_KN = normal(11, M, 64), normal(12, 64, 96)
    (wanted_MN,) = multiply(x_MK, w_KN)
    x_MK[M - 1, 5] = bad
    (y_MN,) = multiply(x_MK, w_KN)
    np.testing.assert_array_equal(y_MN[: M - 1], wanted_MN[: M - 1])
    expected_N = bad * w_KN[5].astype(np.float32)
    np.testing.assert_array_equal(y_MN[M - 1], expected_N)


@pytest.mark.parametrize("M", [1, 4])
def test_large_numbers_are_summed_and_overflow_to_infinity(M: int) -> None:
    x_MK, w_KN = np.full((M, 4), 2.0**60, jnp.bfloat16), np.full((4, 32), 2.0**60, jnp.bfloat16)
    np.testing.assert_array_equal(multiply(x_MK, w_KN)[0], np.float32(2.0**122))
    w_KN[:, :] = 2.0**100
    np.testing.assert_array_equal(multiply(x_MK, w_KN)[0], np.float32(np.inf))


def test_more_rows_are_left_to_xla() -> None:
    x_MK, w_KN = normal(13, MAX_NATIVE_ROWS + 1, 64), normal(14, 64, 96)
    is_native = ["jaxserve_dot" in _project.lower(x_MK[:M], w_KN, impl="native").as_text()
                 for M in (MAX_NATIVE_ROWS, MAX_NATIVE_ROWS + 1)]  # fmt: skip
    assert is_native == [True, False]
    assert largest_error(multiply(x_MK, w_KN)[0], x_MK, w_KN) < TOLERANCE


def test_sizes_that_do_not_fit_are_found_and_refused() -> None:
    assert find_matmul_problem((64, 3, NATIVE_COLUMNS)) is None
    assert find_matmul_problem((63, 32)) == "a weight is 63 by 32, not a multiple of 2 by 32"
    assert find_matmul_problem((2, 33)) == "a weight is 2 by 33, not a multiple of 2 by 32"
    assert find_matmul_problem((96, 48), is_transposed=True) == (
        "a weight is 48 by 96, not a multiple of 32 by 32"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="a size is no multiple"):
        multiply(normal(15, 2, 64), normal(16, 64, 40))
