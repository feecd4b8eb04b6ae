"""Writes tiny checkpoints: one set of stored weights, as a Hugging Face folder and as GGUF."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jaxserve.checkpoint.layout import StoredPart, gguf_sources, hf_sources, stored_shapes
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.text.vocabulary import TokenType
from tests.checkpoint.gguf_writer import quantize
from tests.text.vocabularies import CHAT_TEMPLATE, MERGES, SPECIALS, byte_backend

# CASES T1: nothing is what it could be derived from, and the vocabulary needs padding.
T1 = ModelConfig(
    architecture="llama",
    vocab_size=271,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=96,
    max_position=256,
    norm_eps=1e-5,
    layers=(LayerConfig(rope=RopeConfig(theta=5000.0)),) * 2,
    tied_head=False,
)
Weights = dict[str, np.ndarray]


def make_weights(config: ModelConfig, *, seed: int = 0) -> Weights:
    """Random stored arrays by Hugging Face name; norms around 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in stored_shapes(hf_sources(config), config).items():
        normal = rng.normal(size=shape).astype(np.float32)
        weights[name] = 0.3 * normal + (1.0 if "norm" in name else 0.0)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def rope_of(config: ModelConfig) -> RopeConfig:
    """The RoPE of the first layer."""
    rope = config.layers[0].rope
    assert rope is not None
    return rope


def hf_settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_of(config).theta,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "eos_token_id": 1,
    }


def write_hf(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    num_shards: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder; `settings` change config.json, and None removes a key."""
    folder.mkdir(exist_ok=True)
    changed = hf_settings(config) | dict(settings or {})
    kept = {key: value for key, value in changed.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    byte_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True})
    )
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        names = list(weights)[index::num_shards]
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict(weight_map)})
    )


def permute(stored: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows (LlamaModel.permute)."""
    halves = stored.reshape(num_heads, 2, stored.shape[0] // num_heads // 2, *stored.shape[1:])
    return halves.swapaxes(1, 2).reshape(stored.shape)


@dataclasses.dataclass(kw_only=True)
class GgufRecipe:
    """How `write_gguf` writes; every field is a way to write a file that must be refused."""

    kind: GGMLQuantizationType = GGMLQuantizationType.F32
    architecture: str = "llama"
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leave_out: Sequence[str] = ()
    extra: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    alignment: int | None = None
    tokenizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    other_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def write_gguf(
    path: Path, config: ModelConfig, weights: Weights, recipe: GgufRecipe | None = None
) -> Path:
    """Write a GGUF file with q and k permuted; matrices in `recipe.kind`, vectors in F32."""
    recipe = recipe or GgufRecipe()
    writer = gguf.GGUFWriter(path, recipe.architecture)
    if recipe.alignment is not None:
        writer.add_custom_alignment(recipe.alignment)
    for name, value in recipe.other_keys.items():
        add_value(writer, name, value)
    _add_keys(writer, config, recipe)
    add_tokenizer(writer, recipe)
    hf = hf_sources(config)
    for parameter, (part,) in gguf_sources(config).items():
        if part.name in recipe.leave_out:
            continue
        stored = join_parts(hf[parameter], weights.__getitem__)
        leaf = parameter.rpartition("/")[2]
        if leaf.startswith("q_"):
            stored = permute(stored, config.num_heads)
        if leaf.startswith("k_"):
            stored = permute(stored, config.num_kv_heads)
        add_tensor(writer, part.name, stored, recipe.kind)
    for name_, array in recipe.extra.items():
        writer.add_tensor(name_, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def join_parts(parts: Sequence[StoredPart], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Returns a parameter's parts as one stored array; a view where it is one tensor as it is.

    Args:
      read: a whole stored tensor by its name.
    """
    arrays = []
    for part in parts:
        array = read(part.name)
        if part.rows is not None:
            array = array[part.rows[0] : part.rows[1]]
        if part.add:
            array = array.astype(np.float32) + np.float32(part.add)
        arrays.append(array)
    return arrays[0] if len(arrays) == 1 else np.stack(arrays)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, stored: np.ndarray, kind: GGMLQuantizationType
) -> None:
    if stored.ndim < 2 or kind is GGMLQuantizationType.F32:
        writer.add_tensor(name, stored)
    else:
        writer.add_tensor(name, quantize(stored, kind), raw_dtype=kind)


def _add_keys(writer: gguf.GGUFWriter, config: ModelConfig, recipe: GgufRecipe) -> None:
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": rope_of(config).theta,
        "rope.dimension_count": config.head_dim,
    }
    for name, value in (values | dict(recipe.keys)).items():
        add_value(writer, f"{recipe.architecture}.{name}", value)


def add_tokenizer(writer: gguf.GGUFWriter, recipe: GgufRecipe) -> None:
    vocab = byte_backend().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [TokenType.CONTROL if token in SPECIALS else 1 for token in tokens],
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": True,
    }
    for name, value in (values | dict(recipe.tokenizer)).items():
        add_value(writer, f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
