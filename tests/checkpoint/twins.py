"""The same random model as a Hugging Face folder and as a GGUF file, for every GGUF architecture.

The file is written as llama.cpp's converter would (convert_hf_to_gguf.py and conversion/*.py), with
the gguf library's own table of names: nothing here knows how `jaxserve.checkpoint` reads GGUF.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from jaxserve.checkpoint.hf_config import read_model_config
from jaxserve.checkpoint.layout import hf_sources, stored_shapes
from tests.checkpoint.writers import (
    GgufRecipe,
    Weights,
    add_tensor,
    add_tokenizer,
    add_value,
    permute,
)
from tests.text.vocabularies import byte_backend

BASE: dict[str, Any] = {
    "vocab_size": byte_backend().get_vocab_size(),  # not a multiple of 64
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# llama.cpp takes heads * head_dim = hidden for granted in these architectures.
SQUARE = {"hidden_size": 128, "head_dim": None}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
GEMMA = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,  # GGUF cannot say another
    "sliding_window": 6,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin:
    """One model.

    Attributes:
      architecture: GGUF's word.
      settings: config.json, over `BASE`; None removes a key.
      keys: of the GGUF file, over what the converter writes.
    """

    hf: str
    model_type: str
    architecture: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """All of config.json."""
        names = {"architectures": [self.hf], "model_type": self.model_type}
        merged = BASE | dict(self.settings) | names
        return {name: value for name, value in merged.items() if value is not None}

    def with_layers(self, num_layers: int) -> "Twin":
        """The same but for its size, by which llama.cpp knows some models."""
        settings = {**self.settings, "num_hidden_layers": num_layers}
        return dataclasses.replace(self, settings=settings)


def _llama(settings: Mapping[str, Any] | None = None) -> Twin:
    return Twin(
        hf="LlamaForCausalLM", model_type="llama", architecture="llama", settings=settings or {}
    )


TWINS = {
    "llama": _llama(),
    "llama 3": _llama({"rope_scaling": LLAMA3}),
    "llama linear": _llama(
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "attention_bias": True,
            "tie_word_embeddings": True,
        }
    ),
    "llama 9/3": _llama({"num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama 32/4": _llama({"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 8}),
    "llama MQA": _llama({"num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama MHA": _llama({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None}),
    "mistral": Twin(
        hf="MistralForCausalLM",
        model_type="mistral",
        architecture="llama",
        settings={"sliding_window": 7},
        keys={"attention.sliding_window": 7},  # the converter leaves it out
    ),
    "mixtral": Twin(
        hf="MixtralForCausalLM",
        model_type="mixtral",
        architecture="llama",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": Twin(
        hf="Qwen2ForCausalLM",
        model_type="qwen2",
        architecture="qwen2",
        settings={**SQUARE, "rope_scaling": YARN},
    ),
    "qwen3": Twin(
        hf="Qwen3ForCausalLM",
        model_type="qwen3",
        architecture="qwen3",
        settings={"tie_word_embeddings": True},
    ),
    "qwen3moe": Twin(
        hf="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        architecture="qwen3moe",
        settings={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": Twin(
        hf="Gemma2ForCausalLM",
        model_type="gemma2",
        architecture="gemma2",
        settings={**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        keys={"rope.freq_base": 5000.0},  # the converter leaves it out: all models have 10000
    ),
    "gemma3": Twin(
        hf="Gemma3ForCausalLM",
        model_type="gemma3_text",
        architecture="gemma3",
        settings={
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": Twin(
        hf="Phi3ForCausalLM",
        model_type="phi3",
        architecture="phi3",
        settings={**SQUARE, "original_max_position_embeddings": 128, "sliding_window": 9},
    ),
    "phi3 longrope": Twin(
        hf="Phi3ForCausalLM",
        model_type="phi3",
        architecture="phi3",
        settings={
            **SQUARE,
            "rope_scaling": LONGROPE,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "sliding_window": None,
        },
    ),
}


def make_twin_weights(twin: Twin, *, seed: int = 0) -> Weights:
    """Random weights by HF name: norms around what leaves a value as it is, biases not zero."""
    config = read_model_config(twin.config, num_tensors=1 << 20, where="config.json")
    rng = np.random.default_rng(seed)
    norm_mean = 0.0 if "gemma" in twin.architecture else 1.0
    return {
        name: (0.3 * rng.normal(size=shape) + (norm_mean if "norm" in name else 0.0)).astype(
            np.float32
        )
        for name, shape in stored_shapes(hf_sources(config), config).items()
    }


def write_twin_gguf(
    path: Path,
    twin: Twin,
    weights: Weights,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the GGUF file; None in `keys` removes one, `extra` are more tensors."""
    writer = gguf.GGUFWriter(path, twin.architecture)
    for name, value in {**_gguf_keys(twin), **twin.keys, **(keys or {})}.items():
        add_value(writer, f"{twin.architecture}.{name}", value)
    add_tokenizer(writer, GgufRecipe())
    for name, array in {**_gguf_tensors(twin, weights), **(extra or {})}.items():
        is_router = name.endswith("ffn_gate_inp.weight")
        add_tensor(writer, name, array, GGMLQuantizationType.F32 if is_router else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_twin_hf(folder: Path, twin: Twin, weights: Weights) -> Path:
    """Write the folder."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(twin.config))
    byte_backend().save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors")
    return folder


def _gguf_tensors(twin: Twin, weights: Weights) -> Weights:
    config = twin.config
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[twin.architecture]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors: Weights = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, array in weights.items():
        if "gemma" in twin.architecture and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if twin.architecture == "llama" and ".q_proj." in name:
            array = permute(array, config["num_attention_heads"])
        if twin.architecture == "llama" and ".k_proj." in name:
            array = permute(array, config["num_key_value_heads"])
        merged = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        stored = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        stored += "" if stored.endswith((".weight", ".bias")) else name[name.rindex(".") :]
        if merged != name:
            experts.setdefault(stored, []).append(array)
        else:
            tensors[stored] = array
    tensors |= {name: np.stack(arrays) for name, arrays in experts.items()}
    return tensors | _divisors(config)


def _divisors(config: Mapping[str, Any]) -> Weights:
    """The tensors the converter works out from config.json."""
    scaling = config.get("rope_scaling", {})
    match scaling.get("rope_type"):
        case "longrope":
            return {
                f"rope_factors_{which}.weight": np.array(scaling[f"{which}_factor"], np.float32)
                for which in ("short", "long")
            }
        case "llama3":
            return {"rope_freqs.weight": _llama3_divisors(config, scaling)}
    return {}


def _llama3_divisors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
    """LlamaModel.generate_extra_tensors of conversion/llama.py."""
    dim, factor = config["head_dim"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len({1.0, factor} & set(divisors)) == 2 < len(set(divisors)), "all three rules are seen"
    return np.array(divisors, np.float32)


def _gguf_keys(twin: Twin) -> dict[str, Any]:
    """What TextModel.set_gguf_parameters writes, and each family's own."""
    config = twin.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **_rope_keys(config),
    }
    match twin.architecture:
        case "llama":
            keys |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
        case "gemma2":
            del keys["rope.freq_base"]
            keys |= {
                "attn_logit_softcapping": config["attn_logit_softcapping"],
                "final_logit_softcapping": config["final_logit_softcapping"],
                "attention.sliding_window": config["sliding_window"],
            }
        case "gemma3":
            keys["attention.sliding_window"] = config["sliding_window"]
        case "phi3":
            original = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            keys |= {
                "attention.sliding_window": config.get("sliding_window", 0),
                "rope.scaling.original_context_length": original,
                "rope.dimension_count": int(config.get("partial_rotary_factor", 1.0) * head_dim),
            }
            if scale > 1:
                factor = math.sqrt(1 + math.log(scale) / math.log(original))
                keys["rope.scaling.attn_factor"] = factor
    return keys


def _rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") not in ("linear", "yarn"):
        return {}
    return {
        "rope.scaling.type": scaling["rope_type"],
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
    }
