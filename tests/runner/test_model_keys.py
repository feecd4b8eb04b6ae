"""The whole description of a model is in the key of its programs."""

import dataclasses
from collections.abc import Iterator

from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.runner.lowering import ProgramKey
from jaxserve.runner.programs import program_keys
from tests.runner.driver import MODEL, tiny_sizes

# Another value of each field of the model than in this one, which has all parts.
ROPE = RopeConfig(
    kind="longrope",
    rotary_dim=4,
    original_max_position=16,
    short_factors=(1.0, 2.0),
    long_factors=(1.0, 3.0),
)
LAYER = LayerConfig(rope=ROPE, window=6, mlp="experts")
EXPERTS = ExpertsConfig(num_experts=4, num_active=2, mlp_size=8, normalize=True)
EVERYTHING = dataclasses.replace(MODEL, layers=(LAYER, LAYER), experts=EXPERTS)
OTHER_MODEL: dict[str, object] = {
    "architecture": "qwen3",
    "vocab_size": 130,
    "hidden_size": 48,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "mlp_size": 64,
    "max_position": 128,
    "norm_eps": 1e-6,
    "layers": (LAYER,),
    "tied_head": False,
    "activation": "gelu",
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": "head",
    "pre_norms": False,
    "post_norms": True,
    "embedding_scale": 4.0,
    "attention_scale": 0.2,
    "attention_soft_cap": 2.0,
    "final_soft_cap": 3.0,
    "experts": None,
}
OTHER_LAYER: dict[str, object] = {"rope": None, "window": None, "mlp": "dense"}
OTHER_ROPE: dict[str, object] = {
    "theta": 9000.0,
    "kind": "default",
    "rotary_dim": None,
    "factor": 2.0,
    "original_max_position": 17,
    "low_freq_factor": 2.0,
    "high_freq_factor": 5.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "attention_factor": 1.1,
    "short_factors": (1.0, 1.0),
    "long_factors": (1.0, 1.0),
}
OTHER_EXPERTS: dict[str, object] = {
    "num_experts": 5,
    "num_active": 1,
    "mlp_size": 16,
    "normalize": False,
}


def _other_models() -> Iterator[tuple[str, ModelConfig]]:
    """One field is another at a time; of a layer and its RoPE, those of the last layer."""
    replace, model = dataclasses.replace, EVERYTHING

    def with_layer(layer: LayerConfig) -> ModelConfig:
        return replace(model, layers=(LAYER, layer))

    for name, value in OTHER_MODEL.items():
        yield name, replace(model, **{name: value})
    for name, value in OTHER_LAYER.items():
        yield f"layer.{name}", with_layer(replace(LAYER, **{name: value}))
    for name, value in OTHER_ROPE.items():
        rope = replace(ROPE, **{name: value})
        yield f"rope.{name}", with_layer(replace(LAYER, rope=rope))
    for name, value in OTHER_EXPERTS.items():
        yield f"experts.{name}", replace(model, experts=replace(EXPERTS, **{name: value}))


def test_every_field_of_the_model_changes_every_key() -> None:
    sizes = tiny_sizes()

    def keys_of(model: ModelConfig) -> set[ProgramKey]:
        return set(program_keys(dataclasses.replace(sizes.spec, model=model), sizes.scheme))

    keys = keys_of(EVERYTHING)
    assert keys == keys_of(dataclasses.replace(EVERYTHING))
    for name, model in _other_models():
        assert not keys & keys_of(model), name


def test_no_field_of_the_model_is_left_out_above() -> None:
    for kind, other in (
        (ModelConfig, OTHER_MODEL),
        (LayerConfig, OTHER_LAYER),
        (RopeConfig, OTHER_ROPE),
        (ExpertsConfig, OTHER_EXPERTS),
    ):
        assert {field.name for field in dataclasses.fields(kind)} == other.keys()
