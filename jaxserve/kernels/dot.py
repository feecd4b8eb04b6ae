"""Matrix products: operands of one dtype in, float32 out."""

import math
from typing import Final, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

MatmulImpl = Literal["xla", "native"]

# Rows up to which the native product is used. Measured on two Zen 4 cores: at 32 rows it takes half
# of XLA's time, at 64 as long.
MAX_NATIVE_ROWS: Final = 64
NATIVE_COLUMNS: Final = 32  # the native product's results are a multiple of it


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


def project(x_TD: jax.Array, *weights: jax.Array, impl: MatmulImpl) -> list[jax.Array]:
    """Returns the float32 products of x with some weights ``[D, ...]``, each ``[T, ...]``.

    Args:
      impl: native is for bfloat16 and few rows, and takes what `find_matmul_problem` lets through;
        beyond `MAX_NATIVE_ROWS` it is xla all the same.
    """
    T, D = x_TD.shape
    if impl == "xla" or T > MAX_NATIVE_ROWS:
        return [dot("TD,D...->T...", x_TD, weight) for weight in weights]
    flat = [weight.reshape(D, -1) for weight in weights]
    results = _call_native(x_TD, flat, num_columns=[weight.shape[1] for weight in flat])
    return [
        result_TF.reshape(T, *weight.shape[1:])
        for result_TF, weight in zip(results, weights, strict=True)
    ]


def project_transposed(x_TD: jax.Array, weight_VD: jax.Array, *, impl: MatmulImpl) -> jax.Array:
    """Returns ``[T, V]`` as `project` does, of a weight with its columns first."""
    if impl == "xla" or x_TD.shape[0] > MAX_NATIVE_ROWS:
        return dot("TD,VD->TV", x_TD, weight_VD)
    columns = [weight_VD.shape[0]]
    return _call_native(x_TD, [weight_VD], num_columns=columns, is_transposed=True)[0]


def find_matmul_problem(shape: tuple[int, ...], *, is_transposed: bool = False) -> str | None:
    """Returns why a weight's product cannot be computed natively; see `native/dot.cc`."""
    rows, columns = shape[0], math.prod(shape[1:])
    if is_transposed:
        rows, columns = columns, rows
    row_multiple = NATIVE_COLUMNS if is_transposed else 2
    if columns % NATIVE_COLUMNS or rows % row_multiple:
        return (
            f"a weight is {rows} by {columns}, not a multiple of {row_multiple} by {NATIVE_COLUMNS}"
        )
    return None


def _call_native(
    x_TD: jax.Array,
    weights: list[jax.Array],
    *,
    num_columns: list[int],
    is_transposed: bool = False,
) -> list[jax.Array]:
    results = [jax.ShapeDtypeStruct((x_TD.shape[0], F), jnp.float32) for F in num_columns]
    call = jax.ffi.ffi_call("jaxserve_dot", results)
    return list(call(x_TD, *weights, is_transposed=is_transposed))


def wider_dtype(left: jax.Array, right: jax.Array) -> np.dtype:
    """Returns the dtype of the two that loses nothing: float32 over bfloat16."""
    return max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
