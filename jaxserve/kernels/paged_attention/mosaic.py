"""`paged_attention` as one Pallas kernel on Mosaic GPU: pages by TMA, products by WGMMA."""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention.launch import (
    BY_FORMULA,
    MAX_ROWS,
    Cuts,
    Launch,
    check_launch,
    find_mosaic_launch,
    find_mosaic_problem,
)
from jaxserve.kernels.paged_attention.mosaic_tiles import (
    FLOAT32_PARTS,
    TILE_ROWS,
    Ref,
    along_columns,
    along_rows,
    copy_scales,
    multiply,
    scratch_types,
    split_float32,
    swizzled_lanes,
    to_powers,
    widen,
    zero_rows,
)
from jaxserve.kernels.paged_attention.splits import combine_splits, share_of_blocks
from jaxserve.kernels.paged_attention.xla import LOWEST
from jaxserve.kernels.pool import Pool, split_pool

Carry = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What a program knows of its call while it is traced.

    Attributes:
      num_queries: of a row.
      num_shared: query heads of a KV head.
      num_parts: bfloat16 numbers that a query is made of.
    """

    launch: Launch
    num_queries: int
    num_shared: int
    num_kv_heads: int
    num_parts: int
    scale: float
    window: int | None
    soft_cap: float | None


def attend(
    q_XQNH: jax.Array,
    kv_C2KRH: Pool,
    page_table_XP: jax.Array,
    q_starts_X: jax.Array,
    q_lens_X: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    split_len: int | None = None,
    cuts: Cuts = BY_FORMULA,
    launch: Launch | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """Returns ``out_XQNH`` in q's dtype.

    The work is cut as `triton.attend` says: a program, here one warpgroup, holds 64 (query, head)
    pairs of one row and KV head. What of them is past the row's last pair is read as 0 and not
    written, by TMA's own bounds.

    Args:
      split_len: tokens of a share of the keys; None goes by the call's shape.
      cuts: as `find_launch` takes them.
      launch: how to cut the work, in place of all that.
      interpret: on a CPU, one program after another, by jax's simulation of a GPU's memories.

    Raises:
      ShapeError: see `find_mosaic_problem` and `check_launch`; or a launch of other rows.
    """
    X, Q, N, H = q_XQNH.shape
    C, _, K, R, _ = kv_C2KRH.shape
    problem = find_mosaic_problem(
        q_dtype=q_XQNH.dtype.name, kv_dtype=kv_C2KRH.dtype.name, head_dim=H, page_size=R
    )
    if problem:
        raise ShapeError(f"mosaic: {problem}")
    launch = launch or find_mosaic_launch(
        q_XQNH, kv_C2KRH, page_table_XP, split_len=split_len, cuts=cuts
    )
    check_launch(launch, kv_C2KRH)
    if launch.rows != MAX_ROWS:
        raise ShapeError(
            f"mosaic: a launch of {launch.rows} rows, but its products have {MAX_ROWS}"
        )
    stored_C2KRH, scales_C2KR = split_pool(kv_C2KRH)
    splits, num_pairs = launch.num_splits, N // K * Q
    num_rows = -(-num_pairs // TILE_ROWS) * TILE_ROWS
    call = _Call(
        launch=launch,
        num_queries=Q,
        num_shared=N // K,
        num_kv_heads=K,
        num_parts=FLOAT32_PARTS if q_XQNH.dtype == jnp.float32 else 1,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    # A copy by TMA has at most five axes, two of them a tile's: all but the last two become one.
    q_XKQGH = q_XQNH.reshape(X, Q, K, N // K, H).transpose(0, 2, 1, 3, 4)
    q_AMH = q_XKQGH.reshape(X * K, num_pairs, H)
    q_AMH = jnp.pad(q_AMH, ((0, 0), (0, num_rows - num_pairs), (0, 0)))
    q_AMH = jnp.concatenate(split_float32(q_AMH, call.num_parts))
    stored_BRH = stored_C2KRH.reshape(C * 2 * K, R, H)
    scales_BR = None if scales_C2KR is None else scales_C2KR.reshape(C * 2 * K, R)
    out_dtype = q_XQNH.dtype if splits == 1 else jnp.dtype(jnp.float32)
    outputs: list[jax.Array] = plgpu.kernel(
        functools.partial(_attend_program, call=call),
        out_type=[
            jax.ShapeDtypeStruct((X * K * splits, num_rows, H), out_dtype),
            jax.ShapeDtypeStruct((X * K * splits, num_rows), jnp.float32),
        ],
        # Rows last: the other axes of a grid have a limit that a batch could pass.
        grid=(splits, K, X * pl.cdiv(num_pairs, launch.rows)),
        grid_names=("split", "head", "tile"),
        scratch_types=scratch_types(
            launch,
            page_size=R,
            head_dim=H,
            num_parts=call.num_parts,
            dtypes=(stored_BRH.dtype, out_dtype),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
        kernel_name=f"paged_attention_{'decode' if Q == 1 else 'chunk'}",
    )(q_AMH, (stored_BRH, scales_BR), page_table_XP, q_starts_X, q_lens_X)
    out_AMH, log_total_AM = outputs
    out_XKZQGH = out_AMH[:, :num_pairs].reshape(X, K, splits, Q, N // K, H)
    part_XZQNH = out_XKZQGH.transpose(0, 2, 3, 1, 4, 5).reshape(X, splits, Q, N, H)
    if splits == 1:
        return part_XZQNH[:, 0]
    log_total_XKZQG = log_total_AM[:, :num_pairs].reshape(X, K, splits, Q, N // K)
    log_total_XZQN = log_total_XKZQG.transpose(0, 2, 3, 1, 4).reshape(X, splits, Q, N)
    return combine_splits(part_XZQNH, log_total_XZQN).astype(q_XQNH.dtype)


def _attend_program(
    # inputs
    q_ref: Ref,  # [parts * X * K, pairs, H]
    kv_refs: tuple[Ref, Ref],  # [C * 2 * K, R, H]; of one byte with scales [C * 2 * K, R]
    page_table_ref: Ref,  # [X, P]
    q_starts_ref: Ref,  # [X]
    q_lens_ref: Ref,  # [X]
    # outputs
    out_ref: Ref,  # [X * K * splits, pairs, H]
    log_total_ref: Ref,  # [X * K * splits, pairs]
    # scratch
    union: Ref,  # see `scratch_types`
    weight_smem: Ref,  # [parts, M, S]
    q_loaded: Ref,  # barrier
    k_loaded: Ref,  # barrier of each stage
    v_loaded: Ref,  # barrier of each stage
    *,
    call: _Call,
) -> None:
    (q_smem, k_smem, v_smem, of_bytes), (out_smem, log_total_smem) = union
    nothing: Ref = None
    k_scales, v_scales, wide_smem = of_bytes or (nothing, nothing, nothing)
    (stored_ref, scales_ref), has_scales = kv_refs, of_bytes is not None
    launch, G, K = call.launch, call.num_shared, call.num_kv_heads
    M, S, stages = launch.rows, launch.block_tokens, launch.num_stages
    R, H = stored_ref.shape[1:]
    # Sums are kept in groups of lanes: products of all lanes at once take too many registers.
    tile_lanes = swizzled_lanes(S, H)
    group = {96: 96, 256: 128}.get(H, 64)
    groups = [pl.ds(first, group) for first in range(0, H, group)]
    rows = plgpu.Layout.WGMMA.reduce(1)
    tiles = pl.cdiv(call.num_queries * G, M)
    split, k, tile = (lax.axis_index(name) for name in ("split", "head", "tile"))
    x, first_pair = tile // tiles, tile % tiles * M
    start, q_len = q_starts_ref[x], q_lens_ref[x]

    # Position of each query; -1, which sees no key, where it is padding.
    query_M = (first_pair + plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=rows)) // G
    position_M = jnp.where(query_M < q_len, start + query_M, -1)

    # The keys that this program's queries see: none where it has no queries.
    first_query, last_query = first_pair // G, (first_pair + M - 1) // G
    end = jnp.where(first_query < q_len, start + jnp.minimum(last_query + 1, q_len), 0)
    begin: jax.Array | int = 0
    if call.window is not None:
        begin = jnp.maximum(start + first_query - call.window + 1, 0)
    first_block, last_block = share_of_blocks(begin // S, pl.cdiv(end, S), split, launch=launch)
    num_blocks = last_block - first_block

    def fetch(index: jax.Array | int, stage: jax.Array | int) -> None:
        copy_rows = min(R, S)
        for first in range(0, S, copy_rows):
            # Past the row's end its last page once more: all copies are waited for, none is seen.
            key = jnp.minimum((first_block + index) * S + first, end - 1)
            first_row = 0 if R <= S else key % R // S * S
            page = page_table_ref[x, key // R]
            k_side, v_side = (0, k_smem, k_scales, k_loaded), (1, v_smem, v_scales, v_loaded)
            for which, smem, scales_smem, loaded in (k_side, v_side):
                source = (page * 2 + which) * K + k, pl.ds(first_row, copy_rows)
                place = stage, pl.ds(first, copy_rows)
                plgpu.copy_gmem_to_smem(stored_ref.at[source], smem.at[place], loaded.at[stage])
                if has_scales:
                    copy_scales(scales_ref.at[source], scales_smem.at[place], loaded.at[stage])

    for stage in range(stages):

        @pl.when(stage < num_blocks)
        def _(stage: int = stage) -> None:
            fetch(stage, stage)

    @pl.when(num_blocks > 0)
    def _() -> None:
        for part in range(call.num_parts):
            row = (part * (q_ref.shape[0] // call.num_parts)) + x * K + k
            plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(first_pair, M)], q_smem.at[part], q_loaded)
        plgpu.barrier_wait(q_loaded)

    def add_block(index: jax.Array, carry: Carry) -> Carry:
        top_M, total_M, sums_MH = carry
        stage = lax.rem(index, jnp.int32(stages))
        first_key = (first_block + index) * S
        plgpu.barrier_wait(k_loaded.at[stage])
        k_block = k_smem.at[stage]
        if has_scales:
            k_block = widen(k_block, wide_smem, tile_lanes=tile_lanes)
            plgpu.commit_smem()
        score_MS = multiply(q_smem, k_block.transpose((1, 0)))
        if has_scales:
            score_MS *= along_columns(k_scales[stage], M)
        score_MS = to_powers(score_MS, scale=call.scale, soft_cap=call.soft_cap)
        key_MS = first_key + plgpu.broadcasted_iota(jnp.int32, (M, S), 1, layout=plgpu.Layout.WGMMA)
        is_seen_MS = key_MS <= along_rows(position_M, S)
        if call.window is not None:
            is_seen_MS &= key_MS > along_rows(position_M - call.window, S)
        score_MS = jnp.where(is_seen_MS, score_MS, LOWEST)
        new_top_M = jnp.maximum(top_M, score_MS.max(1))
        # The second select matters where nothing was seen yet: there exp2(LOWEST - LOWEST) is 1.
        weight_MS = jnp.exp2(score_MS - along_rows(new_top_M, S))
        weight_MS = jnp.where(is_seen_MS, weight_MS, 0.0)
        shrink_M = jnp.exp2(top_M - new_top_M)
        total_M = total_M * shrink_M + weight_MS.sum(1)
        plgpu.barrier_wait(v_loaded.at[stage])
        if has_scales:
            weight_MS *= along_columns(v_scales[stage], M, first_zero=end - first_key)
        for part, weights in enumerate(split_float32(weight_MS, call.num_parts)):
            weight_smem[part] = weights
        v_block = v_smem.at[stage]
        if has_scales:
            v_block = widen(v_block, wide_smem, tile_lanes=tile_lanes)

        @pl.when(first_key + S > end)
        def _() -> None:
            # 0 * NaN is NaN: what no sequence holds must not be in the product.
            for lanes in groups:
                zero_rows(v_block.at[:, lanes], first=end - first_key, tile_lanes=tile_lanes)

        plgpu.commit_smem()
        # The barrier between two groups: else all products are made before the first is added.
        sums_MH = tuple(
            lax.optimization_barrier(
                sum_MH * along_rows(shrink_M, group) + multiply(weight_smem, v_block.at[:, lanes])
            )
            for sum_MH, lanes in zip(sums_MH, groups, strict=True)
        )

        @pl.when(index + stages < num_blocks)
        def _() -> None:
            fetch(index + stages, stage)

        return new_top_M, total_M, sums_MH

    carry = (
        plgpu.layout_cast(jnp.full((M,), LOWEST, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((M,), jnp.float32), rows),
        tuple(
            plgpu.layout_cast(jnp.zeros((M, group), jnp.float32), plgpu.Layout.WGMMA)
            for _ in groups
        ),
    )
    top_M, total_M, sums_MH = lax.fori_loop(0, num_blocks, add_block, carry)
    has_keys_M = total_M > 0.0
    total_M = jnp.where(has_keys_M, total_M, 1.0)
    for sum_MH, lanes in zip(sums_MH, groups, strict=True):
        out_MH = sum_MH * along_rows(1.0 / total_M, group)
        out_smem[:, lanes] = out_MH.astype(out_smem.dtype)
    log_total_smem[...] = jnp.where(has_keys_M, top_M + jnp.log2(total_M), LOWEST)
    plgpu.commit_smem()
    row, pairs = (x * K + k) * launch.num_splits + split, pl.ds(first_pair, M)
    plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, pairs])
    plgpu.copy_smem_to_gmem(log_total_smem, log_total_ref.at[row, pairs])
    plgpu.wait_smem_to_gmem(0)  # a program may not end with a copy on its way
