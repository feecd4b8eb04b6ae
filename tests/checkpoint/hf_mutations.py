"""What could be wrong with a loaded model: each detail of each golden model, one at a time."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.model.config import ModelConfig, RopeConfig
from jaxserve.model.params import Params
from tests.model.families import (
    Mutation,
    change,
    change_experts,
    change_layers,
    change_rope,
    drop_of,
    norm_all_heads,
    turn_layers,
    widen_windows,
)
from tests.model.golden.hf_families import LONG_FACTORS, SHORT_FACTORS


def swap(one: str, other: str) -> Mutation:
    """Two parameters are in each other's place, in each layer that has them."""

    def exchange(layer: Params) -> Params:
        return layer | {one: layer[other], other: layer[one]} if one in layer else layer

    return lambda params, config: (in_layers(params, exchange), config)


def in_layers(params: Params, change_layer: Callable[[Params], Params]) -> Params:
    layers = {index: change_layer(layer) for index, layer in params["layers"].items()}
    return params | {"layers": layers}


def turn_experts(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Each expert has the weights of the next one; the router has not moved."""

    def turn(layer: Params) -> Params:
        names = {"gate_EDF", "up_EDF", "down_EFD"} & layer.keys()
        return layer | {name: np.roll(layer[name], 1, axis=0) for name in names}

    return in_layers(params, turn), config


def pair_neighbours(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Rows of q and k are in GGUF's order."""

    def mix(layer: Params) -> Params:
        new = {}
        for name in ("q_DNH", "k_DKH"):
            D, N, H = layer[name].shape
            split = layer[name].reshape(D, N, 2, H // 2)
            new[name] = split.swapaxes(2, 3).reshape(D, N, H)
        return layer | new

    return in_layers(params, mix), config


def share_heads_in_turn(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Query head n reads key head n % K instead of n // G."""

    def regroup(layer: Params) -> Params:
        N, K = config.num_heads, config.num_kv_heads
        order = np.arange(N).reshape(N // K, K).T.ravel()
        q_DNH, o_NHD = layer["q_DNH"][:, order], layer["o_NHD"][order]
        biases = {"q_bias_NH": layer["q_bias_NH"][order]} if "q_bias_NH" in layer else {}
        return layer | {"q_DNH": q_DNH, "o_NHD": o_NHD} | biases

    return in_layers(params, regroup), config


def shift_fused(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The fused tensor's rows are read as k, q, v."""

    def shift(layer: Params) -> Params:
        fused = np.concatenate([layer["q_DNH"], layer["k_DKH"]], axis=1)
        first = config.num_kv_heads
        return layer | {"k_DKH": fused[:, :first], "q_DNH": fused[:, first:]}

    return in_layers(params, shift), config


def norms_as_stored(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """w where the factor is 1 + w."""

    def unfold(leaves: Params) -> Params:
        return {name: x - 1 if "_norm_" in name else x for name, x in leaves.items()}

    return in_layers(unfold(params), unfold), config


def one_head_norm(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Each head normed alone, with the weight of the first."""

    def narrow(layer: Params) -> Params:
        return layer | {"q_norm_H": layer["q_norm_NH"][0], "k_norm_H": layer["k_norm_KH"][0]}

    return in_layers(params, narrow), dataclasses.replace(config, qk_norm="head")


def norm_before(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Post-norms read as the norms before attention and MLP, which a Llama has."""

    def rename(layer: Params) -> Params:
        return layer | {
            "attn_norm_D": layer["attn_post_norm_D"],
            "mlp_norm_D": layer["mlp_post_norm_D"],
        }

    changed = dataclasses.replace(config, pre_norms=True, post_norms=False)
    return in_layers(params, rename), changed


def swap_ropes(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The two RoPEs change places; windows stay."""
    one, other = dict.fromkeys(layer.rope for layer in config.layers)
    swapped = {one: other, other: one}
    layers = tuple(dataclasses.replace(layer, rope=swapped[layer.rope]) for layer in config.layers)
    return params, dataclasses.replace(config, layers=layers)


WINDOWS = {
    "no window": change_layers(window=None),
    "a key too many": widen_windows(1),
    "a key too few": widen_windows(-1),
}
SCALING = {"no scaling": change_rope(kind="default")}
EXPERTS = {
    "two experts of a token": change_experts(num_active=2),
    "each the next expert": turn_experts,
    "gate and up of the experts swapped": swap("gate_EDF", "up_EDF"),
}
MUTATIONS: dict[str, dict[str, Mutation]] = {
    "llama": {
        "other theta": change_rope(theta=10000.0),
        "scale of hidden / heads": change(attention_scale=6**-0.5),
        "no bias of q, k, v": change(qkv_bias=False),
        "no bias of o": change(o_bias=False),
        "no bias of the MLP": change(mlp_bias=False),
        "tied head": change(tied_head=True),
        "pairs of neighbours": pair_neighbours,
        "key heads in turn": share_heads_in_turn,
        "norms swapped": swap("attn_norm_D", "mlp_norm_D"),
        "gate and up swapped": swap("gate_DF", "up_DF"),
    },
    "mistral": WINDOWS
    | {"tanh gelu": change(activation="gelu_tanh"), "silu": change(activation="silu")},
    "qwen2": WINDOWS
    | {
        "windows in the first layers": lambda params, config: (
            params,
            dataclasses.replace(config, layers=config.layers[::-1]),
        ),
        "windows in all layers": change_layers(window=6),
        "no bias": change(qkv_bias=False),
        "no bias of k": drop_of("k_bias_KH"),
    },
    "qwen3": WINDOWS
    | {
        "windows in the other layers": turn_layers,
        "no q and k norm": change(qk_norm=None),
        "all heads normed together": norm_all_heads,
        "norms of q and k swapped": swap("q_norm_H", "k_norm_H"),
        "no bias of o": change(o_bias=False),
    },
    "gemma2": WINDOWS
    | {
        "windows in the other layers": turn_layers,
        "no attention cap": change(attention_soft_cap=None),
        "no final cap": change(final_soft_cap=None),
        "caps swapped": change(attention_soft_cap=3.0, final_soft_cap=2.0),
        "scale of the head size": change(attention_scale=None),
        "no embedding scale": change(embedding_scale=None),
        "exact gelu": change(activation="gelu"),
        "w instead of 1 + w": norms_as_stored,
        "no post-norms": change(post_norms=False),
        "norms in a Llama's places": swap("attn_post_norm_D", "mlp_norm_D"),
    },
    "gemma3": WINDOWS
    | {
        "the other RoPE": swap_ropes,
        "the local RoPE everywhere": change_layers(rope=RopeConfig(theta=300.0)),
        "no scaling of the global RoPE": lambda params, config: (
            params,
            dataclasses.replace(
                config,
                layers=tuple(
                    dataclasses.replace(layer, rope=RopeConfig(theta=2000.0))
                    if layer.window is None
                    else layer
                    for layer in config.layers
                ),
            ),
        ),
        "windows and RoPE in other layers": turn_layers,
        "no q and k norm": change(qk_norm=None),
        "w instead of 1 + w": norms_as_stored,
        "scale of the head size": change(attention_scale=None),
        "no embedding scale": change(embedding_scale=None),
        "no final cap": change(final_soft_cap=None),
    },
    "phi3": WINDOWS
    | {
        "the whole head turns": change_rope(rotary_dim=None),
        "two dimensions fewer turn": change_rope(rotary_dim=10),
        "fused rows as k, q, v": shift_fused,
        "k and v swapped": swap("k_DKH", "v_DKH"),
        "gate and up swapped": swap("gate_DF", "up_DF"),
    },
    "smollm3": WINDOWS
    | {
        "RoPE in all layers": change_layers(rope=RopeConfig(theta=2e6)),
        "RoPE in no layer": change_layers(rope=None),
        "no RoPE in the other layers": turn_layers,
        "theta of a Llama": change_rope(theta=1e4),
    },
    "olmo2": {
        "each head normed alone": one_head_norm,
        "no q and k norm": change(qk_norm=None),
        "no post-norms": change(post_norms=False),
        "norms before": norm_before,
        "post-norms swapped": swap("attn_post_norm_D", "mlp_post_norm_D"),
    },
    "mixtral": EXPERTS | {"shares not normalized": change_experts(normalize=False)},
    "qwen3_moe": WINDOWS
    | EXPERTS
    | {
        "shares normalized": change_experts(normalize=True),
        "no q and k norm": change(qk_norm=None),
    },
    "linear": SCALING | {"other factor": change_rope(factor=3.0)},
    "dynamic": SCALING
    | {
        "as linear": change_rope(kind="linear"),
        "other factor": change_rope(factor=3.0),
        "other original length": change_rope(original_max_position=17),
    },
    "llama3": SCALING
    | {
        "as linear": change_rope(kind="linear"),
        "other low factor": change_rope(low_freq_factor=1.5),
        "other high factor": change_rope(high_freq_factor=3.0),
        "other original length": change_rope(original_max_position=32),
    },
    "yarn": SCALING
    | {
        "as linear": change_rope(kind="linear", attention_factor=1.0),
        "no attention factor": change_rope(attention_factor=1.0),
        "other bounds": change_rope(beta_fast=32.0),
        "other original length": change_rope(original_max_position=64),
    },
    "yarn_mscale": {
        "attention factor without mscale": change_rope(attention_factor=0.1 * np.log(4) + 1),
        "whole bounds": change_rope(truncate=True),
        "other slow bound": change_rope(beta_slow=1.0),
    },
    "longrope": SCALING
    | {
        "short factors": change_rope(long_factors=tuple(SHORT_FACTORS)),
        "long factors": change_rope(short_factors=tuple(LONG_FACTORS)),
        "no attention factor": change_rope(attention_factor=1.0),
        "other original length": change_rope(original_max_position=17),
    },
    "phi3_longrope": {
        "no attention factor": change_rope(attention_factor=1.0),
        "short factors": change_rope(long_factors=tuple(SHORT_FACTORS[:6])),
    },
}
