"""What GGUF files leave unsaid, and the keys that say it: defaults as in llama.cpp's code."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.gguf import GgufSource
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig, RopeConfig
from tests.checkpoint.twins import TWINS, Twin, make_twin_weights, write_twin_gguf

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def read(folder: Path, twin: Twin | str, keys: dict[str, Any]) -> ModelConfig:
    twin = TWINS[twin] if isinstance(twin, str) else twin
    file = write_twin_gguf(folder / "m.gguf", twin, make_twin_weights(twin), keys=keys)
    return GgufSource(file).load_header().config


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def ropes(config: ModelConfig) -> list[RopeConfig]:
    return [layer.rope for layer in config.layers if layer.rope is not None]


def test_gemma_2_has_its_window_and_caps_without_keys(tmp_path: Path) -> None:
    absent = dict.fromkeys([WINDOW, "attn_logit_softcapping", "final_logit_softcapping"])
    config = read(tmp_path, TWINS["gemma2"].with_layers(5), absent)
    assert windows(config) == [4096, None, 4096, None, 4096]
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert {rope.theta for rope in ropes(config)} == {5000.0}
    assert (config.activation, config.embedding_scale) == ("gelu_tanh", 8.0)


def test_a_cap_of_zero_is_none(tmp_path: Path) -> None:
    zeros = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    config = read(tmp_path, "gemma2", zeros)
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)


def test_gemma_3_slides_five_layers_of_six_with_a_rope_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, TWINS["gemma3"].with_layers(13), {})
    assert windows(config) == [*[6] * 5, None, *[6] * 5, None, 6]
    local = RopeConfig(theta=10000.0)
    everywhere = RopeConfig(theta=5000.0, kind="linear", factor=8.0)
    assert ropes(config) == [*[local] * 5, everywhere, *[local] * 5, everywhere, local]
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_3_without_a_window_has_one_rope(tmp_path: Path, window: int | None) -> None:
    config = read(tmp_path, "gemma3", {WINDOW: window})
    assert windows(config) == [None] * 7
    assert {rope.theta for rope in ropes(config)} == {5000.0}


def test_patterns_and_local_bases_are_read(tmp_path: Path) -> None:
    listed = [True, False, False, True, True, False, True, True]  # one more than layers
    config = read(tmp_path, "gemma3", {PATTERN: listed, "rope.freq_base_swa": 2000.0})
    assert windows(config) == [6, None, None, 6, 6, None, 6]
    assert [rope.theta for rope in ropes(config)] == [2e3, 5e3, 5e3, 2e3, 2e3, 5e3, 2e3]
    assert windows(read(tmp_path, "gemma3", {PATTERN: 3})) == [6, 6, None, 6, 6, None, 6]
    assert windows(read(tmp_path, "gemma3", {PATTERN: 1})) == [None] * 7
    assert windows(read(tmp_path, "gemma3", {PATTERN: 0})) == [6] * 7


@pytest.mark.parametrize("pattern", [[True] * 6, [6] * 7, 2.5])
def test_a_pattern_that_is_none_is_refused(tmp_path: Path, pattern: object) -> None:
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.sliding_window_pattern is "):
        read(tmp_path, "gemma3", {PATTERN: pattern})


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_its_queries_by_its_width(
    tmp_path: Path, name: str, num_layers: int
) -> None:
    config = read(tmp_path, TWINS[name].with_layers(num_layers), {})
    assert config.scale == (64 // 8) ** -0.5
    config = read(tmp_path, TWINS[name].with_layers(num_layers - 1), {})
    assert config.scale == 16**-0.5


def test_yarns_numbers_are_read(tmp_path: Path) -> None:
    (rope, _) = ropes(read(tmp_path, "qwen2", {}))
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    keys = {
        "rope.scaling.original_context_length": None,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 2.0,
        "rope.scaling.yarn_attn_factor": 1.25,
        "rope.scaling.attn_factor": 2.0,
    }
    (rope, _) = ropes(read(tmp_path, "qwen2", keys))
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 2.0, 2.5)
    assert rope.original_max_position == 128


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.finetuned": True}, 1.0),
    ],
)
def test_linear_scaling_old_and_new(tmp_path: Path, keys: dict[str, Any], factor: float) -> None:
    (rope, _) = ropes(read(tmp_path, "llama", keys))
    assert (rope.kind, rope.factor) == ("default" if factor == 1.0 else "linear", factor)


def test_llama_3s_divisors_are_the_files_own(tmp_path: Path) -> None:
    (rope, _) = ropes(read(tmp_path, "llama 3", {}))
    assert rope.short_factors == rope.long_factors
    assert len(rope.short_factors) == 8
    assert (rope.short_factors[0], rope.short_factors[-1]) == (1.0, 8.0)
    assert all(float(np.float32(divisor)) == divisor for divisor in rope.short_factors)


def test_phi_3_turns_a_part_of_a_head(tmp_path: Path) -> None:
    (rope, _) = ropes(read(tmp_path, "phi3 longrope", {}))
    assert (rope.rotary_dim, len(rope.short_factors), len(rope.long_factors)) == (12, 6, 6)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    with pytest.raises(CheckpointError, match="dimension_count is 13, but must be even"):
        read(tmp_path, "phi3", {"rope.dimension_count": 13})


def test_an_expert_without_a_size_has_its_share_of_the_mlp(tmp_path: Path) -> None:
    assert (
        read(tmp_path, "qwen3moe", {}).experts
        == read(tmp_path, "qwen3moe", {"expert_feed_forward_length": None}).experts
    )
    experts = read(tmp_path, "mixtral", {}).experts
    assert experts is not None
    assert (experts.num_experts, experts.num_active, experts.mlp_size) == (4, 2, 96)
    assert experts.normalize


def test_divisors_where_no_file_has_them_are_unexpected(tmp_path: Path) -> None:
    twin = TWINS["qwen3"]
    weights = make_twin_weights(twin)
    file = write_twin_gguf(
        tmp_path / "m.gguf", twin, weights, extra={"rope_freqs.weight": np.ones(8, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"unexpected: rope_freqs\.weight"):
        GgufSource(file).load_header()
