"""One layer's KV pool: numbers as they are, or in one byte each with scales beside them."""

from collections.abc import Mapping
from typing import Final, Literal

import flax.struct
import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

QuantizedDtypeName = Literal["int8", "float8_e4m3fn"]

# What the largest of a head's numbers is written as; beyond 448 float8_e4m3fn has NaN alone.
LARGEST: Final[Mapping[str, float]] = {"int8": 127.0, "float8_e4m3fn": 448.0}
# A scale is no less: 0 / 0 would be NaN, and numbers below this are taken for 0 by some processors.
_LEAST_SCALE: Final = float(np.finfo(np.float32).tiny)
_FLOAT8: Final = np.dtype(jnp.float8_e4m3fn)


@flax.struct.dataclass(kw_only=True)
class QuantizedPool:
    """Numbers of one byte: each stands for itself times the scale of its token, head, and K or V.

    Attributes:
      bytes_C2KRH: K at [:, 0], V at [:, 1]; int8 numbers, or uint8, the bits of float8_e4m3fn. XLA
        has a CPU compute nothing in float8: to write a row of it, it would widen the whole pool.
      scales_C2KR: float32.
    """

    bytes_C2KRH: jax.Array
    scales_C2KR: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bytes_C2KRH.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers; one of `LARGEST`."""
        return _FLOAT8 if self.bytes_C2KRH.dtype == np.uint8 else self.bytes_C2KRH.dtype


Pool = jax.Array | QuantizedPool
"""``kv_C2KRH`` of one layer. A number of pages of it, ``W2KRH``, has the same two forms."""


def empty_pool(shape: tuple[int, ...], dtype: str) -> Pool:
    """Returns a pool of zeros, with scales where the dtype has them."""
    if dtype not in LARGEST:
        return jnp.zeros(shape, dtype)
    return QuantizedPool(
        bytes_C2KRH=jnp.zeros(shape, np.uint8 if dtype == _FLOAT8.name else np.int8),
        scales_C2KR=jnp.zeros(shape[:-1], jnp.float32),
    )


def split_pool(kv_C2KRH: Pool) -> tuple[jax.Array, jax.Array | None]:
    """Returns a pool's numbers, or the bytes of them and their scales."""
    if isinstance(kv_C2KRH, QuantizedPool):
        return kv_C2KRH.bytes_C2KRH, kv_C2KRH.scales_C2KR
    return kv_C2KRH, None


def as_numbers(stored: jax.Array) -> jax.Array:
    """Returns the numbers of some of what `split_pool` gives."""
    is_float8 = stored.dtype == np.uint8
    return lax.bitcast_convert_type(stored, _FLOAT8) if is_float8 else stored


def quantize(heads: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns a `QuantizedPool`'s bytes, and the float32 scale of each head.

    The scale makes the head's largest number the largest there is; the rest are rounded to the
    nearest (of two, the even one). A head depends on nothing but itself. One of zeros stays zeros.
    One with NaN or infinity has the scale NaN: it stays a fault of its own sequence.

    Args:
      heads: float32 ``[..., H]``.
      dtype: of the numbers; one of `LARGEST`.
    """
    largest = LARGEST[dtype.name]
    scales = jnp.maximum(jnp.abs(heads).max(-1) / largest, _LEAST_SCALE)
    # Asked for by itself: XLA's maximum over an axis passes over a NaN on a CPU (jax 0.12.0.1).
    scales = jnp.where(jnp.isfinite(heads).all(-1), scales, jnp.nan)
    # By a scale that was rounded down a quotient is above the largest; of that a cast makes NaN.
    numbers = jnp.clip(heads / scales[..., None], -largest, largest)
    if dtype == _FLOAT8:
        return lax.bitcast_convert_type(numbers.astype(dtype), jnp.uint8), scales
    return jnp.round(numbers).astype(dtype), scales
