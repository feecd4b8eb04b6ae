"""Oracle O: the decoder written once more, in numpy, float64, without a cache, pages or batches.

It shares no code with `jaxserve.model`: only the parameters' names and the fields of the config.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig

Array = NDArray[np.float64]


def oracle_logits(
    params: Mapping[str, Any],
    token_ids: Sequence[int],
    config: ModelConfig,
    *,
    prompt_len: int = 0,
) -> NDArray[np.float32]:
    """Returns the logits after each token, float32 [len(token_ids), vocab_size].

    Args:
      prompt_len: how many of the tokens were read at once: where RoPE depends on the length, they
        have it in common, and each later one has its own.
    """
    x_TD = _embed(params, token_ids, config)
    lens = [max(prompt_len, position + 1) for position in range(len(token_ids))]
    for index, layer_config in enumerate(config.layers):
        layer = params["layers"][str(index)]
        y_TD = _input(layer, x_TD, "attn", config)
        y_TD = _attention(layer, y_TD, config, layer_config, lens)
        x_TD = x_TD + _output(layer, y_TD, "attn", config)
        y_TD = _input(layer, x_TD, "mlp", config)
        if layer_config.mlp == "experts":
            y_TD = _experts(layer, y_TD, config)
        else:
            y_TD = _mlp(layer, y_TD, config)
        x_TD = x_TD + _output(layer, y_TD, "mlp", config)
    y_TD = _norm(x_TD, params["final_norm_D"], config)
    head_VD = _array(params["embedding_VD" if config.tied_head else "head_VD"])
    return _cap(y_TD @ head_VD[: config.vocab_size].T, config.final_soft_cap).astype(np.float32)


def oracle_greedy(
    params: Mapping[str, Any], prompt: Sequence[int], config: ModelConfig, *, num_tokens: int
) -> list[int]:
    """Returns the greedy continuation, the whole text computed anew for each token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits_TV = oracle_logits(params, token_ids, config, prompt_len=len(prompt))
        token_ids.append(int(logits_TV[-1].argmax()))
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
            score_S = _cap(scale * (k_SKH[first : position + 1, k] @ q_TNH[t, n]), soft_cap)
            weight_S = np.exp(score_S - score_S.max())
            out_TNH[t, n] = (weight_S / weight_S.sum()) @ v_SKH[first : position + 1, k]
    assert first_position + T <= S
    return out_TNH


def _embed(params: Mapping[str, Any], token_ids: Sequence[int], config: ModelConfig) -> Array:
    x_TD = np.asarray(params["embedding_VD"])[np.asarray(token_ids)]
    if config.embedding_scale is None:
        return _array(x_TD)
    return _array(x_TD) * float(np.array(config.embedding_scale).astype(x_TD.dtype))


def _input(layer: Mapping[str, Any], x_TD: Array, part: str, config: ModelConfig) -> Array:
    return _norm(x_TD, layer[f"{part}_norm_D"], config) if config.pre_norms else x_TD


def _output(layer: Mapping[str, Any], y_TD: Array, part: str, config: ModelConfig) -> Array:
    return _norm(y_TD, layer[f"{part}_post_norm_D"], config) if config.post_norms else y_TD


