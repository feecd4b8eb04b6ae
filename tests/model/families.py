"""Small decoders with the details of each family, and what would be wrong with them.

Sizes are T1's: an odd vocabulary, heads * head_dim that is not the hidden size, grouped heads. Two
layers where all are alike: compiling is what these cost.
"""

import dataclasses
from collections.abc import Callable

import flax.traverse_util
import jax
import numpy as np

from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params, abstract_params
from tests.model.paged import T1

ROPE = RopeConfig()
LOCAL, GLOBAL = ROPE, RopeConfig(theta=1e6, kind="linear", factor=8.0)
LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=16)
YARN = RopeConfig(
    theta=1e4,
    kind="yarn",
    factor=4.0,
    original_max_position=16,
    beta_fast=3.0,
    beta_slow=0.25,
    attention_factor=1.139,
)
DYNAMIC = RopeConfig(kind="dynamic", factor=2.0, original_max_position=16)
LONGROPE = RopeConfig(
    kind="longrope",
    rotary_dim=12,
    original_max_position=16,
    short_factors=(1.0, 1.1, 1.3, 1.2, 1.5, 1.4),
    long_factors=(1.0, 1.7, 2.9, 4.1, 6.0, 8.5),
    attention_factor=1.19,
)


def layers(*layer_configs: LayerConfig) -> tuple[LayerConfig, ...]:
    return layer_configs


def _same(rope: RopeConfig | None, window: int | None = None) -> tuple[LayerConfig, ...]:
    return (LayerConfig(rope=rope, window=window),) * 2


GEMMA2 = dataclasses.replace(
    T1,
    architecture="gemma2",
    layers=layers(
        LayerConfig(rope=ROPE, window=6), LayerConfig(rope=ROPE), LayerConfig(rope=ROPE, window=6)
    ),
    tied_head=True,
    activation="gelu_tanh",
    post_norms=True,
    embedding_scale=48**0.5,
    attention_scale=24**-0.5,
    attention_soft_cap=2.0,
    final_soft_cap=3.0,
)
GEMMA3 = dataclasses.replace(
    GEMMA2,
    architecture="gemma3",
    layers=layers(
        LayerConfig(rope=LOCAL, window=6),
        LayerConfig(rope=LOCAL, window=6),
        LayerConfig(rope=GLOBAL),
    ),
    qk_norm="head",
    attention_soft_cap=None,
    final_soft_cap=None,
)
EXPERTS = ExpertsConfig(num_experts=6, num_active=2, mlp_size=40, normalize=True)

FAMILIES: dict[str, ModelConfig] = {
    "mistral": dataclasses.replace(T1, architecture="mistral", layers=_same(ROPE, window=7)),
    "qwen2": dataclasses.replace(T1, architecture="qwen2", layers=_same(ROPE), qkv_bias=True),
    "qwen3": dataclasses.replace(T1, architecture="qwen3", layers=_same(ROPE), qk_norm="head"),
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": dataclasses.replace(T1, architecture="phi3", layers=_same(LONGROPE, window=20)),
    "smollm3": dataclasses.replace(
        T1,
        architecture="smollm3",
        layers=layers(LayerConfig(rope=ROPE), LayerConfig(rope=None), LayerConfig(rope=ROPE)),
    ),
    "olmo2": dataclasses.replace(
        T1,
        architecture="olmo2",
        layers=_same(ROPE),
        pre_norms=False,
        post_norms=True,
        qk_norm="all",
    ),
    "mixtral": dataclasses.replace(
        T1,
        architecture="mixtral",
        layers=(LayerConfig(rope=ROPE, mlp="experts"),) * 2,
        experts=EXPERTS,
    ),
    "qwen3_moe": dataclasses.replace(
        T1,
        architecture="qwen3_moe",
        layers=layers(
            LayerConfig(rope=ROPE, mlp="experts"),
            LayerConfig(rope=ROPE),
            LayerConfig(rope=ROPE, mlp="experts"),
        ),
        qk_norm="head",
        experts=dataclasses.replace(EXPERTS, normalize=False),
    ),
    "exact gelu, biased": dataclasses.replace(
        T1, activation="gelu", o_bias=True, mlp_bias=True, layers=_same(RopeConfig(rotary_dim=4))
    ),
    "linear": dataclasses.replace(T1, layers=_same(RopeConfig(kind="linear", factor=4.0))),
    "dynamic": dataclasses.replace(T1, layers=_same(DYNAMIC)),
    "llama3": dataclasses.replace(T1, layers=_same(LLAMA3)),
    "yarn": dataclasses.replace(T1, layers=_same(YARN)),
}


