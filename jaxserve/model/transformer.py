"""The decoder: tokens and KV in, hidden states and KV out; and hidden states to logits."""

import functools

import jax
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.dot import (
    MatmulImpl,
    PackedWeight,
    Weight,
    project_transposed,
    take_columns,
)
from jaxserve.kernels.pool import Pool
from jaxserve.kernels.rows import norm as native_norm
from jaxserve.model.batch import TokenBatch, find_real_tokens, spread_rows
from jaxserve.model.config import LayerConfig, ModelConfig
from jaxserve.model.experts import experts_block
from jaxserve.model.layers import (
    attention_block,
    mlp_block,
    normed_input,
    normed_output,
    rms_norm,
    soft_cap,
)
from jaxserve.model.params import Params
from jaxserve.model.rope import rope_tables
from jaxserve.shapes import check_shapes

__all__ = ["TokenBatch", "forward", "logits"]


def forward(
    params: Params,
    kv: tuple[Pool, ...],
    batch: TokenBatch,
    *,
    config: ModelConfig,
    num_single_rows: int,
    tile: int,
    kernels: Kernels,
) -> tuple[tuple[Pool, ...], jax.Array]:
    """Returns the pool with this step's K/V written, and ``hidden_TD`` before the final norm.

    Args:
      kv: the pool, one ``kv_C2KRH`` per layer. Donate it: each array is then updated in place.
      num_single_rows: how many of the batch's rows have one token.
      tile: tokens of each later row.

    Returns:
      hidden_TD: float32, the residual stream; meaningless in padding tokens.

    Raises:
      ShapeError: the arrays do not fit together; while tracing.
    """
    check_shapes(
        token_ids_T=batch.token_ids_T,
        positions_T=batch.positions_T,
        write_pages_T=batch.write_pages_T,
        write_rows_T=batch.write_rows_T,
        page_table_XP=batch.page_table_XP,
        q_starts_X=batch.q_starts_X,
        q_lens_X=batch.q_lens_X,
        prompt_lens_X=batch.prompt_lens_X,
    )
    if len(kv) != config.num_layers:
        raise ShapeError(f"the pool has {len(kv)} layers, the model {config.num_layers}")
    x_TD = embed(params, batch.token_ids_T, config=config)
    prompt_lens_T = spread_rows(batch.prompt_lens_X, num_single_rows=num_single_rows, tile=tile)
    # One table for each kind of RoPE, not one a layer.
    tables = {
        rope: rope_tables(batch.positions_T, prompt_lens_T, rope=rope, head_dim=config.head_dim)
        for rope in dict.fromkeys(layer.rope for layer in config.layers)
        if rope is not None
    }
    new_kv = []
    for index, (kv_C2KRH, layer_config) in enumerate(zip(kv, config.layers, strict=True)):
        new_kv_C2KRH, x_TD = layer(
            params["layers"][str(index)],
            kv_C2KRH,
            x_TD,
            batch=batch,
            rope=None if layer_config.rope is None else tables[layer_config.rope],
            config=config,
            layer_config=layer_config,
            num_single_rows=num_single_rows,
            tile=tile,
            kernels=kernels,
        )
        new_kv.append(new_kv_C2KRH)
    return tuple(new_kv), x_TD


# An inner jit: traced and lowered once for all layers of a kind, inlined when compiled.
@functools.partial(
    jax.jit, static_argnames=("config", "layer_config", "num_single_rows", "tile", "kernels")
)
def layer(
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
    """Returns the layer's pool and the residual stream after it."""
    kv_C2KRH, x_TD = attention_block(
        params,
        kv_C2KRH,
        x_TD,
        batch=batch,
        rope=rope,
        config=config,
        layer_config=layer_config,
        num_single_rows=num_single_rows,
        tile=tile,
        kernels=kernels,
    )
    if layer_config.mlp != "experts":
        return kv_C2KRH, mlp_block(params, x_TD, config=config, matmul=kernels.matmul)
    y_TD = normed_input(params, x_TD, "mlp", config=config, matmul=kernels.matmul)
    is_real_T = find_real_tokens(batch.q_lens_X, num_single_rows=num_single_rows, tile=tile)
    added_TD = experts_block(params, y_TD, is_real_T, config=config)
    return kv_C2KRH, x_TD + normed_output(params, added_TD, "mlp", config=config)


def embed(params: Params, token_ids_T: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Returns the float32 rows of the embedding, scaled; ids are checked where requests come in.

    The scale is rounded to the weights' dtype first, because a model was trained with it so: in
    bfloat16 Gemma's sqrt(3072) = 55.43 is 55.5, and all its layers expect the larger rows.
    """
    embedding_VD: Weight = params["embedding_VD"]
    if isinstance(embedding_VD, PackedWeight):
        x_TD = take_columns(embedding_VD, token_ids_T).astype(jnp.float32)
    else:
        x_TD = embedding_VD.at[token_ids_T].get(mode="clip").astype(jnp.float32)
    if config.embedding_scale is None:
        return x_TD
    return x_TD * jnp.asarray(config.embedding_scale, embedding_VD.dtype).astype(jnp.float32)


def logits(
    params: Params, hidden_BD: jax.Array, *, config: ModelConfig, matmul: MatmulImpl
) -> jax.Array:
    """Returns float32 ``logits_BV``; ids past the real vocabulary are -inf.

    Masked here, before anything can look at them: a padding row's own logit would be 0, which wins
    whenever all real logits are negative.
    """
    check_shapes(hidden_BD=hidden_BD)
    head_VD = params["embedding_VD" if config.tied_head else "head_VD"]
    norm = native_norm if matmul == "native" else rms_norm
    y_BD = norm(hidden_BD, params["final_norm_D"], eps=config.norm_eps).astype(head_VD.dtype)
    logits_BV = project_transposed(y_BD, head_VD, impl=matmul)
    if config.final_soft_cap is not None:
        logits_BV = soft_cap(logits_BV, config.final_soft_cap)
    if config.padded_vocab_size == config.vocab_size:
        return logits_BV
    is_real_V = jnp.arange(config.padded_vocab_size, dtype=jnp.int32) < config.vocab_size
    return jnp.where(is_real_V[None, :], logits_BV, -jnp.inf)
