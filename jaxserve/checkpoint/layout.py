"""Where each parameter comes from in a checkpoint, and how its stored array becomes ours.

A stored weight is [out, in]; ours is [in, out] with the heads split: a table for all formats.
"""

import dataclasses
from typing import Literal

import numpy as np

from jaxserve.checkpoint.names import (
    FUSED_GGUF,
    GGUF_LAYER,
    GGUF_MODEL,
    HF_LAYER,
    HF_MODEL,
    HF_NAMES,
)
from jaxserve.model.config import LayerConfig, ModelConfig


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StoredPart:
    """A stored tensor, or some rows of one, that goes into a parameter.

    Attributes:
      rows: [first, end) of a tensor that several parameters share; None is all.
      add: added to every number, in float32.
    """

    name: str
    rows: tuple[int, int] | None = None
    add: float = 0.0


# A parameter's stored parts, by its path; several are stacked on a new first axis.
Sources = dict[str, tuple[StoredPart, ...]]


def hf_sources(config: ModelConfig) -> Sources:
    """Returns the parts of each parameter in Hugging Face files."""
    names = HF_NAMES[config.architecture]
    layer = {**HF_LAYER, **names.norms, "router_DE": names.router}
    experts = dict(zip(("gate_EDF", "up_EDF", "down_EFD"), names.expert, strict=True))
    num_experts = config.experts.num_experts if config.experts else 0
    sources: Sources = {}
    for path in _param_paths(config):
        index, leaf = _split_path(path)
        add = names.norm_add if "_norm_" in leaf else 0.0
        if index is None:
            sources[path] = (StoredPart(name=HF_MODEL[leaf], add=add),)
            continue
        prefix = f"model.layers.{index}."
        if leaf in experts:
            sources[path] = tuple(
                StoredPart(name=prefix + experts[leaf].format(e)) for e in range(num_experts)
            )
            continue
        fused = _fused_rows(leaf, config) if names.is_fused else None
        if fused is not None:
            kind, rows = fused
            name = "self_attn.qkv_proj.weight" if kind == "qkv" else "mlp.gate_up_proj.weight"
            sources[path] = (StoredPart(name=prefix + name, rows=rows),)
        else:
            sources[path] = (StoredPart(name=prefix + layer[leaf], add=add),)
    return sources


def gguf_sources(config: ModelConfig) -> Sources:
    """Returns the parts of each parameter in a GGUF file."""
    is_fused = config.architecture in FUSED_GGUF
    sources: Sources = {}
    for path in _param_paths(config):
        index, leaf = _split_path(path)
        if index is None:
            sources[path] = (StoredPart(name=GGUF_MODEL[leaf]),)
            continue
        fused = _fused_rows(leaf, config) if is_fused else None
        if fused is not None:
            kind, rows = fused
            name = "attn_qkv.weight" if kind == "qkv" else "ffn_up.weight"
            sources[path] = (StoredPart(name=f"blk.{index}.{name}", rows=rows),)
        else:
            sources[path] = (StoredPart(name=f"blk.{index}.{GGUF_LAYER[leaf]}"),)
    return sources


def _param_paths(config: ModelConfig) -> list[str]:
    """Returns the paths of `abstract_params`, which imports jax; a header does without."""
    paths = ["embedding_VD", "final_norm_D"] + ([] if config.tied_head else ["head_VD"])
    for index, layer in enumerate(config.layers):
        paths += [f"layers/{index}/{leaf}" for leaf in _layer_params(config, layer)]
    return paths


def _layer_params(config: ModelConfig, layer: LayerConfig) -> list[str]:
    leaves = ["attn_norm_D"] if config.pre_norms else []
    leaves += ["q_DNH", "k_DKH", "v_DKH", "o_NHD"]
    leaves += ["q_bias_NH", "k_bias_KH", "v_bias_KH"] if config.qkv_bias else []
    leaves += ["o_bias_D"] if config.o_bias else []
    leaves += ["q_norm_H", "k_norm_H"] if config.qk_norm == "head" else []
    leaves += ["q_norm_NH", "k_norm_KH"] if config.qk_norm == "all" else []
    leaves += ["attn_post_norm_D"] if config.post_norms else []
    leaves += ["mlp_norm_D"] if config.pre_norms else []
    leaves += ["mlp_post_norm_D"] if config.post_norms else []
    if layer.mlp == "experts":
        return [*leaves, "router_DE", "gate_EDF", "up_EDF", "down_EFD"]
    leaves += ["gate_DF", "up_DF", "down_FD"]
    return leaves + (["gate_bias_F", "up_bias_F", "down_bias_D"] if config.mlp_bias else [])


def _split_path(path: str) -> tuple[str | None, str]:
    """Returns the layer's index and the parameter: "layers/3/q_DNH" is ("3", "q_DNH")."""
    folder, _, leaf = path.rpartition("/")
    return (folder.removeprefix("layers/") if folder else None), leaf


def _fused_rows(
    leaf: str, config: ModelConfig
) -> tuple[Literal["qkv", "gate_up"], tuple[int, int]] | None:
    """Returns which fused tensor a parameter is part of, and its rows there."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    match leaf:
        case "q_DNH":
            return "qkv", (0, q_rows)
        case "k_DKH":
            return "qkv", (q_rows, q_rows + kv_rows)
        case "v_DKH":
            return "qkv", (q_rows + kv_rows, q_rows + 2 * kv_rows)
        case "gate_DF":
            return "gate_up", (0, config.mlp_size)
        case "up_DF":
            return "gate_up", (config.mlp_size, 2 * config.mlp_size)
    return None


def stored_shapes(sources: Sources, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the whole shape of each stored tensor, [out, in] for a weight."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parts in sources.items():
        shape = _stored_shape(path, config)
        for part in parts:
            first, *rest = shape[1:] if len(parts) > 1 else shape
            if part.rows is not None:
                first = part.rows[1]  # parts come in order: the last one ends the tensor
            shapes[part.name] = (first, *rest)
    return shapes


def _stored_shape(path: str, config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that a parameter's parts make up."""
    experts = config.experts
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": experts.mlp_size if experts and path.endswith(("_EDF", "_EFD")) else config.mlp_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "E": experts.num_experts if experts else 0,
    }
    match path.rpartition("_")[2]:
        case "DNH" | "DKH" as letters:
            return sizes[letters[1]] * sizes["H"], sizes["D"]
        case "NHD":
            return sizes["D"], sizes["N"] * sizes["H"]
        case "DF" | "FD" | "DE" as letters:
            return sizes[letters[1]], sizes[letters[0]]
        case "EDF" | "EFD" as letters:
            return sizes["E"], sizes[letters[2]], sizes[letters[1]]
        case "NH" | "KH" as letters:
            return (sizes[letters[0]] * sizes["H"],)
        case letters:
            return tuple(sizes[letter] for letter in letters)


def as_stored(param: np.ndarray, path: str, config: ModelConfig) -> np.ndarray:
    """Returns a view of a parameter in the shape that its parts make up, without padded rows.

    A view, so that stored rows can be written into it as they come.
    """
    D, H = config.hidden_size, config.head_dim
    match path.rpartition("_")[2]:
        case "DNH" | "DKH":
            return param.reshape(D, param.shape[1] * H).T
        case "NHD":
            return param.reshape(param.shape[0] * H, D).T
        case "DF" | "FD" | "DE":
            return param.T
        case "EDF" | "EFD":
            return param.swapaxes(1, 2)
        case "NH" | "KH":
            return param.reshape(-1)
        case "VD":
            return param[: config.vocab_size]
    return param
