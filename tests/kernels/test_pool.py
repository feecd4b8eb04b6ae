"""What is rounded to one byte: by how much, each head by itself, and never into NaN (C62)."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.pool import LARGEST, QuantizedPool, as_numbers, empty_pool, quantize
from tests.kernels.ragged import QUANTIZED, round_heads

HEADS = np.random.default_rng(0).standard_normal((50, 2, 3, 64)).astype(np.float32)
# Rounding: half a step of the scale, or half of float8's last of three bits and half of its least.
HALF_STEP = {"int8": (0.5, 0.0), "float8_e4m3fn": (2.0**-10, 2.0**-4)}

run = jax.jit(quantize, static_argnames="dtype")


def rounded(heads: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    stored, scales = run(heads, jnp.dtype(dtype))
    assert (stored.dtype, scales.dtype) == (np.int8 if dtype == "int8" else np.uint8, np.float32)
    return np.asarray(as_numbers(stored)), np.asarray(scales)


@pytest.mark.parametrize("factor", [1.0, 200.0, 1e-30, 1e36])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_number_is_the_nearest_there_is(dtype: str, factor: float) -> None:
    heads = HEADS * np.float32(factor)
    values, scales = rounded(heads, dtype)
    numbers = values.astype(np.float64)
    top = np.abs(heads).max(-1)
    np.testing.assert_allclose(scales, top / LARGEST[dtype], rtol=1e-6)
    np.testing.assert_array_equal(np.abs(numbers).max(-1), LARGEST[dtype])
    exact = heads.astype(np.float64) / scales[..., None]
    least, share = HALF_STEP[dtype]
    assert (np.abs(numbers - exact) <= 1.000001 * np.maximum(least, share * np.abs(exact))).all()
    # in float64 a quotient at half a step may fall to the other side
    assert np.mean(values != round_heads(heads, dtype)[0]) < 1e-3


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zeros_and_the_smallest_numbers_stay_what_they_are(dtype: str) -> None:
    smallest = np.float32(1.2e-38)  # normal numbers end there
    heads = np.stack([np.zeros(8), np.full(8, smallest), np.full(8, 1e-45)]).astype(np.float32)
    values, scales = rounded(heads, dtype)
    back = values.astype(np.float64) * scales[:, None]
    assert (scales > 0).all()
    assert (back[0] == 0).all()
    assert np.isfinite(back).all()
    assert (np.abs(back - heads) <= 1.2e-38).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_the_largest_number_of_a_head_is_never_beyond_the_dtypes(dtype: str) -> None:
    """The quotient by a rounded scale may be above the largest; beyond 464 it would be NaN."""
    tops = np.abs(np.random.default_rng(1).standard_normal((200_000, 1))).astype(np.float32)
    values, _ = rounded(np.concatenate([tops, -tops], axis=1), dtype)
    assert (values.astype(np.float32) == [LARGEST[dtype], -LARGEST[dtype]]).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_head_depends_on_nothing_but_itself(dtype: str) -> None:
    together, scales = rounded(HEADS, dtype)
    alone, alone_scales = rounded(HEADS[7:8, 1:2, 2:3], dtype)
    assert alone.tobytes() == together[7:8, 1:2, 2:3].tobytes()
    assert alone_scales.tobytes() == scales[7:8, 1:2, 2:3].tobytes()


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_what_is_no_number_stays_a_fault_of_its_head_alone(dtype: str, fault: float) -> None:
    heads = HEADS.copy()
    heads[3, 1, 0, 5] = fault
    values, scales = rounded(heads, dtype)
    with np.errstate(invalid="ignore"):
        back = values.astype(np.float64) * scales[..., None]
    is_faulty = ~np.isfinite(back).all(-1)
    assert np.argwhere(is_faulty).tolist() == [[3, 1, 0]]


def test_a_pool_has_scales_where_its_dtype_has_them() -> None:
    shape = (5, 2, 3, 4, 8)
    for dtype in ("float32", "bfloat16"):
        assert isinstance(empty_pool(shape, dtype), jax.Array)
    for dtype in QUANTIZED:
        pool = empty_pool(shape, dtype)
        assert isinstance(pool, QuantizedPool)
        assert (pool.shape, pool.dtype) == (shape, jnp.dtype(dtype))
        assert pool.bytes_C2KRH.dtype.itemsize == 1
        assert pool.scales_C2KR.shape == shape[:-1]
        assert pool.scales_C2KR.dtype == np.float32
