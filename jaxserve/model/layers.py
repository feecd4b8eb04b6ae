"""The parts of a decoder layer: norms, attention with its KV write, the dense MLP.

The residual stream is float32 whatever the weights are: products are summed in float32 and added
without rounding, and activations are rounded once, to the weights' dtype, on entry to a product.
On CPU this costs nothing; in bfloat16 it keeps thirty layers of additions exact.
"""

from typing import Literal

import jax
from jax import numpy as jnp

from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.dot import (
    MatmulImpl,
    PackedWeight,
    project,
    project_onto,
    project_silu,
    wider_dtype,
)
from jaxserve.kernels.paged_attention import paged_attention
from jaxserve.kernels.pool import Pool, QuantizedPool, quantize
from jaxserve.kernels.rows import norm as native_norm
from jaxserve.kernels.rows import rotate_and_write
from jaxserve.model.batch import TokenBatch
from jaxserve.model.config import LayerConfig, ModelConfig
from jaxserve.model.params import Params
from jaxserve.model.rope import rotate


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, *, eps: float) -> jax.Array:
    """Returns float32 x / sqrt(mean(x²) + eps) * weight (Zhang & Sennrich 2019, eq. 4)."""
    mean_square_T1 = jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True)
    return x_TD * jax.lax.rsqrt(mean_square_T1 + eps) * weight_D[None, :]


def normed_input(
    params: Params,
    x_TD: jax.Array,
    part: Literal["attn", "mlp"],
    *,
    config: ModelConfig,
    matmul: MatmulImpl,
) -> jax.Array:
    """Returns what a part of the layer reads of the residual stream: float32, or with native
    products, whose weights are bfloat16, rounded to that."""
    if not config.pre_norms:
        return x_TD
    weight_D = params[f"{part}_norm_D"]
    if matmul == "native":
        return native_norm(x_TD, weight_D, eps=config.norm_eps)
    return rms_norm(x_TD, weight_D, eps=config.norm_eps)


def add_output(
    params: Params,
    x_TD: jax.Array,
    hidden_TF: jax.Array,
    part: Literal["attn", "mlp"],
    *,
    config: ModelConfig,
    matmul: MatmulImpl,
) -> jax.Array:
    """Returns the residual stream with a part's last product added, its bias and its norm."""
    is_attn = part == "attn"
    weight = params["o_NHD" if is_attn else "down_FD"]
    has_bias = config.o_bias if is_attn else config.mlp_bias
    if isinstance(weight, PackedWeight) and not has_bias and not config.post_norms:
        return project_onto(x_TD, hidden_TF, weight)
    (added_TD,) = project(hidden_TF, weight, impl=matmul)
    if has_bias:
        added_TD += params["o_bias_D" if is_attn else "down_bias_D"][None].astype(jnp.float32)
    return x_TD + normed_output(params, added_TD, part, config=config)


def normed_output(
    params: Params, added_TD: jax.Array, part: Literal["attn", "mlp"], *, config: ModelConfig
) -> jax.Array:
    """Returns what a part of the layer adds to the residual stream."""
    if not config.post_norms:
        return added_TD
    return rms_norm(added_TD, params[f"{part}_post_norm_D"], eps=config.norm_eps)


def norm_heads(
    params: Params, x_TNH: jax.Array, part: Literal["q", "k"], *, config: ModelConfig
) -> jax.Array:
    """Returns q or k normed: each head alone, or all heads of a token as one row."""
    T, N, H = x_TNH.shape
    match config.qk_norm:
        case None:
            return x_TNH
        case "head":
            y = rms_norm(x_TNH.reshape(T * N, H), params[f"{part}_norm_H"], eps=config.norm_eps)
        case "all":
            weight = params["q_norm_NH" if part == "q" else "k_norm_KH"].reshape(N * H)
            y = rms_norm(x_TNH.reshape(T, N * H), weight, eps=config.norm_eps)
    return y.reshape(T, N, H)


