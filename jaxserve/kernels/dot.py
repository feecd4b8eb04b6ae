"""Matrix products: operands of one dtype in, float32 out."""

from typing import Final, Literal

import flax.struct
import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.kernels.pool import Pool

MatmulImpl = Literal["xla", "native"]

PANEL: Final = 32  # columns of a packed weight that lie together
PAIR: Final = 2  # rows of it that are multiplied at once


@flax.struct.dataclass(kw_only=True)
class PackedWeight:
    """A bfloat16 weight as the native product reads it: from end to end (`native/panels.h`).

    Attributes:
      panels: ``[columns / 32, rows / 2, 32, 2]``, as `model.packing.pack` has it.
    """

    panels: jax.Array

    @property
    def dtype(self) -> np.dtype:
        return self.panels.dtype


Weight = jax.Array | PackedWeight


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


def project(x_TD: jax.Array, *weights: Weight, impl: MatmulImpl) -> list[jax.Array]:
    """Returns the float32 products of x with some weights, each ``[T, columns]``.

    Args:
      weights: for native packed, and in one call of it; for xla ``[D, ...]``, or with D in several
        dimensions.
    """
    if impl == "native":
        return _call_native(x_TD, weights)
    # Flattened by hand: given two axes to sum over, XLA:CPU turns them round and copies the weight.
    return [dot("TD,DF->TF", x_TD, _plain(weight).reshape(x_TD.shape[1], -1)) for weight in weights]


def project_transposed(x_TD: jax.Array, weight: Weight, *, impl: MatmulImpl) -> jax.Array:
    """Returns ``[T, V]`` as `project` does, of a weight ``[V, D]``; packing turns it."""
    if impl == "native":
        return _call_native(x_TD, (weight,))[0]
    return dot("TD,VD->TV", x_TD, _plain(weight))


def project_onto(before_TF: jax.Array, x_TD: jax.Array, weight: PackedWeight) -> jax.Array:
    """Returns before + x · weight, float32 ``[T, F]``: natively, in the place of `before`."""
    summed_TF: jax.Array = jax.ffi.ffi_call(
        "jaxserve_dot_add",
        jax.ShapeDtypeStruct(before_TF.shape, jnp.float32),
        input_output_aliases={2: 0},
    )(x_TD, weight.panels, before_TF)
    return summed_TF


def project_silu(x_TD: jax.Array, gate: PackedWeight, up: PackedWeight) -> jax.Array:
    """Returns bfloat16 silu(x · gate) · (x · up), ``[T, F]``: natively, in one pass."""
    shape = (x_TD.shape[0], gate.panels.shape[0] * PANEL)
    result = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    hidden_TF: jax.Array = jax.ffi.ffi_call("jaxserve_gated", result)(x_TD, gate.panels, up.panels)
    return hidden_TF


def packed_shape(num_inputs: int, num_columns: int) -> tuple[int, int, int, int]:
    return num_columns // PANEL, num_inputs // PAIR, PANEL, PAIR


def take_columns(weight: PackedWeight, index_T: jax.Array) -> jax.Array:
    """Returns some columns of a packed weight, each as a row: ``[T, D]``. Indices are clipped."""
    num_panels, num_pairs, _, _ = weight.panels.shape
    index_T = jnp.clip(index_T, 0, num_panels * PANEL - 1)
    pairs = weight.panels.at[index_T // PANEL, :, index_T % PANEL].get(mode="promise_in_bounds")
    return pairs.reshape(-1, num_pairs * PAIR)


def find_matmul_problem(num_inputs: int, num_columns: int) -> str | None:
    """Returns why a weight's product cannot be computed natively; see `native/panels.h`."""
    if num_inputs % PAIR or num_columns % PANEL:
        return f"a weight is {num_inputs} by {num_columns}, not a multiple of {PAIR} by {PANEL}"
    return None


def _plain(weight: Weight) -> jax.Array:
    assert not isinstance(weight, PackedWeight), "a packed weight is for the native product alone"
    return weight


def _call_native(x_TD: jax.Array, weights: tuple[Weight, ...]) -> list[jax.Array]:
    panels = []
    for weight in weights:
        assert isinstance(weight, PackedWeight), "the native product wants packed weights"
        panels.append(weight.panels)
    results = [
        jax.ShapeDtypeStruct((x_TD.shape[0], each.shape[0] * PANEL), jnp.float32) for each in panels
    ]
    return list(jax.ffi.ffi_call("jaxserve_dot", results)(x_TD, *panels))


def wider_dtype(left: Weight, right: Pool) -> np.dtype:
    """Returns the dtype of the two that loses nothing: float32 over bfloat16 over one byte."""
    return max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
