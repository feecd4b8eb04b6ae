"""What stands between a layer's products, in C++ for a CPU (`kernels/native`), token by token.

XLA makes a program of its own of each of these few lines, in every layer, on one thread: together
they took longer to compile than all else, and in the step of a chunk a fourteenth of the time.
"""

import jax
import numpy as np
from jax import numpy as jnp


def norm(x_TD: jax.Array, weight_D: jax.Array, *, eps: float) -> jax.Array:
    """Returns bfloat16 x / sqrt(mean(x²) + eps) * weight, computed in float32."""
    result = jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16)
    y_TD: jax.Array = jax.ffi.ffi_call("jaxserve_norm", result)(x_TD, weight_D, eps=np.float32(eps))
    return y_TD


def rotate_and_write(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv_C2KRH: jax.Array,
    *,
    pages_T: jax.Array,
    rows_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns q turned, in the pool's dtype, and the pool with K turned and V in their rows.

    Args:
      q_TNH, k_TKH, v_TKH: float32.
      rope: cosines and sines, float32 ``[T, pairs that turn]``; see `model.rope.rotate`.
      kv_C2KRH: bfloat16 or float32; written where it is.
      pages_T, rows_T: where each token's K and V go; a page past the end takes nothing.
    """
    results = (
        jax.ShapeDtypeStruct(q_TNH.shape, kv_C2KRH.dtype),
        jax.ShapeDtypeStruct(kv_C2KRH.shape, kv_C2KRH.dtype),
    )
    call = jax.ffi.ffi_call("jaxserve_rotate_write", results, input_output_aliases={7: 1})
    turned_TNH, new_kv_C2KRH = call(q_TNH, k_TKH, v_TKH, *rope, pages_T, rows_T, kv_C2KRH)
    return turned_TNH, new_kv_C2KRH
