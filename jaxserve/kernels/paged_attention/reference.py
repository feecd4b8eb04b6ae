"""The meaning of `paged_attention`: every page of the table gathered, one plain float32 softmax."""

import jax
from jax import numpy as jnp

from jaxserve.kernels.pool import Pool, as_numbers, split_pool


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
    """Returns ``out_XQNH`` in q's dtype (Vaswani et al. 2017 §3.2.1, with grouped KV heads)."""
    X, Q, N, H = q_XQNH.shape
    stored_C2KRH, scales_C2KR = split_pool(kv_C2KRH)
    K, R = kv_C2KRH.shape[2:4]
    P = page_table_XP.shape[1]
    S = P * R
    stored_XP2KRH = stored_C2KRH.at[page_table_XP].get(mode="clip")
    kv_XP2KRH = as_numbers(stored_XP2KRH).astype(jnp.float32)
    if scales_C2KR is not None:
        kv_XP2KRH *= scales_C2KR.at[page_table_XP].get(mode="clip")[..., None]
    kv_2XKSH = kv_XP2KRH.transpose(2, 0, 3, 1, 4, 5).reshape(2, X, K, S, H)

    key_S = jnp.arange(S, dtype=jnp.int32)
    query_Q = jnp.arange(Q, dtype=jnp.int32)
    position_XQ = q_starts_X[:, None] + query_Q[None, :]
    is_query_XQ = query_Q[None, :] < q_lens_X[:, None]
    is_seen_XQS = is_query_XQ[:, :, None] & (key_S[None, None, :] <= position_XQ[:, :, None])
    if window is not None:
        is_seen_XQS &= key_S[None, None, :] > position_XQ[:, :, None] - window

    # 0 * NaN is NaN: what stands past a row's last query is taken out before the product.
    is_held_XS = key_S[None, :] < (q_starts_X + q_lens_X)[:, None]
    v_XKSH = jnp.where(is_held_XS[:, None, :, None], kv_2XKSH[1], 0.0)

    q_XQKGH = q_XQNH.astype(jnp.float32).reshape(X, Q, K, N // K, H)
    score_XKGQS = scale * jnp.einsum("XQKGH,XKSH->XKGQS", q_XQKGH, kv_2XKSH[0], precision="highest")
    if soft_cap is not None:
        score_XKGQS = soft_cap * jnp.tanh(score_XKGQS / soft_cap)
    score_XKGQS = jnp.where(is_seen_XQS[:, None, None], score_XKGQS, -jnp.inf)
    top_XKGQ1 = score_XKGQS.max(-1, keepdims=True)
    weight_XKGQS = jnp.exp(score_XKGQS - jnp.where(jnp.isfinite(top_XKGQ1), top_XKGQ1, 0.0))
    total_XKGQ1 = weight_XKGQS.sum(-1, keepdims=True)
    weight_XKGQS = weight_XKGQS / jnp.where(total_XKGQ1 > 0.0, total_XKGQ1, 1.0)
    out_XQKGH = jnp.einsum("XKGQS,XKSH->XQKGH", weight_XKGQS, v_XKSH, precision="highest")
    return out_XQKGH.reshape(X, Q, N, H).astype(q_XQNH.dtype)
