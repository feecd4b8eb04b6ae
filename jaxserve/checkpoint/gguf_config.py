"""What a GGUF file's metadata says about the decoder."""

import math
from typing import Literal

from jaxserve.checkpoint.checks import check_config, check_num_layers
from jaxserve.checkpoint.gguf_families import FAMILIES, GgufFamily
from jaxserve.checkpoint.gguf_file import GgufFile
from jaxserve.checkpoint.gguf_keys import GgufKeys
from jaxserve.checkpoint.gguf_rope import read_rope
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig

# Keys of the architecture that say nothing this engine would have to act on.
IDLE_KEYS = frozenset({"tensor_data_layout", "vocab_size"})
# Keys that must have these values, because anything else is computed differently.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax; 0 is not said
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "pooling_type": (0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def read_model_config(file: GgufFile) -> ModelConfig:
    """Returns the decoder's configuration.

    Raises:
      CheckpointError: the architecture or one of its settings is not supported, or a key is
        missing or of the wrong type.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path} is of the architecture {architecture!r:.80}, which is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    num_parts = file.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise CheckpointError(
            f"{file.path} is one of {num_parts!s:.80} parts, which is not supported; join them "
            "with llama-gguf-split --merge"
        )
    family, keys = FAMILIES[architecture], GgufKeys(file, architecture)
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(num_heads, 1))
    vocab_size = _read_vocab_size(keys)
    max_position = keys.integer("context_length")
    rope = read_rope(
        keys,
        family,
        rotary_dim=_read_rotary_dim(keys, family, head_dim),
        head_dim=head_dim,
        max_position=max_position,
    )
    num_layers = check_num_layers(keys.integer("block_count"), len(file.tensors), keys.where)
    mlp_size = keys.integer("feed_forward_length")
    experts = _read_experts(keys, family, mlp_size)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=mlp_size,
        max_position=max_position,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        layers=_read_layers(keys, family, rope, num_layers=num_layers, experts=experts),
        tied_head="output.weight" not in file.tensors,
        activation=family.activation,
        qkv_bias=any(name.endswith("attn_q.bias") for name in file.tensors),
        o_bias=any(name.endswith("attn_output.bias") for name in file.tensors),
        mlp_bias=any(name.endswith("ffn_gate.bias") for name in file.tensors),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        embedding_scale=max(hidden_size, 0) ** 0.5 if family.is_scaled else None,
        attention_scale=(
            max(hidden_size // max(num_heads, 1), 1) ** -0.5
            if num_layers == family.layers_scaled_by_width
            else None
        ),
        attention_soft_cap=_read_cap(keys, "attn_logit_softcapping", family.attention_soft_cap),
        final_soft_cap=_read_cap(keys, "final_logit_softcapping", family.final_soft_cap),
        experts=experts,
    )
    _refuse_unread(keys)
    check_config(config, keys.where)
    return config


def _read_vocab_size(keys: GgufKeys) -> int:
    """Returns the rows of the embedding."""
    embedding = keys.file.tensors.get("token_embd.weight")
    if not embedding or not embedding.shape:
        return keys.integer("vocab_size")
    vocab_size, stated = embedding.shape[0], keys.value("vocab_size")
    if stated not in (None, vocab_size):
        raise CheckpointError(
            f"{keys.where}: {keys.full_name('vocab_size')} is {stated!s:.200}, but "
            f"token_embd.weight has {vocab_size} rows; the file is damaged"
        )
    return vocab_size


def _read_rotary_dim(keys: GgufKeys, family: GgufFamily, head_dim: int) -> int:
    """Returns how many dimensions of a head RoPE turns; all heads must have one size."""
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    sizes = {"attention.value_length": keys.integer("attention.value_length", head_dim)}
    if not family.is_rotary_partial:
        sizes["rope.dimension_count"] = rotary_dim
    for name, size in sizes.items():
        if size != head_dim:
            raise CheckpointError(
                f"{keys.where}: {keys.full_name(name)} is {size}, but heads have {head_dim}; "
                "models where they differ are not supported"
            )
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise keys.wrong("rope.dimension_count", rotary_dim, f"even and at most {head_dim}")
    return rotary_dim


def _read_experts(keys: GgufKeys, family: GgufFamily, mlp_size: int) -> ExpertsConfig | None:
    if family.experts == "no":
        return None
    num_experts = keys.integer("expert_count", None if family.experts == "always" else 0)
    num_active = keys.integer("expert_used_count", None if num_experts else 0)
    if num_experts == num_active == 0 and family.experts == "maybe":
        return None
    if not 0 < num_active <= num_experts:
        raise keys.wrong("expert_used_count", num_active, f"from 1 to {num_experts}, the experts")
    if family.experts == "always":
        mlp_size = keys.integer("expert_feed_forward_length", mlp_size // num_active)
    return ExpertsConfig(
        num_experts=num_experts, num_active=num_active, mlp_size=mlp_size, normalize=True
    )


def _read_layers(
    keys: GgufKeys,
    family: GgufFamily,
    rope: RopeConfig,
    *,
    num_layers: int,
    experts: ExpertsConfig | None,
) -> tuple[LayerConfig, ...]:
    mlp: Literal["dense", "experts"] = "dense" if experts is None else "experts"
    plain = LayerConfig(rope=rope, mlp=mlp)
    window = 0
    if family.window != "none":
        window = keys.integer("attention.sliding_window", family.default_window)
    if window < 0:
        raise keys.wrong("attention.sliding_window", window, "at least 0")
    has_window = _read_pattern(keys, family, num_layers)
    local_theta = family.local_theta
    if local_theta == "global":
        local_theta = rope.theta
    if local_theta is not None:
        rope = RopeConfig(theta=keys.number("rope.freq_base_swa", local_theta))
    if window == 0:
        return (plain,) * num_layers
    local = LayerConfig(rope=rope, window=window, mlp=mlp)
    return tuple(local if has_window[index] else plain for index in range(num_layers))


def _read_pattern(keys: GgufKeys, family: GgufFamily, num_layers: int) -> list[bool]:
    """Returns which layers have the window, if there is one."""
    if family.window != "periodic":
        return [True] * num_layers
    name = "attention.sliding_window_pattern"
    pattern = keys.value(name)
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(isinstance(entry, bool) for entry in pattern):
            raise keys.wrong(name, pattern, f"true or false for each of {num_layers} layers")
        return [entry is True for entry in pattern[:num_layers]]
    period = keys.integer(name, family.default_pattern)
    if period < 0:
        raise keys.wrong(name, period, "at least 0")
    return [period == 0 or index % period < period - 1 for index in range(num_layers)]


def _read_cap(keys: GgufKeys, name: str, default: float | None) -> float | None:
    if default is None:
        return None
    cap = keys.number(name, default)
    if not 0 <= cap < math.inf:
        raise keys.wrong(name, cap, "at least 0")
    return cap or None


def _refuse_unread(keys: GgufKeys) -> None:
    """Refuse every setting that would change the numbers and is not followed here."""
    refused = [
        f"{keys.full_name(name)}={value!s:.80}"
        for name, value in keys.unread().items()
        if name not in IDLE_KEYS and value not in NEUTRAL_VALUES.get(name, ())
    ]
    if refused:
        raise CheckpointError(
            f"{keys.where} needs what is not supported: {', '.join(refused)}; "
            "it is refused because ignoring it would give wrong text"
        )
