"""The parameters of a decoder: one table of names, shapes, dtypes and sharding axes.

Initialising, loading, sharding and quantizing all read `abstract_params`. In memory the flat
"/" paths are nested: ``params["layers"]["0"]["q_DNH"]``.
"""

import math
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike

from jaxserve.model.config import LayerConfig, ModelConfig

# Nested dicts with arrays as leaves; `abstract_params` knows the nesting, mypy does not.
Params = dict[str, Any]


class ParamSpec(NamedTuple):
    """One parameter array.

    Attributes:
      axes: per dimension, the mesh axis it may be split over, or None: "tensor" cuts whole heads,
        MLP features and vocabulary rows.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]


def abstract_params(config: ModelConfig, dtype: DTypeLike) -> dict[str, ParamSpec]:
    """Returns the spec of each parameter by its path, such as ``"layers/0/q_DNH"``.

    Norm weights are float32 whatever `dtype` is, and are the whole factor: a family that stores
    w for a factor of 1 + w is brought to this form when it is loaded. Rows of the vocabulary
    beyond `config.vocab_size` are zeros.
    """
    D, V = config.hidden_size, config.padded_vocab_size
    weight, norm = np.dtype(dtype), np.dtype(np.float32)
    specs = {
        "embedding_VD": ParamSpec((V, D), weight, ("tensor", None)),
        "final_norm_D": ParamSpec((D,), norm, (None,)),
    }
    if not config.tied_head:
        specs["head_VD"] = ParamSpec((V, D), weight, ("tensor", None))
    for index, layer in enumerate(config.layers):
        leaves = _layer_specs(config, layer, weight=weight, norm=norm)
        specs.update({f"layers/{index}/{name}": spec for name, spec in leaves.items()})
    return specs


def _layer_specs(
    config: ModelConfig, layer: LayerConfig, *, weight: np.dtype, norm: np.dtype
) -> dict[str, ParamSpec]:
    """In the order of use."""
    norm_D = ParamSpec((config.hidden_size,), norm, (None,))
    specs = {"attn_norm_D": norm_D} if config.pre_norms else {}
    specs |= _attention_specs(config, weight=weight, norm=norm)
    if config.post_norms:
        specs["attn_post_norm_D"] = norm_D
    if config.pre_norms:
        specs["mlp_norm_D"] = norm_D
    if layer.mlp == "experts":
        specs |= _experts_specs(config, weight=weight)
    else:
        specs |= _mlp_specs(config, weight=weight)
    if config.post_norms:
        specs["mlp_post_norm_D"] = norm_D
    return specs


def _attention_specs(
    config: ModelConfig, *, weight: np.dtype, norm: np.dtype
) -> dict[str, ParamSpec]:
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    specs = {
        "q_DNH": ParamSpec((D, N, H), weight, (None, "tensor", None)),
        "k_DKH": ParamSpec((D, K, H), weight, (None, "tensor", None)),
        "v_DKH": ParamSpec((D, K, H), weight, (None, "tensor", None)),
        "o_NHD": ParamSpec((N, H, D), weight, ("tensor", None, None)),
    }
    if config.qkv_bias:
        specs["q_bias_NH"] = ParamSpec((N, H), weight, ("tensor", None))
        specs["k_bias_KH"] = ParamSpec((K, H), weight, ("tensor", None))
        specs["v_bias_KH"] = ParamSpec((K, H), weight, ("tensor", None))
    if config.o_bias:
        specs["o_bias_D"] = ParamSpec((D,), weight, (None,))
    if config.qk_norm == "head":
        specs["q_norm_H"] = ParamSpec((H,), norm, (None,))
        specs["k_norm_H"] = ParamSpec((H,), norm, (None,))
    if config.qk_norm == "all":
        specs["q_norm_NH"] = ParamSpec((N, H), norm, ("tensor", None))
        specs["k_norm_KH"] = ParamSpec((K, H), norm, ("tensor", None))
    return specs


def _mlp_specs(config: ModelConfig, *, weight: np.dtype) -> dict[str, ParamSpec]:
    D, F = config.hidden_size, config.mlp_size
    specs = {
        "gate_DF": ParamSpec((D, F), weight, (None, "tensor")),
        "up_DF": ParamSpec((D, F), weight, (None, "tensor")),
        "down_FD": ParamSpec((F, D), weight, ("tensor", None)),
    }
    if config.mlp_bias:
        specs["gate_bias_F"] = ParamSpec((F,), weight, ("tensor",))
        specs["up_bias_F"] = ParamSpec((F,), weight, ("tensor",))
        specs["down_bias_D"] = ParamSpec((D,), weight, (None,))
    return specs


def _experts_specs(config: ModelConfig, *, weight: np.dtype) -> dict[str, ParamSpec]:
    assert config.experts is not None, "a layer of experts needs config.experts"
    D, E, F = config.hidden_size, config.experts.num_experts, config.experts.mlp_size
    return {
        "router_DE": ParamSpec((D, E), weight, (None, None)),
        "gate_EDF": ParamSpec((E, D, F), weight, (None, None, "tensor")),
        "up_EDF": ParamSpec((E, D, F), weight, (None, None, "tensor")),
        "down_EFD": ParamSpec((E, F, D), weight, (None, "tensor", None)),
    }


def num_param_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Returns the bytes of all parameters."""
    specs = abstract_params(config, dtype).values()
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def init_params(
    config: ModelConfig, key: jax.Array, dtype: DTypeLike, *, stddev: float = 0.3
) -> Params:
    """Returns random parameters, nested: weights and biases N(0, stddev), norms N(1, 0.3).

    Norms that are not ones, and biases that are not zero, let a test see what it would otherwise
    miss; a small `stddev` gives flat logits and ties.
    """
    specs = abstract_params(config, dtype)
    keys = jax.random.split(key, len(specs))
    flat = {}
    for (path, spec), leaf_key in zip(specs.items(), keys, strict=True):
        normal = jax.random.normal(leaf_key, spec.shape, jnp.float32)
        is_norm = "_norm_" in path
        value = 1.0 + 0.3 * normal if is_norm else stddev * normal
        if path.endswith("_VD"):
            value = value.at[config.vocab_size :].set(0.0)
        flat[path] = value.astype(spec.dtype)
    nested: Params = flax.traverse_util.unflatten_dict(flat, sep="/")
    return nested
