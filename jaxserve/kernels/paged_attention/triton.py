"""`paged_attention` as one Pallas kernel on the Triton backend: split K/V, tiles of queries.

The backend is deprecated upstream: it goes when the Mosaic GPU kernel behind the same signature
has been measured.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.errors import ShapeError
from jaxserve.kernels.dot import dot, wider_dtype
from jaxserve.kernels.paged_attention.launch import (
    BY_FORMULA,
    Cuts,
    Launch,
    check_launch,
    find_launch,
    find_pool_problem,
    power_of_two,
)
from jaxserve.kernels.paged_attention.splits import combine_splits, share_of_blocks
from jaxserve.kernels.paged_attention.xla import LOWEST, Carry
from jaxserve.kernels.pool import Pool, as_numbers, split_pool

# The softmax is computed in powers of two, which the hardware has an instruction for.
LOG2_E = 1.4426950408889634

# Of a product's inner axis: what Triton takes at least.
MIN_LANES = 16

Ref = Any  # Pallas has no useful type for them


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
    interpret: bool = False,
) -> jax.Array:
    """Returns ``out_XQNH`` in q's dtype.

    A program holds some (query, head) pairs of one row and KV head, and loops over a share of the
    row's keys with an online softmax (FlashAttention-2, Dao 2023, §3.1); the shares are combined by
    their log-sum-exp (Flash-Decoding, Dao et al. 2023). Pair i of 3 heads is (i // 3, i % 3)::

        pair:    0 1 2 | 3 4 5 | 6 ...
        query:   0 0 0 | 1 1 1 | 2 ...
        head:    0 1 2 | 0 1 2 | 0 ...

    Args:
      split_len: tokens of a share of the keys; None goes by the call's shape.
      cuts: as `find_launch` takes them.
      launch: how to cut the work, in place of all that.
      interpret: on a CPU, as plain XLA operations, one program after another.

    Raises:
      ShapeError: see `check_launch` and `find_pool_problem`.
    """
    X, Q, N, H = q_XQNH.shape
    K = kv_C2KRH.shape[2]
    launch = launch or find_launch(q_XQNH, kv_C2KRH, page_table_XP, split_len=split_len, cuts=cuts)
    check_launch(launch, kv_C2KRH)
    if problem := find_pool_problem(kv_C2KRH):
        raise ShapeError(f"triton: {problem}: make it smaller, or larger")
    splits = launch.num_splits
    out_shapes = [jax.ShapeDtypeStruct((X, Q, N, H), q_XQNH.dtype)]
    if splits > 1:
        out_shapes = [
            jax.ShapeDtypeStruct((X, splits, Q, N, H), jnp.float32),
            jax.ShapeDtypeStruct((X, splits, Q, N), jnp.float32),
        ]
    outputs: list[jax.Array] = pl.pallas_call(
        functools.partial(
            _attend_program, launch=launch, scale=scale, window=window, soft_cap=soft_cap
        ),
        # Rows first: the other axes of a grid have a limit that a batch could pass.
        grid=(X * pl.cdiv(N // K * Q, launch.rows), K, splits),
        out_shape=out_shapes,
        compiler_params=plt.CompilerParams(
            num_warps=launch.num_warps, num_stages=launch.num_stages
        ),
        interpret=interpret,
        name=f"paged_attention_{'decode' if Q == 1 else 'chunk'}",
    )(q_XQNH, kv_C2KRH, page_table_XP, q_starts_X, q_lens_X)
    if splits == 1:
        return outputs[0]
    return combine_splits(*outputs).astype(q_XQNH.dtype)


def _attend_program(
    # inputs
    q_ref: Ref,  # [X, Q, N, H]
    kv_ref: Ref,  # [C, 2, K, R, H]; of one byte with scales [C, 2, K, R]
    page_table_ref: Ref,  # [X, P]
    q_starts_ref: Ref,  # [X]
    q_lens_ref: Ref,  # [X]
    # outputs
    out_ref: Ref,  # [X, Q, N, H]; with splits [X, splits, Q, N, H]
    log_total_ref: Ref = None,  # [X, splits, Q, N]
    *,
    launch: Launch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    Q, N, H = q_ref.shape[1:]
    refs: tuple[Ref, Ref] = split_pool(kv_ref)
    stored_ref, scales_ref = refs
    K, R = stored_ref.shape[2:4]
    G = N // K
    M, S, padded_H = launch.rows, launch.block_tokens, max(power_of_two(H), MIN_LANES)
    compute_dtype = wider_dtype(q_ref, kv_ref)
    tiles = pl.cdiv(Q * G, M)
    x, k, split = pl.program_id(0) // tiles, pl.program_id(1), pl.program_id(2)
    first_pair = pl.program_id(0) % tiles * M
    start, q_len = q_starts_ref[x], q_lens_ref[x]

    pair_M = first_pair + jnp.arange(M, dtype=jnp.int32)
    query_M, head_M = pair_M // G, k * G + pair_M % G
    lane_H = jnp.arange(padded_H, dtype=jnp.int32)
    # Position of each query; -1, which sees no key, where it is padding.
    position_M = jnp.where(query_M < q_len, start + query_M, -1)

    # The keys that this program's queries see: none where it has no queries.
    first_query, last_query = first_pair // G, (first_pair + M - 1) // G
    end = jnp.where(first_query < q_len, start + jnp.minimum(last_query + 1, q_len), 0)
    begin: jax.Array | int = 0
    if window is not None:
        begin = jnp.maximum(start + first_query - window + 1, 0)
    first_block, last_block = share_of_blocks(begin // S, -(-end // S), split, launch=launch)

    is_lane_1H = (lane_H < H)[None, :]
    is_real_MH = (query_M < q_len)[:, None] & is_lane_1H
    pairs_MH = _spread((M, padded_H), query_M[:, None], head_M[:, None], lane_H[None, :])
    x_MH, split_MH = _spread((M, padded_H), x, split)
    q_MH = plt.load(q_ref.at[(x_MH, *pairs_MH)], mask=is_real_MH, other=0.0).astype(compute_dtype)

    def add_block(block: jax.Array, carry: Carry) -> Carry:
        top_M, total_M, sum_MH = carry
        key_S = block * S + jnp.arange(S, dtype=jnp.int32)
        is_held_S = key_S < end
        page_S = plt.load(page_table_ref.at[_spread((S,), x, key_S // R)], mask=is_held_S, other=0)
        # Masked, so that what no sequence holds (0 * NaN is NaN) is never in the products.
        is_held_SH = is_held_S[:, None] & is_lane_1H

        def load(which: int) -> jax.Array:
            place = _spread(
                (S, padded_H), page_S[:, None], which, k, (key_S % R)[:, None], lane_H[None, :]
            )
            zero = jnp.zeros((), stored_ref.dtype)
            stored_SH = plt.load(stored_ref.at[place], mask=is_held_SH, other=zero)
            # bfloat16 has every number of one byte.
            return stored_SH if scales_ref is None else as_numbers(stored_SH).astype(jnp.bfloat16)

        def load_scales(which: int) -> jax.Array:
            place = _spread((S,), page_S, which, k, key_S % R)
            return plt.load(scales_ref.at[place], mask=is_held_S, other=0.0)

        score_MS = _dot("MH,SH->MS", q_MH, load(0))
        if scales_ref is not None:
            score_MS *= load_scales(0)[None, :]
        if soft_cap is None:
            score_MS *= scale * LOG2_E
        else:
            score_MS = jnp.tanh(score_MS * (scale / soft_cap)) * (soft_cap * LOG2_E)
        is_seen_MS = key_S[None, :] <= position_M[:, None]
        if window is not None:
            is_seen_MS &= key_S[None, :] > position_M[:, None] - window
        score_MS = jnp.where(is_seen_MS, score_MS, LOWEST)
        new_top_M = jnp.maximum(top_M, score_MS.max(1))
        # The second select matters where nothing was seen yet: there exp2(LOWEST - LOWEST) is 1.
        weight_MS = jnp.where(is_seen_MS, jnp.exp2(score_MS - new_top_M[:, None]), 0.0)
        shrink_M = jnp.exp2(top_M - new_top_M)
        scaled_MS = weight_MS if scales_ref is None else weight_MS * load_scales(1)[None, :]
        block_MH = _dot("MS,SH->MH", scaled_MS.astype(compute_dtype), load(1))
        return (
            new_top_M,
            total_M * shrink_M + weight_MS.sum(1),
            sum_MH * shrink_M[:, None] + block_MH,
        )

    carry = (
        jnp.full((M,), LOWEST, jnp.float32),
        jnp.zeros((M,), jnp.float32),
        jnp.zeros((M, padded_H), jnp.float32),
    )
    top_M, total_M, sum_MH = lax.fori_loop(first_block, last_block, add_block, carry)
    has_keys_M = total_M > 0.0
    total_M = jnp.where(has_keys_M, total_M, 1.0)
    out_MH = (sum_MH / total_M[:, None]).astype(out_ref.dtype)

    # Padding queries are written too: their output is promised to be 0.
    is_pair_M = pair_M < Q * G
    is_stored_MH = is_pair_M[:, None] & is_lane_1H
    if log_total_ref is None:
        plt.store(out_ref.at[(x_MH, *pairs_MH)], out_MH, mask=is_stored_MH)
        return
    plt.store(out_ref.at[(x_MH, split_MH, *pairs_MH)], out_MH, mask=is_stored_MH)
    plt.store(
        log_total_ref.at[_spread((M,), x, split, query_M, head_M)],
        jnp.where(has_keys_M, top_M + jnp.log2(total_M), LOWEST),
        mask=is_pair_M,
    )


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the float32 product of left and of K or V, whose dtype may be narrower.

    A float32 is the sum of three bfloat16 exactly, eight of its bits each, so tensor cores do for
    it. Converting the block instead spilled 584 bytes at 128 lanes and compiled for 150 s.
    """
    if left.dtype == right.dtype:
        return dot(subscripts, left, right)
    total: jax.Array | float = 0.0
    for _ in range(3):
        bits = lax.bitcast_convert_type(left, jnp.int32) & -65536
        part = lax.bitcast_convert_type(bits, jnp.float32)
        total += dot(subscripts, part.astype(right.dtype), right)
        left = left - part
    return jnp.asarray(total)


def _spread(shape: tuple[int, ...], *indices: jax.Array | int) -> tuple[jax.Array, ...]:
    """Returns every index in full: interpreted loads take no mix of scalars and arrays."""
    return tuple(jnp.broadcast_to(jnp.asarray(index, jnp.int32), shape) for index in indices)