def random_params(config: ModelConfig, *, seed: int = 0) -> Params:
    """Returns float32 parameters: weights and biases N(0, 0.3), norms N(1, 0.3).

    `init_params` says the same on the device, where every shape costs a compile.
    """
    rng, flat = np.random.default_rng(seed), {}
    for path, spec in abstract_params(config, np.float32).items():
        value = 0.3 * rng.standard_normal(spec.shape) + ("_norm_" in path)
        if path.endswith("_VD"):
            value[config.vocab_size :] = 0.0
        flat[path] = value.astype(np.float32)
    nested: Params = flax.traverse_util.unflatten_dict(flat, sep="/")
    return nested


Mutation = Callable[[Params, ModelConfig], tuple[Params, ModelConfig]]


def change(**fields: object) -> Mutation:
    """The config says something else."""
    return lambda params, config: (params, dataclasses.replace(config, **fields))  # type: ignore[arg-type]  # by name


def change_layers(**fields: object) -> Mutation:
    """All layers say something else."""

    def mutate(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
        new = tuple(dataclasses.replace(layer, **fields) for layer in config.layers)  # type: ignore[arg-type]  # by name
        return params, dataclasses.replace(config, layers=new)

    return mutate


def change_rope(**fields: object) -> Mutation:
    """The first layer's RoPE with something else, in every layer that had it."""

    def mutate(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
        old = config.layers[0].rope
        assert old is not None
        rope = dataclasses.replace(old, **fields)  # type: ignore[arg-type]  # by name
        new = tuple(
            dataclasses.replace(layer, rope=rope) if layer.rope == old else layer
            for layer in config.layers
        )
        return params, dataclasses.replace(config, layers=new)

    return mutate


def change_experts(**fields: object) -> Mutation:
    def mutate(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
        assert config.experts is not None
        experts = dataclasses.replace(config.experts, **fields)  # type: ignore[arg-type]  # by name
        return params, dataclasses.replace(config, experts=experts)

    return mutate


def widen_windows(by: int) -> Mutation:
    def mutate(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
        new = tuple(
            layer if layer.window is None else dataclasses.replace(layer, window=layer.window + by)
            for layer in config.layers
        )
        return params, dataclasses.replace(config, layers=new)

    return mutate


def turn_layers(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Each layer has what the next one should have."""
    return params, dataclasses.replace(config, layers=(*config.layers[1:], config.layers[0]))


def swap_ropes(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Local layers have the global RoPE, global layers the local one; windows stay."""
    other = {LOCAL: GLOBAL, GLOBAL: LOCAL}
    new = tuple(
        dataclasses.replace(layer, rope=other[layer.rope]) for layer in config.layers if layer.rope
    )
    return params, dataclasses.replace(config, layers=new)


def norms_of_one_plus(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """1 + w where the factor is w."""
    added = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 1.0 if "_norm_" in path[-1].key else leaf, params
    )
    return added, config


def norm_all_heads(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The weight of one head for each head, but all heads normed together."""

    def widen(layer: Params) -> Params:
        q = np.broadcast_to(layer["q_norm_H"], (config.num_heads, config.head_dim))
        k = np.broadcast_to(layer["k_norm_H"], (config.num_kv_heads, config.head_dim))
        return layer | {"q_norm_NH": q, "k_norm_KH": k}

    new = {index: widen(layer) for index, layer in params["layers"].items()}
    return params | {"layers": new}, dataclasses.replace(config, qk_norm="all")


def drop_of(name: str) -> Mutation:
    """One parameter of each layer is as if it were not there: zeros, or ones in a norm."""

    def mutate(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
        neutral = np.ones_like if "_norm_" in name else np.zeros_like
        new = {
            index: layer | {name: neutral(layer[name])} for index, layer in params["layers"].items()
        }
        return params | {"layers": new}, config

    return mutate


# What is wrong, by family. Each must change the logits by far more than the tolerance.
MUTATIONS: dict[str, dict[str, Mutation]] = {
    "mistral": {
        "a key too many": widen_windows(1),
        "a key too few": widen_windows(-1),
        "no window": change_layers(window=None),
        "other eps": change(norm_eps=1e-3),
    },
    "qwen2": {name: drop_of(name) for name in ("q_bias_NH", "k_bias_KH", "v_bias_KH")},
    "qwen3": {
        "no q norm": change(qk_norm=None),
        "all heads normed together": norm_all_heads,
        "q norm without weight": drop_of("q_norm_H"),
        "k norm without weight": drop_of("k_norm_H"),
        "1 + w": norms_of_one_plus,
    },
    "gemma2": {
        "no attention cap": change(attention_soft_cap=None),
        "no final cap": change(final_soft_cap=None),
        "scale of the head size": change(attention_scale=None),
        "no embedding scale": change(embedding_scale=None),
        "exact gelu": change(activation="gelu"),
        "silu": change(activation="silu"),
        "no post-norms": change(post_norms=False),
        "no pre-norms": change(pre_norms=False),
        "1 + w": norms_of_one_plus,
        "windows in the other layers": turn_layers,
        "a key too many": widen_windows(1),
        "a key too few": widen_windows(-1),
    },
    "gemma3": {
        "RoPE of the other layers": swap_ropes,
        "all layers local": change_layers(rope=LOCAL),
        "linear scaling ignored": change_layers(rope=RopeConfig(theta=1e6)),
        "windows and RoPE in the other layers": turn_layers,
        "all heads normed together": norm_all_heads,
    },
    "phi3": {
        "short factors": change_rope(original_max_position=1000),
        "other factors": change_rope(long_factors=(1.0, 2.0, 2.9, 4.1, 6.0, 8.5)),
        "no attention factor": change_rope(attention_factor=1.0),
        "the whole head turns": change_rope(kind="default", rotary_dim=None),
        "two dimensions fewer turn": change_rope(kind="default", rotary_dim=10),
    },
    "smollm3": {
        "RoPE in all layers": change_layers(rope=ROPE),
        "no RoPE": change_layers(rope=None),
        "no RoPE in another layer": turn_layers,
        "other theta": change_rope(theta=9000.0),
    },
    "olmo2": {
        "no attention post-norm weight": drop_of("attn_post_norm_D"),
        "no MLP post-norm weight": drop_of("mlp_post_norm_D"),
        "no post-norms": change(post_norms=False),
        "no q and k norm": change(qk_norm=None),
        "no k norm weight": drop_of("k_norm_KH"),
    },
    "mixtral": {
        "shares not normalized": change_experts(normalize=False),
        "one expert": change_experts(num_active=1),
        "three experts": change_experts(num_active=3),
        "no router": drop_of("router_DE"),
    },
    "qwen3_moe": {"shares normalized": change_experts(normalize=True)},
    "exact gelu, biased": {
        "approximate gelu": change(activation="gelu_tanh"),
        "no o bias": drop_of("o_bias_D"),
        "no gate bias": drop_of("gate_bias_F"),
        "no up bias": drop_of("up_bias_F"),
        "no down bias": drop_of("down_bias_D"),
        "the whole head turns": change_rope(rotary_dim=None),
    },
    "linear": {"no scaling": change_rope(kind="default"), "factor": change_rope(factor=3.0)},
    "dynamic": {
        "no scaling": change_rope(kind="default"),
        "linear": change_rope(kind="linear"),
        "original length": change_rope(original_max_position=17),
    },
    "llama3": {
        "no scaling": change_rope(kind="default"),
        "linear": change_rope(kind="linear"),
        "low factor": change_rope(low_freq_factor=1.5),
        "high factor": change_rope(high_freq_factor=3.0),
    },
    "yarn": {
        "no scaling": change_rope(kind="default"),
        "no attention factor": change_rope(attention_factor=1.0),
        "fast bound": change_rope(beta_fast=32.0, beta_slow=1.0),
        "bounds not whole": change_rope(truncate=False),
    },
}
