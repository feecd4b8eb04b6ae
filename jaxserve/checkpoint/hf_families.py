"""The families of Hugging Face models that are supported: what each has, and its defaults.

Defaults are those of the config classes of transformers 5.24. The five sizes that the tensors'
shapes follow from have none: a file must give them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

# Which layers slide a window, where config.json does not list `layer_types`: none, all that have a
# window, those from `max_window_layers` on, all but each n-th, or those without RoPE.
WindowPattern = Literal["none", "all", "from_layer", "periodic", "without_rope"]

COMMON_DEFAULTS: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_theta": 10000.0,
}
GEMMA_DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
QWEN_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class HfFamily:
    """One family.

    Attributes:
      name: `ModelConfig.architecture`.
      model_type: config.json's word.
      defaults: of absent settings, over `COMMON_DEFAULTS`.
      follows: settings that mean something here; elsewhere they must be neutral.
      bias: of the attention's projections: q, k and v; or all four if `attention_bias` says so.
      window_switch: a window counts only if `use_sliding_window` says so.
      is_scaled: embedding rows are multiplied by sqrt(hidden_size), scores by
        query_pre_attn_scalar ** -0.5.
      activation_key: the setting that names the activation.
      local_theta_key: the setting with the RoPE base of layers with a window, which then have a
        RoPE of their own that `rope_scaling` does not touch.
      longrope_words: RoPE types that are longrope by another name.
      is_rope_partial: `partial_rotary_factor` is followed.
    """

    name: str
    model_type: str
    defaults: Mapping[str, object]
    follows: frozenset[str] = frozenset()
    bias: Literal["none", "qkv", "flag"] = "none"
    qk_norm: Literal["head", "all"] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    window: WindowPattern = "none"
    window_switch: bool = False
    is_scaled: bool = False
    activation_key: str = "hidden_act"
    local_theta_key: str | None = None
    longrope_words: frozenset[str] = frozenset()
    is_rope_partial: bool = False


WINDOW = frozenset({"sliding_window"})
SWITCHED_WINDOW = WINDOW | {"use_sliding_window"}
GEMMA = WINDOW | {"final_logit_softcapping", "query_pre_attn_scalar"}
EXPERTS = frozenset({"num_experts", "num_local_experts"})

FAMILIES: dict[str, HfFamily] = {
    "LlamaForCausalLM": HfFamily(
        name="llama", model_type="llama", defaults={}, follows=frozenset({"mlp_bias"}), bias="flag"
    ),
    "MistralForCausalLM": HfFamily(
        name="mistral",
        model_type="mistral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        follows=WINDOW,
        window="all",
    ),
    "Qwen2ForCausalLM": HfFamily(
        name="qwen2",
        model_type="qwen2",
        defaults=QWEN_DEFAULTS,
        follows=SWITCHED_WINDOW,
        bias="qkv",
        window="from_layer",
        window_switch=True,
    ),
    "Qwen3ForCausalLM": HfFamily(
        name="qwen3",
        model_type="qwen3",
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        follows=SWITCHED_WINDOW,
        bias="flag",
        qk_norm="head",
        window="from_layer",
        window_switch=True,
    ),
    "Gemma2ForCausalLM": HfFamily(
        name="gemma2",
        model_type="gemma2",
        defaults={
            **GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        follows=GEMMA | {"attn_logit_softcapping"},
        bias="flag",
        post_norms=True,
        window="periodic",
        is_scaled=True,
        activation_key="hidden_activation",
    ),
    "Gemma3ForCausalLM": HfFamily(
        name="gemma3",
        model_type="gemma3_text",
        defaults={
            **GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        follows=GEMMA | {"rope_local_base_freq"},
        bias="flag",
        qk_norm="head",
        post_norms=True,
        window="periodic",
        is_scaled=True,
        activation_key="hidden_activation",
        local_theta_key="rope_local_base_freq",
    ),
    "Phi3ForCausalLM": HfFamily(
        name="phi3",
        model_type="phi3",
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        follows=WINDOW,
        window="all",
        longrope_words=frozenset({"su", "yarn"}),
        is_rope_partial=True,
    ),
    "SmolLM3ForCausalLM": HfFamily(
        name="smollm3",
        model_type="smollm3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        follows=SWITCHED_WINDOW | {"mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        bias="flag",
        window="without_rope",
        window_switch=True,
    ),
    "Olmo2ForCausalLM": HfFamily(
        name="olmo2",
        model_type="olmo2",
        defaults={"rms_norm_eps": 1e-5},
        bias="flag",
        qk_norm="all",
        pre_norms=False,
        post_norms=True,
    ),
    "MixtralForCausalLM": HfFamily(
        name="mixtral",
        model_type="mixtral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        follows=WINDOW | EXPERTS,
        window="all",
    ),
    "Qwen3MoeForCausalLM": HfFamily(
        name="qwen3_moe",
        model_type="qwen3_moe",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        follows=SWITCHED_WINDOW | EXPERTS | {"norm_topk_prob"},
        bias="flag",
        qk_norm="head",
        window="all",
        window_switch=True,
    ),
}
