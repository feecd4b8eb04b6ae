"""What the Mosaic kernel of `paged_attention` holds in shared memory, and products of it."""

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.paged_attention.launch import Launch

# Rows of the tiles that shared memory is laid out in.
TILE_ROWS = 8

# bfloat16 numbers whose sum is a float32, eight of its bits each.
FLOAT32_PARTS = 3

Ref = Any  # Pallas has no useful type for them


def scratch_types(
    launch: Launch, *, page_size: int, head_dim: int, num_parts: int, out_dtype: jnp.dtype
) -> list[Any]:
    """Returns a program's shared memory and barriers: queries, K and V, or the outputs; weights;
    queries loaded, K loaded, V loaded.

    The outputs are written when all that was loaded is done with, in its place.
    """
    M, S, H, stages = launch.rows, launch.block_tokens, head_dim, launch.num_stages
    bfloat16 = jnp.dtype(jnp.bfloat16)
    lanes = swizzled_lanes(S, H)  # one for all: a product's operands have the same swizzle
    queries = _tiled((num_parts, M, H), bfloat16, lanes=lanes)
    block = _tiled((stages, S, H), bfloat16, lanes=lanes)
    out = _tiled((M, H), out_dtype, lanes=min(lanes, 128 // out_dtype.itemsize))
    loaded = plgpu.Barrier(num_arrivals=S // min(page_size, S), num_barriers=stages)
    return [
        plgpu.RefUnion([queries, block, block], [out, plgpu.SMEM((M,), jnp.float32)]),
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


def along_rows(values_M: jax.Array, width: int) -> jax.Array:
    """Returns each row's value in all of its columns."""
    return lax.broadcast_in_dim(values_M, (values_M.shape[0], width), (0,))


def zero_rows(ref: Ref, *, first: jax.Array, tile_lanes: int) -> None:
    """Sets the rows of ``[S, H]`` in shared memory to 0, from one on."""
    S, H = ref.shape
    layout = plgpu.Layout.SMEM_GMEM_COPY((S, H), ref.dtype, tile_lanes * ref.dtype.itemsize)
    row_SH = plgpu.broadcasted_iota(jnp.int32, (S, H), 0, layout=layout)
    value_SH = plgpu.layout_cast(ref[...], layout)
    ref[...] = jnp.where(row_SH < first, value_SH, jnp.zeros((), ref.dtype))
