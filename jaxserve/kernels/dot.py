"""The one matrix product: operands of one dtype in, float32 out."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp


def dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the float32 einsum of two arrays of the same dtype, summed in float32.

    float32 operands are multiplied as float32: without HIGHEST a GPU would round them to TF32's
    ten bits.
    """
    is_float32 = left.dtype == jnp.float32
    return jnp.einsum(
        subscripts,
        left,
        right,
        precision=lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def wider_dtype(left: jax.Array, right: jax.Array) -> np.dtype:
    """Returns the dtype of the two that loses nothing: float32 over bfloat16."""
    return max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
