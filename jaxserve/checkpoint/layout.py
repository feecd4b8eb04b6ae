"""Where each parameter comes from in a checkpoint, and how its stored array becomes ours.

A stored weight is [out, in]; ours is [in, out] with the heads split: a table for all formats.
"""

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.model.config import MAX_EOS_IDS, ModelConfig
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StoredName:
    """One parameter's name in each format; `{}` is the layer's index."""

    hf: str
    gguf: str


# By the last part of the parameter's path.
MODEL_NAMES = {
    "embedding_VD": StoredName(hf="model.embed_tokens.weight", gguf="token_embd.weight"),
    "final_norm_D": StoredName(hf="model.norm.weight", gguf="output_norm.weight"),
    "head_VD": StoredName(hf="lm_head.weight", gguf="output.weight"),
}
LAYER_NAMES = {
    "attn_norm_D": StoredName(hf="input_layernorm.weight", gguf="attn_norm.weight"),
    "q_DNH": StoredName(hf="self_attn.q_proj.weight", gguf="attn_q.weight"),
    "k_DKH": StoredName(hf="self_attn.k_proj.weight", gguf="attn_k.weight"),
    "v_DKH": StoredName(hf="self_attn.v_proj.weight", gguf="attn_v.weight"),
    "o_NHD": StoredName(hf="self_attn.o_proj.weight", gguf="attn_output.weight"),
    "mlp_norm_D": StoredName(hf="post_attention_layernorm.weight", gguf="ffn_norm.weight"),
    "gate_DF": StoredName(hf="mlp.gate_proj.weight", gguf="ffn_gate.weight"),
    "up_DF": StoredName(hf="mlp.up_proj.weight", gguf="ffn_up.weight"),
    "down_FD": StoredName(hf="mlp.down_proj.weight", gguf="ffn_down.weight"),
}
QKV_BIAS_NAMES = {
    "q_bias_NH": StoredName(hf="self_attn.q_proj.bias", gguf="attn_q.bias"),
    "k_bias_KH": StoredName(hf="self_attn.k_proj.bias", gguf="attn_k.bias"),
    "v_bias_KH": StoredName(hf="self_attn.v_proj.bias", gguf="attn_v.bias"),
}
O_BIAS_NAMES = {"o_bias_D": StoredName(hf="self_attn.o_proj.bias", gguf="attn_output.bias")}
MLP_BIAS_NAMES = {
    "gate_bias_F": StoredName(hf="mlp.gate_proj.bias", gguf="ffn_gate.bias"),
    "up_bias_F": StoredName(hf="mlp.up_proj.bias", gguf="ffn_up.bias"),
    "down_bias_D": StoredName(hf="mlp.down_proj.bias", gguf="ffn_down.bias"),
}


def stored_names(config: ModelConfig) -> dict[str, StoredName]:
    """Returns the stored name of each parameter, by the parameter's path."""
    names = {path: name for path, name in MODEL_NAMES.items() if path != "head_VD"}
    if not config.tied_head:
        names["head_VD"] = MODEL_NAMES["head_VD"]
    layer = dict(LAYER_NAMES)
    layer |= QKV_BIAS_NAMES if config.qkv_bias else {}
    layer |= O_BIAS_NAMES if config.o_bias else {}
    layer |= MLP_BIAS_NAMES if config.mlp_bias else {}
    for i in range(config.num_layers):
        for leaf, name in layer.items():
            names[f"layers/{i}/{leaf}"] = StoredName(
                hf=f"model.layers.{i}.{name.hf}", gguf=f"blk.{i}.{name.gguf}"
            )
    return names


def stored_shape(path: str, config: ModelConfig) -> tuple[int, ...]:
    """Returns the [out, in] shape that a checkpoint must store for this parameter."""
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.mlp_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }
    match path.rpartition("_")[2]:
        case "DNH" | "DKH" as letters:
            return sizes[letters[1]] * sizes["H"], sizes["D"]
        case "NHD":
            return sizes["D"], sizes["N"] * sizes["H"]
        case "DF" | "FD" as letters:
            return sizes[letters[1]], sizes[letters[0]]
        case "NH" | "KH" as letters:
            return (sizes[letters[0]] * sizes["H"],)
        case letters:
            return tuple(sizes[letter] for letter in letters)


def to_param(stored: np.ndarray, path: str, config: ModelConfig) -> np.ndarray:
    """Returns a stored array in its parameter's shape (a view, except where rows are padded)."""
    D, H = config.hidden_size, config.head_dim
    match path.rpartition("_")[2]:
        case "DNH" | "DKH":
            return stored.reshape(-1, H, D).transpose(2, 0, 1)
        case "NHD":
            return stored.reshape(D, -1, H).transpose(1, 2, 0)
        case "DF" | "FD":
            return stored.T
        case "NH" | "KH":
            return stored.reshape(-1, H)
        case "VD" if config.padded_vocab_size > config.vocab_size:
            return np.pad(stored, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))
    return stored


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    other_problems: Iterable[str] = (),
) -> None:
    """Compare tensor names and shapes, both ways.

    Raises:
      CheckpointError: one message that names every tensor at fault.
    """
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", shapes),
        )
        if names
    ]
    problems += other_problems
    if problems:
        raise CheckpointError(
            f"the tensors of {where} do not make up this model. {'; '.join(problems)}. "
            "Get the files again; if they are whole, this kind of model is not supported"
        )


def check_vocab(config: ModelConfig, tokenizer: Tokenizer, where: str) -> frozenset[int]:
    """Returns the EOS ids that the model can write; warns of ids it has no embedding for.

    Raises:
      CheckpointError: more EOS ids than a request has room for.
    """
    if tokenizer.vocab_size > config.vocab_size:
        logger.warning(
            "the tokenizer of %s knows %d ids, but the model only %d; prompts with others fail",
            where,
            tokenizer.vocab_size,
            config.vocab_size,
        )
    eos_ids = frozenset(id for id in tokenizer.eos_ids if id < config.vocab_size)
    if beyond := sorted(tokenizer.eos_ids - eos_ids):
        logger.warning(
            "eos_token_id of %s names %s, but the model's ids end at %d; it is ignored",
            where,
            beyond[:5],
            config.vocab_size - 1,
        )
    if len(eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{where}: eos_token_id names {len(eos_ids)} ids, but at most {MAX_EOS_IDS} are "
            "supported; correct it in config.json or generation_config.json"
        )
    return eos_ids


def check_num_layers(num_layers: int, num_tensors: int, where: str) -> int:
    """Returns `num_layers`; refuses more than there are tensors, before they are spelled out.

    Raises:
      CheckpointError: names both numbers.
    """
    if num_layers > num_tensors:
        raise CheckpointError(
            f"{where} says {num_layers} layers, but there are only {num_tensors} tensors; "
            "get the files again"
        )
    return num_layers


def _numbers(config: ModelConfig) -> list[tuple[str, float]]:
    ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
    return [("norm_eps", config.norm_eps), *(("rope_theta", rope.theta) for rope in ropes)]


def check_config(config: ModelConfig, where: str) -> None:
    """Refuse sizes no decoder can have.

    Raises:
      CheckpointError: names the size.
    """
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp_size": config.mlp_size,
        "max_position": config.max_position,
    }
    for name, size in sizes.items():
        if size < 1:
            raise CheckpointError(f"{where}: {name} is {size}, but must be at least 1")
    for name, number in _numbers(config):
        if not 0 < number < math.inf:  # NaN is not either
            raise CheckpointError(f"{where}: {name} is {number}, but must be positive and finite")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} "
            "key/value heads evenly"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {config.head_dim}, but RoPE needs an even one")
