"""What is read from config.json: every family's defaults, RoPE in its forms, and refusals."""

import math
from typing import Any

import pytest

from jaxserve.checkpoint.hf_config import read_model_config
from jaxserve.checkpoint.hf_families import FAMILIES
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ExpertsConfig, ModelConfig, RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 112,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def read(name: str = "LlamaForCausalLM", **settings: object) -> ModelConfig:
    """The configuration of a file with these settings; `...` leaves a key out."""
    given = {"architectures": [name], **SIZES, **settings}
    kept = {key: value for key, value in given.items() if value is not ...}
    return read_model_config(kept, num_tensors=10_000, where="config.json")


def rope(name: str = "LlamaForCausalLM", **settings: object) -> RopeConfig | None:
    return read(name, **settings).layers[0].rope


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


# Of each family, what an absent key means: from the config classes of transformers 5.24.
# theta, eps, kv heads of 32, head size of 48 / 8, positions, tied
DEFAULTS = {
    "LlamaForCausalLM": (1e4, 1e-6, 8, 6, 2048, False),
    "MistralForCausalLM": (1e4, 1e-6, 8, 6, 131072, False),
    "Qwen2ForCausalLM": (1e4, 1e-6, 32, 6, 32768, False),
    "Qwen3ForCausalLM": (1e4, 1e-6, 32, 128, 32768, False),
    "Gemma2ForCausalLM": (1e4, 1e-6, 4, 256, 8192, True),
    "Gemma3ForCausalLM": (1e4, 1e-6, 4, 256, 131072, True),
    "Phi3ForCausalLM": (1e4, 1e-5, 8, 6, 4096, False),
    "SmolLM3ForCausalLM": (2e6, 1e-6, 4, 6, 32768, True),
    "Olmo2ForCausalLM": (1e4, 1e-5, 8, 6, 2048, False),
    "MixtralForCausalLM": (1e6, 1e-5, 8, 6, 131072, False),
    "Qwen3MoeForCausalLM": (1e4, 1e-6, 4, 6, 32768, False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_have_the_familys_defaults(name: str) -> None:
    theta, eps, kv_heads, head_dim, max_position, is_tied = DEFAULTS[name]
    num_heads = 32 if kv_heads == 32 else 8  # 32 cannot be shared by 8
    config = read(
        name,
        num_key_value_heads=...,
        max_position_embeddings=...,
        num_attention_heads=num_heads,
        hidden_size=6 * num_heads,
    )
    first = config.layers[0].rope
    assert first is not None
    assert (first.theta, config.norm_eps) == (theta, eps)
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert (config.max_position, config.tied_head) == (max_position, is_tied)


@pytest.mark.parametrize("name", FAMILIES)
def test_five_sizes_must_be_given(name: str) -> None:
    for size in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    ):
        with pytest.raises(CheckpointError, match=f"lacks {size}"):
            read(name, **{size: ...})


def test_windows_follow_each_familys_rule() -> None:
    assert windows(read("MistralForCausalLM", sliding_window=7)) == [7] * 6
    assert windows(read("MistralForCausalLM")) == [4096] * 6
    assert windows(read("MistralForCausalLM", sliding_window=None)) == [None] * 6
    assert windows(read("MixtralForCausalLM")) == [None] * 6
    assert windows(read("MixtralForCausalLM", sliding_window=5)) == [5] * 6
    assert windows(read("Phi3ForCausalLM", sliding_window=5)) == [5] * 6
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        slides: dict[str, Any] = {"sliding_window": 6, "max_window_layers": 4}
        assert windows(read(name, **slides)) == [None] * 6
        assert windows(read(name, **slides, use_sliding_window=True)) == [None] * 4 + [6] * 2
    moe: dict[str, Any] = {"sliding_window": 6, "max_window_layers": 4}
    assert windows(read("Qwen3MoeForCausalLM", **moe)) == [None] * 6
    assert windows(read("Qwen3MoeForCausalLM", **moe, use_sliding_window=True)) == [6] * 6
    assert windows(read("Gemma2ForCausalLM", sliding_window=6)) == [6, None] * 3
    assert windows(read("Gemma3ForCausalLM")) == [4096] * 5 + [None]
    assert windows(read("Gemma3ForCausalLM", sliding_window_pattern=3)) == [4096, 4096, None] * 2
    assert windows(read("SmolLM3ForCausalLM", sliding_window=6)) == [None] * 6
    smol = read("SmolLM3ForCausalLM", sliding_window=6, use_sliding_window=True)
    assert windows(smol) == [None, None, None, 6, None, None]


def test_listed_layer_types_rule_over_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    for name in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        assert windows(read(name, layer_types=kinds, sliding_window=6)) == [None, 6] * 3
    qwen = read("Qwen2ForCausalLM", layer_types=kinds, sliding_window=6, use_sliding_window=True)
    assert windows(qwen) == [None, 6] * 3
    assert windows(read(layer_types=["full_attention"] * 6)) == [None] * 6


def test_layers_without_rope_are_listed_or_follow_the_interval() -> None:
    def has_rope(**settings: object) -> list[bool]:
        config = read("SmolLM3ForCausalLM", **settings)
        return [layer.rope is not None for layer in config.layers]

    assert has_rope() == [True, True, True, False, True, True]
    assert has_rope(no_rope_layer_interval=2) == [True, False] * 3
    assert has_rope(no_rope_layers=[0, 1, 1, 0, 1, 1, 0]) == [False, True, True, False, True, True]


def test_gemma_3_has_a_rope_of_its_own_in_layers_with_a_window() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    forms: list[dict[str, Any]] = [
        {"rope_scaling": scaling, "rope_theta": 1e5, "rope_local_base_freq": 500.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e5, **scaling},
                "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
            }
        },
    ]
    for form in forms:
        config = read("Gemma3ForCausalLM", **form)
        assert config.layers[0].rope == RopeConfig(theta=500.0)
        assert config.layers[5].rope == RopeConfig(theta=1e5, kind="linear", factor=8.0)
    plain = read("Gemma3ForCausalLM")
    assert plain.layers[0].rope == RopeConfig(theta=1e4)
    assert plain.layers[5].rope == RopeConfig(theta=1e6)


