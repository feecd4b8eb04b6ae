"""`paged_attention` for any platform: a loop over blocks of pages with an online softmax."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.kernels.dot import dot, wider_dtype
from jaxserve.kernels.pool import Pool, as_numbers, split_pool

# Tokens of one block, for pages that are not larger. Measured on two Zen 4 cores at 32 rows of 256
# keys: 64 is fastest, 128 is 1.4 times slower (the gathered block leaves the L2 cache).
BLOCK_TOKENS = 64

# Stands for -inf in running maxima, so that (masked - masked) is 0 and not NaN.
LOWEST = -0.7 * float(np.finfo(np.float32).max)

Carry = tuple[jax.Array, jax.Array, jax.Array]


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
) -> jax.Array:
    """Returns ``out_XQNH`` in q's dtype.

    The softmax is normalized as it goes (Milakov & Gimelshein 2018, alg. 3; FlashAttention, Dao et
    al. 2022, alg. 1). The trip count is that of the longest row; a block that a row does not need
    leaves its numbers as they were, bit for bit, so a row does not depend on its batch mates.
    """
    X, Q, N, H = q_XQNH.shape
    stored_C2KRH, scales_C2KR = split_pool(kv_C2KRH)
    K, R = kv_C2KRH.shape[2:4]
    M = N // K * Q
    pages_per_block = max(1, BLOCK_TOKENS // R)
    block_tokens = pages_per_block * R
    num_blocks = -(-page_table_XP.shape[1] // pages_per_block)
    page_table_XP = _pad_columns(page_table_XP, num_blocks * pages_per_block)

    kv_lens_X = jnp.where(q_lens_X > 0, q_starts_X + q_lens_X, 0)
    last_block = jnp.minimum(jnp.max(-(-kv_lens_X // block_tokens)), num_blocks)
    first_block = jnp.int32(0)
    if window is not None:
        first_key_X = jnp.where(q_lens_X > 0, q_starts_X - window + 1, num_blocks * block_tokens)
        first_block = jnp.maximum(jnp.min(first_key_X), 0) // block_tokens

    # Queries of one KV head side by side, [X, K, G * Q, H]: one product for the whole group.
    compute_dtype = wider_dtype(q_XQNH, kv_C2KRH)
    q_XKGQH = q_XQNH.reshape(X, Q, K, N // K, H).transpose(0, 2, 3, 1, 4)
    q_XKMH = q_XKGQH.reshape(X, K, M, H).astype(compute_dtype)
    query_M = jnp.tile(jnp.arange(Q, dtype=jnp.int32), N // K)
    # Position of each query; -1, which sees no key, where it is padding.
    position_XM = jnp.where(
        query_M[None, :] < q_lens_X[:, None], q_starts_X[:, None] + query_M[None, :], -1
    )

    def add_block(block: jax.Array, carry: Carry) -> Carry:
        pages_XP = lax.dynamic_slice_in_dim(
            page_table_XP, block * pages_per_block, pages_per_block, axis=1
        )
        k_XKSH, v_XKSH = gather_block(stored_C2KRH, pages_XP)
        key_S = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        is_seen_XMS = key_S[None, None, :] <= position_XM[:, :, None]
        if window is not None:
            is_seen_XMS &= key_S[None, None, :] > position_XM[:, :, None] - window
        # 0 * NaN is NaN: what stands past a row's last query is taken out before the product.
        is_held_XS = key_S[None, :] < kv_lens_X[:, None]
        v_XKSH = jnp.where(is_held_XS[:, None, :, None], v_XKSH, jnp.zeros((), v_XKSH.dtype))
        score_XKMS = scale * dot("XKMH,XKSH->XKMS", q_XKMH, k_XKSH.astype(compute_dtype))
        v_scale_XKS = None
        if scales_C2KR is not None:
            k_scale_XKS, v_scale_XKS = gather_block(scales_C2KR, pages_XP)
            v_scale_XKS = jnp.where(is_held_XS[:, None, :], v_scale_XKS, 0.0)
            score_XKMS *= k_scale_XKS[:, :, None, :]
        if soft_cap is not None:
            score_XKMS = soft_cap * jnp.tanh(score_XKMS / soft_cap)
        return add_scores(
            carry,
            score_XKMS,
            is_seen_XMS=is_seen_XMS,
            v_XKSH=v_XKSH.astype(compute_dtype),
            v_scale_XKS=v_scale_XKS,
        )

    start = (
        jnp.full((X, K, M), LOWEST, jnp.float32),
        jnp.zeros((X, K, M), jnp.float32),
        jnp.zeros((X, K, M, H), jnp.float32),
    )
    end: Carry = lax.fori_loop(first_block, last_block, add_block, start)
    _, total_XKM, sum_XKMH = end
    out_XKMH = sum_XKMH / jnp.where(total_XKM > 0.0, total_XKM, 1.0)[..., None]
    out_XKGQH = out_XKMH.astype(q_XQNH.dtype).reshape(X, K, N // K, Q, H)
    return out_XKGQH.transpose(0, 3, 1, 2, 4).reshape(X, Q, N, H)


def add_scores(
    carry: Carry,
    score_XKMS: jax.Array,
    *,
    is_seen_XMS: jax.Array,
    v_XKSH: jax.Array,
    v_scale_XKS: jax.Array | None,
) -> Carry:
    """Returns the running (maximum, total weight, weighted sum of V) with one more block."""
    top_XKM, total_XKM, sum_XKMH = carry
    is_seen_XKMS = jnp.broadcast_to(is_seen_XMS[:, None], score_XKMS.shape)
    score_XKMS = jnp.where(is_seen_XKMS, score_XKMS, LOWEST)
    new_top_XKM = jnp.maximum(top_XKM, score_XKMS.max(-1))
    # The second select matters where nothing was seen yet: there exp(LOWEST - LOWEST) is 1.
    weight_XKMS = jnp.where(is_seen_XKMS, jnp.exp(score_XKMS - new_top_XKM[..., None]), 0.0)
    shrink_XKM = jnp.exp(top_XKM - new_top_XKM)
    block_total_XKM = weight_XKMS.sum(-1)
    if v_scale_XKS is not None:
        weight_XKMS *= v_scale_XKS[:, :, None, :]
    block_XKMH = dot("XKMS,XKSH->XKMH", weight_XKMS.astype(v_XKSH.dtype), v_XKSH)
    return (
        new_top_XKM,
        total_XKM * shrink_XKM + block_total_XKM,
        sum_XKMH * shrink_XKM[..., None] + block_XKMH,
    )


def gather_block(pool: jax.Array, pages_XP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns K and V of some pages of each row, ``[X, K, P * R, H]`` each, or their scales
    ``[X, K, P * R]``.

    One (page, K or V, head) is a contiguous slab of R * H values. Gathering slabs, not pages, puts
    the heads before the tokens at once; gathering pages needs a transposing copy after it::

        slab of K = page * 2K + k        slab of V = page * 2K + K + k

    Args:
      pool: ``stored_C2KRH`` or ``scales_C2KR``.
    """
    C, _, K, R, *lanes = pool.shape
    X, P = pages_XP.shape
    head_K = jnp.arange(K, dtype=jnp.int32)
    slab_XKP = pages_XP[:, None, :] * (2 * K) + head_K[None, :, None]
    slabs = pool.reshape(C * 2 * K, R, *lanes)
    # Clipped: past a row's last page the table may hold anything, and what is read is masked.
    k = as_numbers(slabs.at[slab_XKP].get(mode="clip"))
    v = as_numbers(slabs.at[slab_XKP + K].get(mode="clip"))
    return k.reshape(X, K, P * R, *lanes), v.reshape(X, K, P * R, *lanes)


def _pad_columns(table_XP: jax.Array, width: int) -> jax.Array:
    """Pads with page 0: a slice that ran past the end would be shifted, not cut."""
    return jnp.pad(table_XP, ((0, 0), (0, width - table_XP.shape[1])))
