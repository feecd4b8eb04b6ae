"""Oracle O: the decoder written once more, in numpy, float64, without a cache, pages or batches.

It shares no code with `jaxserve.model`: only the parameters' names and the fields of the config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig

Array = NDArray[np.float64]


def oracle_logits(
    params: Mapping[str, Any], token_ids: Sequence[int], config: ModelConfig
) -> NDArray[np.float32]:
    """Returns the logits after each token, float32 [len(token_ids), vocab_size]."""
    x_TD = _array(params["embedding_VD"])[np.asarray(token_ids)]
    for index, layer_config in enumerate(config.layers):
        layer = params["layers"][str(index)]
        y_TD = _norm(x_TD, layer["attn_norm_D"], config)
        x_TD = x_TD + _attention(layer, y_TD, config, layer_config)
        y_TD = _norm(x_TD, layer["mlp_norm_D"], config)
        x_TD = x_TD + _mlp(layer, y_TD, config)
    y_TD = _norm(x_TD, params["final_norm_D"], config)
    head_VD = _array(params["embedding_VD" if config.tied_head else "head_VD"])
    logits_TV = y_TD @ head_VD[: config.vocab_size].T
    if config.final_soft_cap is not None:
        logits_TV = config.final_soft_cap * np.tanh(logits_TV / config.final_soft_cap)
    return logits_TV.astype(np.float32)


def oracle_greedy(
    params: Mapping[str, Any], prompt: Sequence[int], config: ModelConfig, *, num_tokens: int
) -> list[int]:
    """Returns the greedy continuation, the whole text computed anew for each token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(oracle_logits(params, token_ids, config)[-1].argmax()))
    return token_ids[len(prompt) :]


def oracle_attention(
    q_TNH: Array,
    k_SKH: Array,
    v_SKH: Array,
    *,
    first_position: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Returns attention of T queries of one sequence, the first at `first_position`; float64."""
    T, N, _ = q_TNH.shape
    S, K, _ = k_SKH.shape
    out_TNH = np.zeros(q_TNH.shape)
    for t in range(T):
        position = first_position + t
        first = 0 if window is None else max(0, position - window + 1)
        for n in range(N):
            k = n // (N // K)
            score_S = scale * (k_SKH[first : position + 1, k] @ q_TNH[t, n])
            if soft_cap is not None:
                score_S = soft_cap * np.tanh(score_S / soft_cap)
            weight_S = np.exp(score_S - score_S.max())
            out_TNH[t, n] = (weight_S / weight_S.sum()) @ v_SKH[first : position + 1, k]
    assert first_position + T <= S
    return out_TNH


def _attention(
    layer: Mapping[str, Any], y_TD: Array, config: ModelConfig, layer_config: LayerConfig
) -> Array:
    q_TNH = np.einsum("td,dnh->tnh", y_TD, _array(layer["q_DNH"]))
    k_TKH = np.einsum("td,dkh->tkh", y_TD, _array(layer["k_DKH"]))
    v_TKH = np.einsum("td,dkh->tkh", y_TD, _array(layer["v_DKH"]))
    if config.qkv_bias:
        q_TNH = q_TNH + _array(layer["q_bias_NH"])
        k_TKH = k_TKH + _array(layer["k_bias_KH"])
        v_TKH = v_TKH + _array(layer["v_bias_KH"])
    out_TNH = oracle_attention(
        _rope(q_TNH, layer_config.rope),
        _rope(k_TKH, layer_config.rope),
        v_TKH,
        first_position=0,
        scale=config.attention_scale or 1.0 / np.sqrt(config.head_dim),
        window=layer_config.window,
        soft_cap=config.attention_soft_cap,
    )
    out_TD = np.einsum("tnh,nhd->td", out_TNH, _array(layer["o_NHD"]))
    if config.o_bias:
        out_TD = out_TD + _array(layer["o_bias_D"])
    return np.asarray(out_TD)


def _rope(x_TNH: Array, rope: RopeConfig | None) -> Array:
    """Pair (h, h + H/2) as a complex number, turned by position * theta^(-2h/H)."""
    if rope is None:
        return x_TNH
    T, _, H = x_TNH.shape
    angle_TH = np.arange(T)[:, None] * rope.theta ** (-2.0 * np.arange(H // 2) / H)
    z_TNH = (x_TNH[..., : H // 2] + 1j * x_TNH[..., H // 2 :]) * np.exp(1j * angle_TH)[:, None]
    return np.concatenate([z_TNH.real, z_TNH.imag], axis=-1)


def _mlp(layer: Mapping[str, Any], y_TD: Array, config: ModelConfig) -> Array:
    gate_TF = y_TD @ _array(layer["gate_DF"])
    up_TF = y_TD @ _array(layer["up_DF"])
    if config.mlp_bias:
        gate_TF = gate_TF + _array(layer["gate_bias_F"])
        up_TF = up_TF + _array(layer["up_bias_F"])
    out_TD = (gate_TF / (1.0 + np.exp(-gate_TF)) * up_TF) @ _array(layer["down_FD"])
    return out_TD + _array(layer["down_bias_D"]) if config.mlp_bias else out_TD


def _norm(x_TD: Array, weight_D: ArrayLike, config: ModelConfig) -> Array:
    mean_T1 = (x_TD**2).mean(-1, keepdims=True)
    return x_TD / np.sqrt(mean_T1 + config.norm_eps) * _array(weight_D)


def _array(value: ArrayLike) -> Array:
    return np.asarray(value).astype(np.float64)
