"""The native product, against the same bfloat16 numbers multiplied in float64."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.dot import (
    PANEL,
    PackedWeight,
    find_matmul_problem,
    project,
    project_onto,
    project_silu,
    project_transposed,
    take_columns,
)
from jaxserve.model.packing import ProductSize, pack

pytestmark = pytest.mark.native

MAX_ROWS = 130
ROWS = (1, 2, 3, 4, 5, 11, 12, 13, 24, 25, 31, 47, 63, 64, 129)
# Of a sum over the sum of its magnitudes: K roundings of float32 that mostly cancel.
TOLERANCE = 2e-6

_project = jax.jit(project, static_argnames="impl")
_project_onto = jax.jit(project_onto)
_project_silu = jax.jit(project_silu)
_project_transposed = jax.jit(project_transposed, static_argnames="impl")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)


def multiply(x_MK: np.ndarray, *weights_KN: np.ndarray) -> list[np.ndarray]:
    packed = [packed_of(w_KN) for w_KN in weights_KN]
    return [np.asarray(y_MN) for y_MN in _project(x_MK, *packed, impl="native")]


def multiply_transposed(x_MK: np.ndarray, w_NK: np.ndarray) -> np.ndarray:
    N, K = w_NK.shape
    packed = PackedWeight(panels=jnp.asarray(pack(w_NK, ProductSize(K, N, is_transposed=True))))
    return np.asarray(_project_transposed(x_MK, packed, impl="native"))


def packed_of(w_KN: np.ndarray) -> PackedWeight:
    return PackedWeight(panels=jnp.asarray(pack(w_KN, ProductSize(*w_KN.shape))))


def largest_error(y_MN: np.ndarray, x_MK: np.ndarray, w_KN: np.ndarray) -> float:
    x, w = x_MK.astype(np.float64), w_KN.astype(np.float64)
    return float((np.abs(y_MN - x @ w) / (np.abs(x) @ np.abs(w) + 1e-30)).max())


def random_cases(count: int) -> Sequence[tuple[int, int, int]]:
    rng = np.random.default_rng(7)
    return [
        (
            int(rng.integers(1, MAX_ROWS)),
            2 * int(rng.integers(1, 400)),
            32 * int(rng.integers(1, 30)),
        )
        for _ in range(count)
    ]


# The smallest sizes, one panel for several threads, and more panels than pieces of work.
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


def test_a_weight_of_several_dimensions_is_packed_as_its_matrix() -> None:
    w_DNH, w_NHD = normal(6, 64, 3, 32), normal(7, 3, 32, 64)
    np.testing.assert_array_equal(
        pack(w_DNH, ProductSize(64, 96)), pack(w_DNH.reshape(64, 96), ProductSize(64, 96))
    )
    np.testing.assert_array_equal(
        pack(w_NHD, ProductSize(96, 64)), pack(w_NHD.reshape(96, 64), ProductSize(96, 64))
    )


def test_a_packed_column_comes_back_as_it_was() -> None:
    w_NK = normal(8, 96, 34)
    packed = PackedWeight(panels=jnp.asarray(pack(w_NK, ProductSize(34, 96, is_transposed=True))))
    index = np.array([0, 31, 32, 95, 7, 7, 96, -1], np.int32)
    wanted = w_NK[np.clip(index, 0, 95)]
    np.testing.assert_array_equal(np.asarray(take_columns(packed, jnp.asarray(index))), wanted)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_does_not_depend_on_how_many_there_are_nor_on_the_others(is_transposed: bool) -> None:
    K, N = 544, 352
    x_MK, w_KN = normal(8, MAX_ROWS, K), normal(9, K, N)
    w_NK = np.ascontiguousarray(w_KN.T)

    def run(rows_MK: np.ndarray) -> np.ndarray:
        return multiply_transposed(rows_MK, w_NK) if is_transposed else multiply(rows_MK, w_KN)[0]

    wanted_MN = run(x_MK)
    for M in ROWS:
        np.testing.assert_array_equal(run(x_MK[:M]), wanted_MN[:M])
        np.testing.assert_array_equal(run(x_MK[-M:]), wanted_MN[-M:])
    others_MK = normal(10, MAX_ROWS, K)
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


@pytest.mark.parametrize("case", [*EDGES, *random_cases(6)], ids=str)
def test_a_product_that_is_added_is_bit_for_bit_the_product_added(
    case: tuple[int, int, int],
) -> None:
    M, K, N = case
    x_MK, w_KN = normal(13, M, K), normal(14, K, N)
    before_MN = np.random.default_rng(15).standard_normal((M, N)).astype(np.float32)
    given_MN = jnp.asarray(before_MN)
    y_MN = np.asarray(_project_onto(given_MN, x_MK, packed_of(w_KN)))
    np.testing.assert_array_equal(y_MN, before_MN + multiply(x_MK, w_KN)[0])
    np.testing.assert_array_equal(np.asarray(given_MN), before_MN)  # whose place it is not


def gated(x_MK: np.ndarray, gate_KN: np.ndarray, up_KN: np.ndarray) -> np.ndarray:
    return np.asarray(_project_silu(x_MK, packed_of(gate_KN), packed_of(up_KN)))


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


@pytest.mark.parametrize("case", [*EDGES, *random_cases(6)], ids=str)
def test_a_gated_product_is_right_and_rounded_once(case: tuple[int, int, int]) -> None:
    M, K, N = case
    x_MK, gate_KN, up_KN = normal(21, M, K), normal(22, K, N), normal(23, K, N)
    y_MN = gated(x_MK, gate_KN, up_KN)
    assert y_MN.dtype == jnp.bfloat16
    gate_MN, up_MN = multiply(x_MK, gate_KN, up_KN)
    wanted_MN = silu(gate_MN.astype(np.float64)) * up_MN.astype(np.float64)
    # half a unit of the last of bfloat16's eight bits, and what the exponential is off by
    np.testing.assert_allclose(y_MN.astype(np.float64), wanted_MN, rtol=1.001 * 2**-8, atol=1e-35)


def test_a_gated_row_does_not_depend_on_how_many_there_are() -> None:
    x_MK, gate_KN, up_KN = normal(24, MAX_ROWS, 544), normal(25, 544, 352), normal(26, 544, 352)
    wanted_MN = gated(x_MK, gate_KN, up_KN)
    for M in ROWS:
        np.testing.assert_array_equal(gated(x_MK[:M], gate_KN, up_KN), wanted_MN[:M])
        np.testing.assert_array_equal(gated(x_MK[-M:], gate_KN, up_KN), wanted_MN[-M:])


def test_a_gate_of_any_size_is_right() -> None:
    gate_N = np.array([0.0, -0.0, 1e-3, -1e-3, 5.0, -5.0, 80.0, -80.0, 1e4, -1e4, 1e38, -1e38])
    gate_KN, up_KN = np.zeros((2, 32)), np.zeros((2, 32))
    gate_KN[0, : len(gate_N)] = gate_N
    up_KN[0] = 1.0
    x_MK = np.array([[1.0, 0.0]]).astype(jnp.bfloat16)
    gate_KN, up_KN = gate_KN.astype(jnp.bfloat16), up_KN.astype(jnp.bfloat16)
    wanted_N = silu(gate_KN[0].astype(np.float64))
    y_N = gated(x_MK, gate_KN, up_KN)[0].astype(np.float64)
    np.testing.assert_allclose(y_N, wanted_N, rtol=1.001 * 2**-8, atol=1e-35)
    x_MK[0, 0] = np.nan
    assert np.isnan(gated(x_MK, gate_KN, up_KN).astype(np.float32)).all()


def test_sizes_that_do_not_fit_are_found_and_refused() -> None:
    assert find_matmul_problem(64, PANEL) is None
    assert find_matmul_problem(63, 32) == "a weight is 63 by 32, not a multiple of 2 by 32"
    assert find_matmul_problem(2, 33) == "a weight is 2 by 33, not a multiple of 2 by 32"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a packed weight and its result do not"):
        _project(normal(15, 2, 62), packed_of(normal(16, 64, 32)), impl="native")
    with pytest.raises(jax.errors.JaxRuntimeError, match="two packed weights and the result do"):
        gated(normal(15, 2, 64), normal(16, 64, 32), normal(16, 64, 64))


def test_a_weight_of_the_other_form_is_an_error() -> None:
    x_MK, w_KN = normal(17, 2, 64), normal(18, 64, 32)
    with pytest.raises(AssertionError, match="wants packed weights"):
        _project(x_MK, w_KN, impl="native")
    with pytest.raises(AssertionError, match="for the native product alone"):
        _project(x_MK, packed_of(w_KN), impl="xla")