def test_gemmas_numbers_are_read() -> None:
    config = read("Gemma2ForCausalLM", query_pre_attn_scalar=24, head_dim=16)
    assert config.embedding_scale == 48**0.5
    assert config.scale == 24**-0.5
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.activation == "gelu_tanh"
    off = read("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_soft_cap, off.final_soft_cap) == (None, None)
    assert read("Gemma2ForCausalLM", hidden_activation="gelu").activation == "gelu"
    gemma3 = read("Gemma3ForCausalLM")
    assert (gemma3.attention_soft_cap, gemma3.final_soft_cap) == (None, None)
    assert gemma3.scale == 256**-0.5


def test_biases_are_where_the_family_has_them() -> None:
    def biases(name: str, **settings: object) -> tuple[bool, bool, bool]:
        config = read(name, **settings)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases("LlamaForCausalLM") == (False, False, False)
    assert biases("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("SmolLM3ForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("Qwen2ForCausalLM", attention_bias=False) == (True, False, False)
    for name in ("Qwen3", "Qwen3Moe", "Olmo2", "Gemma2", "Gemma3"):
        assert biases(f"{name}ForCausalLM", attention_bias=True) == (True, True, False)
    for name in ("Mistral", "Mixtral", "Phi3"):
        assert biases(f"{name}ForCausalLM", attention_bias=True) == (False, False, False)


def test_experts_are_read_under_both_names() -> None:
    mixtral = read("MixtralForCausalLM")
    assert mixtral.experts == ExpertsConfig(
        num_experts=8, num_active=2, mlp_size=112, normalize=True
    )
    assert {layer.mlp for layer in mixtral.layers} == {"experts"}
    qwen: dict[str, Any] = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
    for key in ("num_experts", "num_local_experts"):
        config = read("Qwen3MoeForCausalLM", **qwen, **{key: 5})
        assert config.experts == ExpertsConfig(
            num_experts=5, num_active=3, mlp_size=40, normalize=False
        )
    assert read("Qwen3MoeForCausalLM").experts == ExpertsConfig(
        num_experts=128, num_active=8, mlp_size=768, normalize=False
    )
    sparse = read("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[1])
    kinds = ["dense", "dense", "dense", "experts", "dense", "experts"]
    assert [layer.mlp for layer in sparse.layers] == kinds
    assert read("Qwen3MoeForCausalLM", num_experts=0).experts is None


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_rope_is_read_in_both_forms() -> None:
    linear = {"factor": 2.0}
    for form in (
        {"rope_theta": 7.5, "rope_scaling": {"type": "linear", **linear}},
        {"rope_theta": 7.5, "rope_scaling": {"rope_type": "linear", **linear}},
        {"rope_parameters": {"rope_theta": 7.5, "rope_type": "linear", **linear}},
        {
            "rope_scaling": {"type": "linear", **linear},
            "rope_parameters": {"rope_theta": 7.5, "rope_type": "linear", **linear},
            "rope_theta": 7.5,
        },
    ):
        assert rope(**form) == RopeConfig(theta=7.5, kind="linear", factor=2.0)
    assert rope(rope_theta=7.5, rope_parameters={"rope_theta": 7.5}) == RopeConfig(theta=7.5)
    assert rope(rope_scaling={"rope_type": "default"}) == RopeConfig()


def test_every_kind_of_rope_has_its_numbers() -> None:
    assert rope(rope_scaling={"type": "dynamic", "factor": 2}) == RopeConfig(
        kind="dynamic", factor=2.0, original_max_position=64
    )
    dynamic = {"type": "dynamic", "factor": 2.5}
    assert read("LlamaForCausalLM", rope_scaling=dynamic).max_position == 160
    assert rope(rope_scaling=LLAMA3) == RopeConfig(
        kind="llama3",
        factor=8.0,
        original_max_position=16,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    long = rope(rope_scaling=LONG)
    assert long == RopeConfig(
        kind="longrope",
        factor=4.0,
        original_max_position=16,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(16)),
        short_factors=(1.0, 1.5, 2.0),
        long_factors=(2.0, 3.0, 4.0),
    )
    given = rope(rope_scaling={**LONG, "factor": 3.0, "attention_factor": 1.25})
    assert given is not None
    assert (given.factor, given.attention_factor) == (3.0, 1.25)


def test_yarn_reads_its_attention_factor_and_its_bounds() -> None:
    def yarn(**scaling: object) -> RopeConfig:
        read_rope = rope(rope_scaling=YARN | scaling)
        assert read_rope is not None
        return read_rope

    plain = yarn()
    assert plain.attention_factor == 0.1 * math.log(4) + 1
    assert (plain.beta_fast, plain.beta_slow, plain.truncate) == (32.0, 1.0, True)
    assert yarn(attention_factor=0.7).attention_factor == 0.7
    both = yarn(mscale=0.5, mscale_all_dim=2.0)
    wanted = (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)
    assert both.attention_factor == pytest.approx(wanted, rel=1e-12)
    assert yarn(mscale=0.5).attention_factor == plain.attention_factor
    assert yarn(factor=None).factor == 64 / 16
    assert yarn(original_max_position_embeddings=None).original_max_position == 64
    changed = yarn(beta_fast=20, beta_slow=2, truncate=False)
    assert (changed.beta_fast, changed.beta_slow, changed.truncate) == (20.0, 2.0, False)


def test_the_original_length_beside_the_scaling_comes_first() -> None:
    for kind in (YARN, LLAMA3, LONG):
        beside = rope(rope_scaling=kind, original_max_position_embeddings=32)
        assert beside is not None
        assert beside.original_max_position == 32
    phi = rope("Phi3ForCausalLM", rope_scaling=LONG)  # its config class has a default
    assert phi is not None
    assert phi.original_max_position == 4096


def test_phi_3_turns_a_part_of_a_head_and_calls_longrope_by_old_names() -> None:
    part = {"head_dim": 16, "partial_rotary_factor": 0.75}
    assert rope("Phi3ForCausalLM", **part) == RopeConfig(rotary_dim=12)
    inner = {"partial_rotary_factor": 0.75, "rope_theta": 1e4}
    assert rope("Phi3ForCausalLM", head_dim=16, rope_parameters=inner) == RopeConfig(rotary_dim=12)
    for word in ("su", "yarn", "longrope"):
        old = rope(
            "Phi3ForCausalLM",
            rope_scaling=LONG | {"type": word},
            original_max_position_embeddings=16,
        )
        assert old == rope(rope_scaling=LONG)


def test_settings_that_compute_nothing_are_let_through() -> None:
    idle: dict[str, Any] = {
        "pretraining_tp": 2,  # how a product was cut while training
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "use_cache": False,
        "rope_interleaved": False,
        "auto_map": {"AutoConfig": "x.Y"},
        "max_window_layers": 28,
        "rope_scaling": None,
    }
    assert read(**idle) == read()


TEXT_CONFIG: dict[str, Any] = {"text_config": {}, "model_type": "gemma3"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GPT2LMHeadModel", {}, "'GPT2LMHeadModel'.* supported are LlamaFor.*Qwen3Moe"),
        ("Gemma3ForConditionalGeneration", TEXT_CONFIG, "takes more than text.*text-only"),
        ("LlamaForCausalLM", {"model_type": "mistral"}, "architectures is .* but model_type is 'm"),
        ("LlamaForCausalLM", {"architectures": ..., "model_type": "gpt2"}, "'gpt2', which is not"),
        ("LlamaForCausalLM", {"architectures": [["LlamaForCausalLM"]]}, "which is not supported"),
        ("LlamaForCausalLM", {"architectures": ...}, "None, which is not supported"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "hidden_act is 'relu'.*supported are silu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "quick_gelu"}, "hidden_activation is 'quick"),
        ("LlamaForCausalLM", {"sliding_window": 4096}, "sliding_window=4096"),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("LlamaForCausalLM", {"logits_scaling": 8.0}, r"logits_scaling=8\.0"),
        ("LlamaForCausalLM", {"attention_multiplier": 0.5}, r"attention_multiplier=0\.5"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.5}, r"residual_multiplier=0\.5"),
        ("LlamaForCausalLM", {"embedding_multiplier": 2.0}, r"embedding_multiplier=2\.0"),
        ("LlamaForCausalLM", {"num_local_experts": 4}, "num_local_experts=4"),
        ("MistralForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
        ("Qwen3ForCausalLM", {"attn_logit_softcapping": 5.0}, r"attn_logit_softcapping=5\.0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 5.0}, r"attn_logit_softcapping=5\.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_att"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
        ("MixtralForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "full_attention in every"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 6}, "sliding_attention in ev"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 6}, "has 'chunked_attention'"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "no sliding_window in"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "lists 1 layers of 6"),
        ("LlamaForCausalLM", {"layer_types": [{"kind": 1}]}, "layer_types is .* a list of texts"),
        ("LlamaForCausalLM", {"layer_types": "full_attention"}, "layer_types is .* a list of"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 layers of 6"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": "x"}, "a list of whole numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "interval is 0, but must be at"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "pattern is 0, but must be at least"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "sparse_step is 0, but must be at"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "2 of 1 experts"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 0}, "experts of a token is 0"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, r"attention soft-cap is -1\.0"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0.0}, r"final soft-cap is 0\.0"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0, but must be"),
        ("MistralForCausalLM", {"sliding_window": 1 << 31}, "at most 2147483647"),
        ("LlamaForCausalLM", {"hidden_size": "64"}, "hidden_size is '64', but must be a whole"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "cannot share 3"),
        ("LlamaForCausalLM", {"head_dim": 15}, "RoPE needs an even one"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_layers is 0"),
        ("LlamaForCausalLM", {"num_hidden_layers": 1 << 40}, "there are only 10000 tensors"),
        ("LlamaForCausalLM", {"attention_bias": "yes"}, "must be true or false"),
        ("LlamaForCausalLM", {"rms_norm_eps": float("nan")}, "norm_eps is nan, but must be"),
        ("LlamaForCausalLM", {"rms_norm_eps": 0}, r"norm_eps is 0\.0, but must be positive"),
        ("LlamaForCausalLM", {"rms_norm_eps": 10**400}, "must be a number"),
        ("LlamaForCausalLM", {"rope_theta": float("inf")}, "rope_theta is inf, but must be"),
        ("LlamaForCausalLM", {"rope_theta": True}, "rope_theta is True, but must be a number"),
        ("LlamaForCausalLM", {"rope_theta": 1.0}, r"rope_theta is 1\.0, but must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": 1e300}, "at most 1e"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Llama", {"rope_scaling": {"type": "foo"}}, "type 'foo' .* supported are default, linear"),
        ("Llama", {"rope_scaling": {"rope_type": ["yarn"]}}, r"type \['yarn'\] is not supported"),
        ("Llama", {"rope_scaling": LONG | {"type": "su"}}, "type 'su' is not supported"),
        ("Llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "RoPE's settings lack factor"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor of RoPE is 0"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "must be a finite number"),
        ("Llama", {"rope_scaling": {"factor": 2.0}}, "of the type default has {'factor': 2.0}"),
        ("Llama", {"rope_scaling": LLAMA3 | {"mrope_section": [1]}}, "has {'mrope_section'"),
        ("Llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "lack low_freq_factor"),
        ("Llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "have 0 < low_freq_factor"),
        ("Llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "< high_freq_factor"),
        ("Llama", {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "factor": 1.0}}, "{'alpha'"),
        ("Llama", {"rope_scaling": YARN | {"truncate": "no"}}, "truncate of RoPE is 'no'"),
        ("Llama", {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0"),
        ("Llama", {"rope_scaling": YARN | {"beta_fast": -1}}, "a beta_fast above 0"),
        ("Llama", {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": -8}}, "mscale of RoPE"),
        ("Llama", {"rope_scaling": LONG | {"long_factor": [1.0]}}, "long_factor .* has 1 numbers"),
        ("Llama", {"rope_scaling": LONG | {"short_factor": [0, 1, 2]}}, "a list of positive"),
        ("Llama", {"rope_scaling": LONG | {"short_mscale": 1.1}}, "has {'short_mscale': 1.1}"),
        ("Llama", {"original_max_position_embeddings": 0, "rope_scaling": YARN}, "whole number fr"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not"),
        ("Phi3", {"partial_rotary_factor": 1.5}, r"must be a number in \(0, 1\]"),
        ("Phi3", {"partial_rotary_factor": 0.5}, "an even number of 6 dimensions"),
        ("Llama", {"rope_theta": 2.0, "rope_parameters": {"rope_theta": 1.0}}, "contradicts"),
        ("Llama", {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "contradicts itself"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 1.0}}, "an object for each of full_attent"),
        ("Gemma3", {"rope_parameters": {"full_attention": 1.0}}, "full_attention is 1.0"),
    ],
)  # fmt: skip
def test_rope_that_is_not_followed_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(f"{name}ForCausalLM", **settings)
