"""What a Hugging Face config.json says, as the decoder's configuration."""

import dataclasses
from collections.abc import Mapping

from jaxserve.checkpoint.checks import MAX_SIZE, check_config, check_num_layers
from jaxserve.checkpoint.hf_families import COMMON_DEFAULTS, FAMILIES, HfFamily
from jaxserve.checkpoint.hf_layers import read_layers
from jaxserve.checkpoint.hf_settings import HfSettings
from jaxserve.errors import CheckpointError
from jaxserve.model.config import Activation, ExpertsConfig, LayerConfig, ModelConfig

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Settings that change the numbers, with the values that change nothing. Any other value is refused,
# except where the family follows the setting.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "mlp_bias": (None, False),
    "moe_layers": (None,),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "no_rope_layer_interval": (None, 0),
    "no_rope_layers": (None, []),
    "norm_topk_prob": (None, True),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1.0),
    "rope_interleaved": (None, False),
    "rope_local_base_freq": (None,),
    "routed_scaling_factor": (None, 1.0),
    "scoring_func": (None, "softmax"),
    "shared_expert_intermediate_size": (None, 0),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
    "use_sliding_window": (None, False),
}


def read_model_config(given: Mapping[str, object], *, num_tensors: int, where: str) -> ModelConfig:
    """Returns the decoder's configuration; `tied_head` is the flag, the tensors may overrule it.

    Args:
      where: the file's name, for messages.

    Raises:
      CheckpointError: a setting is missing, of the wrong type, or not supported.
    """
    family = find_family(given, where)
    settings = HfSettings(given, {**COMMON_DEFAULTS, **family.defaults}, where)
    _refuse_unsupported(given, family, where)
    num_layers = check_num_layers(settings.integer("num_hidden_layers"), num_tensors, where)
    hidden_size, num_heads = (
        settings.integer("hidden_size"),
        settings.integer("num_attention_heads"),
    )
    head_dim = settings.optional_integer("head_dim")
    if head_dim is None:
        head_dim = hidden_size // max(num_heads, 1)
    num_kv_heads = settings.optional_integer("num_key_value_heads")
    has_bias = family.bias == "flag" and settings.flag("attention_bias")
    experts = _read_experts(settings, family)
    layers = read_layers(settings, family, num_layers, head_dim=head_dim, experts=experts)
    config = ModelConfig(
        architecture=family.name,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        mlp_size=settings.integer("intermediate_size"),
        max_position=_count_positions(settings, layers),
        norm_eps=settings.number("rms_norm_eps"),
        layers=layers,
        tied_head=settings.flag("tie_word_embeddings"),
        activation=_read_activation(settings, family),
        qkv_bias=has_bias or family.bias == "qkv",
        o_bias=has_bias,
        mlp_bias=settings.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        experts=experts,
    )
    if family.is_scaled:
        config = _add_scales(config, settings)
    check_config(config, where)
    return config


def find_family(given: Mapping[str, object], where: str) -> HfFamily:
    """Returns the family that `architectures`, or else `model_type`, names.

    Raises:
      CheckpointError: it is not supported, or the two do not go together.
    """
    named, model_type = given.get("architectures"), given.get("model_type")
    if isinstance(named, list) and named:
        known = [FAMILIES[name] for name in named if isinstance(name, str) and name in FAMILIES]
    else:
        known = [family for family in FAMILIES.values() if family.model_type == model_type]
    if not known:
        what = named or model_type
        hint = ""
        if "text_config" in given or "ForConditionalGeneration" in str(what):
            hint = "; it takes more than text, take the folder of a text-only model (…ForCausalLM)"
        raise CheckpointError(
            f"{where} is of the architecture {what!r:.200}, which is not supported; "
            f"supported are {', '.join(FAMILIES)}{hint}"
        )
    if model_type not in (None, known[0].model_type):
        raise CheckpointError(
            f"{where} contradicts itself: architectures is {named!r:.200}, but model_type is "
            f"{model_type!r:.80} instead of {known[0].model_type!r}"
        )
    return known[0]


def _refuse_unsupported(given: Mapping[str, object], family: HfFamily, where: str) -> None:
    refused = [
        f"{name}={given[name]!r:.200}"
        for name, neutral in NEUTRAL_VALUES.items()
        if name not in family.follows and given.get(name) not in neutral
    ]
    if refused:
        raise CheckpointError(
            f"{where} needs what is not supported: {', '.join(refused)}; "
            "it is refused because ignoring it would give wrong text"
        )


def _read_activation(settings: HfSettings, family: HfFamily) -> Activation:
    word = settings.text(family.activation_key)
    if word not in ACTIVATIONS:
        raise CheckpointError(
            f"{settings.where}: {family.activation_key} is {word!r:.80}, which is not supported; "
            f"supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[word]


def _count_positions(settings: HfSettings, layers: tuple[LayerConfig, ...]) -> int:
    """Returns how long a text may be.

    Files with dynamic RoPE give the length before scaling, beyond which alone it does anything.
    """
    positions = settings.integer("max_position_embeddings")
    dynamic = [layer.rope.factor for layer in layers if layer.rope and layer.rope.kind == "dynamic"]
    if not dynamic or positions > MAX_SIZE:
        return positions
    return int(min(positions * max(1.0, *dynamic), MAX_SIZE))


def _add_scales(config: ModelConfig, settings: HfSettings) -> ModelConfig:
    """Returns Gemma's factors and caps."""
    scalar = settings.number("query_pre_attn_scalar")
    if not scalar > 0:
        raise settings.wrong("query_pre_attn_scalar", scalar, "positive")
    return dataclasses.replace(
        config,
        embedding_scale=max(config.hidden_size, 0) ** 0.5,
        attention_scale=scalar**-0.5,
        attention_soft_cap=settings.optional_number("attn_logit_softcapping"),
        final_soft_cap=settings.optional_number("final_logit_softcapping"),
    )


def _read_experts(settings: HfSettings, family: HfFamily) -> ExpertsConfig | None:
    if "num_local_experts" not in family.follows:
        return None
    # One family writes either name, by the version that saved it.
    name = "num_local_experts" if settings.given.get("num_experts") is None else "num_experts"
    num_experts = settings.integer(name)
    if num_experts == 0:
        return None
    has_own_size = "moe_intermediate_size" in family.defaults
    return ExpertsConfig(
        num_experts=num_experts,
        num_active=settings.integer("num_experts_per_tok"),
        mlp_size=settings.integer("moe_intermediate_size" if has_own_size else "intermediate_size"),
        normalize=settings.flag("norm_topk_prob"),
    )
