"""Which parameters the native product reads, and a tree of parameters with those packed."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.kernels.dot import PAIR, PANEL, PackedWeight, packed_shape
from jaxserve.model.aligned import empty_aligned
from jaxserve.model.config import ModelConfig
from jaxserve.model.params import Params


class ProductSize(NamedTuple):
    """A weight as a matrix; transposed where its columns come first."""

    num_inputs: int
    num_columns: int
    is_transposed: bool = False


def product_sizes(config: ModelConfig) -> dict[str, ProductSize]:
    """Returns, by path, the weights that are multiplied by `project` and `project_transposed`."""
    D, F = config.hidden_size, config.mlp_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head = "embedding_VD" if config.tied_head else "head_VD"
    sizes = {head: ProductSize(D, config.padded_vocab_size, is_transposed=True)}
    attention = {"q_DNH": (D, q), "k_DKH": (D, kv), "v_DKH": (D, kv), "o_NHD": (q, D)}
    mlp = {"gate_DF": (D, F), "up_DF": (D, F), "down_FD": (F, D)}
    for index, layer in enumerate(config.layers):
        named = attention if layer.mlp == "experts" else attention | mlp
        sizes.update({f"layers/{index}/{name}": ProductSize(*size) for name, size in named.items()})
    return sizes


def pack_params(params: Params, config: ModelConfig) -> None:
    """Replaces those weights of a tree, one after the other, by packed ones on the device."""
    for tree, name, size in _find(params, config):
        panels = jax.device_put(pack(np.asarray(tree.pop(name)), size))
        tree[name] = PackedWeight(panels=panels)


def abstract_packed(params: Params, config: ModelConfig) -> Params:
    """Returns a tree of shapes, changed as `pack_params` changes it."""
    for tree, name, size in _find(params, config):
        shape = packed_shape(size.num_inputs, size.num_columns)
        panels: Any = jax.ShapeDtypeStruct(shape, tree[name].dtype)
        tree[name] = PackedWeight(panels=panels)
    return params


def pack(weight: np.ndarray, size: ProductSize) -> np.ndarray:
    """Returns the panels of a bfloat16 weight. Of two of its rows

        a b c …
        A B C …   the first 32 columns become   a A b B c C …

    Args:
      weight: its dimensions are those of the inputs, then those of the columns.
    """
    shape = packed_shape(size.num_inputs, size.num_columns)
    panels = empty_aligned(shape, weight.dtype)
    if size.is_transposed:
        w_FD = weight.reshape(size.num_columns, size.num_inputs)
        pairs_FD = w_FD.view(np.uint32).reshape(shape[0], PANEL, shape[1])
        panels.view(np.uint32)[..., 0] = pairs_FD.transpose(0, 2, 1)
        return panels
    w_DF = weight.reshape(size.num_inputs, size.num_columns)
    for row in range(PAIR):  # one transposition of all would take twice as long
        panels[..., row] = w_DF[row::PAIR].reshape(shape[1], shape[0], PANEL).transpose(1, 0, 2)
    return panels


def _find(params: Params, config: ModelConfig) -> Iterator[tuple[Params, str, ProductSize]]:
    """Yields the part of the tree that a weight is in, its name there, and its size."""
    for path, size in product_sizes(config).items():
        *folders, name = path.split("/")
        tree = params
        for folder in folders:
            tree = tree[folder]
        yield tree, name, size
