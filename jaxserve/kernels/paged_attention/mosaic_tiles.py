"""What the Mosaic kernel of `paged_attention` holds in shared memory, and products of it."""

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.paged_attention.launch import Launch
from jaxserve.kernels.pool import as_numbers

# Rows of the tiles that shared memory is laid out in.
TILE_ROWS = 8

# bfloat16 numbers whose sum is a float32, eight of its bits each.
FLOAT32_PARTS = 3

# The softmax is computed in powers of two, which the hardware has an instruction for.
LOG2_E = 1.4426950408889634

Ref = Any  # Pallas has no useful type for them


def scratch_types(
    launch: Launch,
    *,
    page_size: int,
    head_dim: int,
    num_parts: int,
    dtypes: tuple[jnp.dtype, jnp.dtype],
) -> list[Any]:
    """Returns a program's shared memory and barriers: queries, K and V, or the outputs; weights;
    queries loaded, K loaded, V loaded.

    Of one byte there are K's and V's scales ``[stages, S]`` too, and a block ``[S, H]`` of
    bfloat16; else None. The outputs are written when all that was loaded is done with, in its
    place.

    Args:
      num_parts: bfloat16 numbers of a query.
      dtypes: of what the pool stores, and of the output.
    """
    stored_dtype, out_dtype = dtypes
    has_scales = stored_dtype.itemsize == 1
    M, S, H, stages = launch.rows, launch.block_tokens, head_dim, launch.num_stages
    bfloat16 = jnp.dtype(jnp.bfloat16)
    lanes = swizzled_lanes(S, H)  # one for all: a product's operands have the same swizzle
    queries = _tiled((num_parts, M, H), bfloat16, lanes=lanes)
    stored = _tiled((stages, S, H), stored_dtype, lanes=lanes)
    scales, wide = plgpu.SMEM((stages, S), jnp.float32), _tiled((S, H), bfloat16, lanes=lanes)
    out = _tiled((M, H), out_dtype, lanes=min(lanes, 128 // out_dtype.itemsize))
    num_copies = S // min(page_size, S) * (2 if has_scales else 1)
    loaded = plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages)
    inputs = [queries, stored, stored, (scales, scales, wide) if has_scales else None]
    return [
        plgpu.RefUnion(inputs, [out, plgpu.SMEM((M,), jnp.float32)]),
        _tiled((num_parts, M, S), bfloat16, lanes=lanes),
        plgpu.Barrier(num_arrivals=num_parts),
        loaded,
        loaded,
    ]


def swizzled_lanes(S: int, H: int) -> int:
    """Returns the width of a tile of bfloat16: 128 bytes, or 64 where that is no divisor."""
    return 64 if S % 64 == 0 and H % 64 == 0 else 32


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype, *, lanes: int) -> pl.MemoryRef:
    """Returns shared memory laid out as WGMMA and TMA take it."""
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            # Their base class has a method that mypy takes for an abstract one.
            plgpu.TilingTransform((TILE_ROWS, lanes)),  # type: ignore[abstract]
            plgpu.SwizzleTransform(lanes * dtype.itemsize),  # type: ignore[abstract]
        ),
    )


def multiply(left: Ref, right: Ref) -> jax.Array:
    """Returns the float32 product of left's parts, added up, and right, both in shared memory."""

    def add_parts(sum_ref: Ref) -> jax.Array:
        for part in range(left.shape[0]):
            plgpu.wgmma(sum_ref, left.at[part], right)
        product: jax.Array = sum_ref[...]
        return product

    shape = (left.shape[1], right.shape[1])
    total: jax.Array = pl.run_scoped(add_parts, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    return total


def split_float32(values: jax.Array, num_parts: int) -> list[jax.Array]:
    """Returns bfloat16 numbers whose sum is values; exactly, with a float32's three parts.

    Cut by their bits: a compiler may leave out a conversion there and back.
    """
    parts = []
    for _ in range(num_parts - 1):
        bits = lax.bitcast_convert_type(values, jnp.int32) & -65536
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        values = values - part
    return [*parts, values.astype(jnp.bfloat16)]


def to_powers(score_MS: jax.Array, *, scale: float, soft_cap: float | None) -> jax.Array:
    """Returns what 2 is raised to for each weight."""
    if soft_cap is None:
        return score_MS * (scale * LOG2_E)
    # tanh by its definition: the hardware's own has eleven bits.
    power_MS = jnp.exp2(score_MS * (2.0 * LOG2_E * scale / soft_cap))
    return (1.0 - 2.0 / (power_MS + 1.0)) * (soft_cap * LOG2_E)


def along_rows(values_M: jax.Array, width: int) -> jax.Array:
    """Returns each row's value in all of its columns."""
    return lax.broadcast_in_dim(values_M, (values_M.shape[0], width), (0,))


def copy_scales(source: Ref, place: Ref, loaded: Ref) -> None:
    """Copies some tokens' scales to shared memory, as bytes: what TMA copies by tiles has to lie
    at a multiple of 128 bytes there, and the scales of a page of 16 are half of that.

    Nothing is outside of source: only then it is a copy of bytes.
    """
    in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    plgpu.copy_gmem_to_smem(source, place, loaded, oob_mode=in_bounds)


def along_columns(
    values_S: jax.Array, height: int, *, first_zero: jax.Array | None = None
) -> jax.Array:
    """Returns each column's value in all of its rows; 0 from a column on, where one is given."""
    columns = plgpu.Layout.WGMMA.reduce(0)
    S = values_S.shape[0]
    values_S = plgpu.layout_cast(values_S, columns)
    if first_zero is not None:
        column_S = plgpu.broadcasted_iota(jnp.int32, (S,), 0, layout=columns)
        values_S = jnp.where(column_S < first_zero, values_S, 0.0)
    return lax.broadcast_in_dim(values_S, (height, S), (1,))


def widen(stored: Ref, wide: Ref, *, tile_lanes: int) -> Ref:
    """Writes a block of one byte ``[S, H]`` as bfloat16, which has every such number; returns it.

    To be committed before it is multiplied. Mosaic has a warpgroup wait for all of its threads
    before and after such a write: the product that read what was there is done.
    """
    layout = plgpu.Layout.SMEM_GMEM_COPY(wide.shape, wide.dtype, tile_lanes * wide.dtype.itemsize)
    number_SH = as_numbers(plgpu.layout_cast(stored[...], layout))
    if number_SH.dtype != jnp.int8:
        # Mosaic converts float8 to bfloat16 by way of float32 alone, before CUDA 13.2's ptxas.
        number_SH = number_SH.astype(jnp.float32)
    wide[...] = number_SH.astype(wide.dtype)
    return wide


def zero_rows(ref: Ref, *, first: jax.Array, tile_lanes: int) -> None:
    """Sets the rows of ``[S, H]`` in shared memory to 0, from one on."""
    S, H = ref.shape
    layout = plgpu.Layout.SMEM_GMEM_COPY((S, H), ref.dtype, tile_lanes * ref.dtype.itemsize)
    row_SH = plgpu.broadcasted_iota(jnp.int32, (S, H), 0, layout=layout)
    value_SH = plgpu.layout_cast(ref[...], layout)
    ref[...] = jnp.where(row_SH < first, value_SH, jnp.zeros((), ref.dtype))