def activate(gate_TF: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Returns the activation of the gate (GELU: Hendrycks & Gimpel 2016, §2)."""
    match config.activation:
        case "silu":
            return jax.nn.silu(gate_TF)
        case "gelu":
            return jax.nn.gelu(gate_TF, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(gate_TF, approximate=True)


def soft_cap(x_BV: jax.Array, cap: float) -> jax.Array:
    """Returns cap * tanh(x / cap): x near 0, never beyond ± cap."""
    return cap * jnp.tanh(x_BV / cap)


def attention_block(
    params: Params,
    kv_C2KRH: Pool,
    x_TD: jax.Array,
    *,
    batch: TokenBatch,
    rope: tuple[jax.Array, jax.Array] | None,
    config: ModelConfig,
    layer_config: LayerConfig,
    num_single_rows: int,
    tile: int,
    kernels: Kernels,
) -> tuple[Pool, jax.Array]:
    """Returns the pool with this step's K/V written, and the residual stream after attention."""
    weight_dtype = params["q_DNH"].dtype
    y_TD = normed_input(params, x_TD, "attn", config=config, matmul=kernels.matmul)
    y_TD = y_TD.astype(weight_dtype)
    q_TF, k_TF, v_TF = project(
        y_TD, params["q_DNH"], params["k_DKH"], params["v_DKH"], impl=kernels.matmul
    )
    T = y_TD.shape[0]
    q_TNH = q_TF.reshape(T, config.num_heads, config.head_dim)
    k_TKH = k_TF.reshape(T, config.num_kv_heads, config.head_dim)
    v_TKH = v_TF.reshape(T, config.num_kv_heads, config.head_dim)
    if config.qkv_bias:
        q_TNH += params["q_bias_NH"][None].astype(jnp.float32)
        k_TKH += params["k_bias_KH"][None].astype(jnp.float32)
        v_TKH += params["v_bias_KH"][None].astype(jnp.float32)
    q_TNH = norm_heads(params, q_TNH, "q", config=config)
    k_TKH = norm_heads(params, k_TKH, "k", config=config)
    # Write, then read the new value: a read of the old one would copy the whole pool.
    if kernels.matmul == "native" and rope is not None and isinstance(kv_C2KRH, jax.Array):
        places_T = {"pages_T": batch.write_pages_T, "rows_T": batch.write_rows_T}
        q_TNH, kv_C2KRH = rotate_and_write(q_TNH, k_TKH, v_TKH, rope, kv_C2KRH, **places_T)
    else:
        if rope is not None:
            q_TNH, k_TKH = rotate(q_TNH, *rope), rotate(k_TKH, *rope)
        kv_C2KRH = write_kv(kv_C2KRH, k_TKH, v_TKH, batch=batch)
    out_TNH = paged_attention(
        q_TNH.astype(wider_dtype(params["q_DNH"], kv_C2KRH)),
        kv_C2KRH,
        batch.page_table_XP,
        batch.q_starts_X,
        batch.q_lens_X,
        num_single_rows=num_single_rows,
        tile=tile,
        scale=config.scale,
        window=layer_config.window,
        soft_cap=config.attention_soft_cap,
        split_len=kernels.split_len,
        cuts=kernels.cuts,
        impl=kernels.attention,
    )
    out_TF = out_TNH.astype(weight_dtype).reshape(T, config.num_heads * config.head_dim)
    x_TD = add_output(params, x_TD, out_TF, "attn", config=config, matmul=kernels.matmul)
    return kv_C2KRH, x_TD


def write_kv(kv_C2KRH: Pool, k_TKH: jax.Array, v_TKH: jax.Array, *, batch: TokenBatch) -> Pool:
    """Returns the pool with each token's K and V in its row; in place where the pool is donated.

    A pool of one byte takes them as `quantize` has them: each head of a token by itself, whatever
    else is in the step or in the page.

    Padding tokens point past the pool and are dropped. Each gets a page of its own there, which
    makes all indices distinct, as `unique_indices` promises: on a GPU that saves atomic writes.
    """
    C = kv_C2KRH.shape[0]
    T = k_TKH.shape[0]
    pages_T = jnp.where(
        batch.write_pages_T < C, batch.write_pages_T, C + jnp.arange(T, dtype=jnp.int32)
    )

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        place = pool.at[pages_T, :, :, batch.write_rows_T]
        return place.set(new, mode="drop", unique_indices=True)

    kv_T2KH = jnp.stack([k_TKH, v_TKH], axis=1)
    if not isinstance(kv_C2KRH, QuantizedPool):
        return put(kv_C2KRH, kv_T2KH.astype(kv_C2KRH.dtype))
    bytes_T2KH, scales_T2K = quantize(kv_T2KH, kv_C2KRH.dtype)
    return QuantizedPool(
        bytes_C2KRH=put(kv_C2KRH.bytes_C2KRH, bytes_T2KH),
        scales_C2KR=put(kv_C2KRH.scales_C2KR, scales_T2K),
    )


def mlp_block(
    params: Params, x_TD: jax.Array, *, config: ModelConfig, matmul: MatmulImpl
) -> jax.Array:
    """Returns the residual stream after the gated MLP, down(activation(gate(y)) * up(y)).

    SwiGLU and GEGLU of Shazeer 2020, eq. 6.
    """
    gate, up = params["gate_DF"], params["up_DF"]
    y_TD = normed_input(params, x_TD, "mlp", config=config, matmul=matmul).astype(gate.dtype)
    if matmul == "native" and config.activation == "silu" and not config.mlp_bias:
        hidden_TF = project_silu(y_TD, gate, up)
    else:
        gate_TF, up_TF = project(y_TD, gate, up, impl=matmul)
        if config.mlp_bias:
            gate_TF += params["gate_bias_F"][None].astype(jnp.float32)
            up_TF += params["up_bias_F"][None].astype(jnp.float32)
        hidden_TF = (activate(gate_TF, config=config) * up_TF).astype(gate.dtype)
    return add_output(params, x_TD, hidden_TF, "mlp", config=config, matmul=matmul)