def _attention(
    layer: Mapping[str, Any],
    y_TD: Array,
    config: ModelConfig,
    layer_config: LayerConfig,
    lens: Sequence[int],
) -> Array:
    q_TNH = np.einsum("td,dnh->tnh", y_TD, _array(layer["q_DNH"]))
    k_TKH = np.einsum("td,dkh->tkh", y_TD, _array(layer["k_DKH"]))
    v_TKH = np.einsum("td,dkh->tkh", y_TD, _array(layer["v_DKH"]))
    if config.qkv_bias:
        q_TNH = q_TNH + _array(layer["q_bias_NH"])
        k_TKH = k_TKH + _array(layer["k_bias_KH"])
        v_TKH = v_TKH + _array(layer["v_bias_KH"])
    q_weight, k_weight = _norm_weights(layer, config)
    out_TNH = oracle_attention(
        _prepare(q_TNH, q_weight, config, layer_config.rope, lens),
        _prepare(k_TKH, k_weight, config, layer_config.rope, lens),
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


def _norm_weights(layer: Mapping[str, Any], config: ModelConfig) -> tuple[Any, Any]:
    match config.qk_norm:
        case None:
            return None, None
        case "head":
            return layer["q_norm_H"], layer["k_norm_H"]
        case "all":
            return layer["q_norm_NH"], layer["k_norm_KH"]


def _prepare(
    x_TNH: Array,
    norm_weight: ArrayLike | None,
    config: ModelConfig,
    rope: RopeConfig | None,
    lens: Sequence[int],
) -> Array:
    """Returns q or k as attention reads it: normed first, then turned."""
    if norm_weight is not None:
        x_TNH = _norm_heads(x_TNH, norm_weight, config)
    return _rope(x_TNH, rope, lens)


def _rope(x_TNH: Array, rope: RopeConfig | None, lens: Sequence[int]) -> Array:
    """Pair (h, h + R/2) of the first R dimensions as a complex number, turned and stretched."""
    if rope is None:
        return x_TNH
    T, _, H = x_TNH.shape
    R = H if rope.rotary_dim is None else rope.rotary_dim
    angle_TH = np.stack([t * oracle_frequencies(rope, R, lens[t]) for t in range(T)])
    turn_TH = rope.attention_factor * np.exp(1j * angle_TH)
    z_TNH = (x_TNH[..., : R // 2] + 1j * x_TNH[..., R // 2 : R]) * turn_TH[:, None]
    return np.concatenate([z_TNH.real, z_TNH.imag, x_TNH[..., R:]], axis=-1)


def oracle_frequencies(rope: RopeConfig, rotary_dim: int, length: int) -> Array:
    """Returns the radians per position of each pair, in a sequence of this length."""
    pairs, theta = range(rotary_dim // 2), rope.theta
    original = rope.original_max_position or 0
    if rope.kind == "dynamic" and length > original:
        growth = rope.factor * length / original - (rope.factor - 1)
        theta *= growth ** (rotary_dim / (rotary_dim - 2))
    plain = np.array([theta ** (-2.0 * pair / rotary_dim) for pair in pairs])
    match rope.kind:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "longrope":
            factors = rope.long_factors if length > original else rope.short_factors
            return np.asarray(plain / np.array(factors))
        case "llama3":
            return np.array([_llama3(float(f), rope, original) for f in plain])
        case "yarn":
            kept = [_yarn_share(pair, rope, rotary_dim, original) for pair in pairs]
            return plain * kept + plain / rope.factor * (1.0 - np.array(kept))


def _llama3(frequency: float, rope: RopeConfig, original: int) -> float:
    turns = original * frequency / (2 * math.pi)  # over the original length
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return share * frequency + (1.0 - share) * frequency / rope.factor


def _yarn_share(pair: int, rope: RopeConfig, rotary_dim: int, original: int) -> float:
    """How much of the pair keeps its own frequency: 1 for the fast pairs, falling to 0."""

    def pair_that_turns(times: float) -> float:
        theta_power = original / (2 * math.pi * times)
        return rotary_dim / 2 * math.log(theta_power) / math.log(rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    return 1.0 - min(max((pair - first) / (last - first), 0.0), 1.0)


def _mlp(layer: Mapping[str, Any], y_TD: Array, config: ModelConfig) -> Array:
    gate_TF = y_TD @ _array(layer["gate_DF"])
    up_TF = y_TD @ _array(layer["up_DF"])
    if config.mlp_bias:
        gate_TF = gate_TF + _array(layer["gate_bias_F"])
        up_TF = up_TF + _array(layer["up_bias_F"])
    out_TD = (_activation(gate_TF, config) * up_TF) @ _array(layer["down_FD"])
    return out_TD + _array(layer["down_bias_D"]) if config.mlp_bias else out_TD


def _experts(layer: Mapping[str, Any], y_TD: Array, config: ModelConfig) -> Array:
    assert config.experts is not None
    router_DE, out_TD = _array(layer["router_DE"]), np.zeros(y_TD.shape)
    weights = [_array(layer[name]) for name in ("gate_EDF", "up_EDF", "down_EFD")]
    for t, y_D in enumerate(y_TD):
        for expert, share in _choose(y_D @ router_DE, config.experts).items():
            gate_DF, up_DF, down_FD = (weight[expert] for weight in weights)
            hidden_F = _activation(y_D @ gate_DF, config) * (y_D @ up_DF)
            out_TD[t] += share * (hidden_F @ down_FD)
    return out_TD


def _choose(logits_E: Array, experts: ExpertsConfig) -> dict[int, float]:
    """Returns the weight of each of a token's experts."""
    share_E = np.exp(logits_E - logits_E.max())
    share_E = share_E / share_E.sum()
    best = sorted(range(experts.num_experts), key=lambda e: -share_E[e])[: experts.num_active]
    total = sum(share_E[e] for e in best) if experts.normalize else 1.0
    return {e: share_E[e] / total for e in best}


def _activation(x_TF: Array, config: ModelConfig) -> Array:
    match config.activation:
        case "silu":
            return x_TF / 2 * (1.0 + np.tanh(x_TF / 2))  # x * sigmoid(x), which cannot overflow
        case "gelu":
            return np.asarray(x_TF / 2 * (1.0 + np.vectorize(math.erf)(x_TF / math.sqrt(2))))
        case "gelu_tanh":
            inner_TF = math.sqrt(2 / math.pi) * (x_TF + 0.044715 * x_TF**3)
            return x_TF / 2 * (1.0 + np.tanh(inner_TF))


def _norm(x_TD: Array, weight_D: ArrayLike, config: ModelConfig) -> Array:
    mean_T1 = (x_TD**2).mean(-1, keepdims=True)
    return x_TD / np.sqrt(mean_T1 + config.norm_eps) * _array(weight_D)


def _norm_heads(x_TNH: Array, weight: ArrayLike, config: ModelConfig) -> Array:
    """A weight of one head norms each head alone; one of all heads norms them together."""
    weight_or_NH = _array(weight)
    axes = (-1,) if weight_or_NH.ndim == 1 else (-2, -1)
    mean = (x_TNH**2).mean(axes, keepdims=True)
    return x_TNH / np.sqrt(mean + config.norm_eps) * weight_or_NH


def _cap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def _array(value: ArrayLike) -> Array:
    return np.asarray(value).astype(np.float64)
