"""Which weights are packed, and that the shapes programs are compiled for are those they get."""

import dataclasses

import flax.traverse_util
import jax
import numpy as np
import pytest

from jaxserve.kernels.dot import PackedWeight
from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.packing import abstract_packed, pack_params, product_sizes
from jaxserve.model.params import Params, abstract_params, init_params
from tests.model.paged import T1

# All sizes are multiples of 32, and no two of them are equal.
UNTIED = dataclasses.replace(T1, vocab_size=320, hidden_size=64, num_heads=6, mlp_size=160)
TIED = dataclasses.replace(UNTIED, tied_head=True)
EXPERTS = dataclasses.replace(
    UNTIED,
    layers=(LayerConfig(rope=RopeConfig()), LayerConfig(rope=RopeConfig(), mlp="experts")),
    experts=ExpertsConfig(num_experts=4, num_active=2, mlp_size=96, normalize=True),
)
MODELS = pytest.mark.parametrize(
    "config", [UNTIED, TIED, EXPERTS], ids=["untied", "tied", "experts"]
)


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    """By path; of a packed weight its panels'."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {
        path: leaf.panels.shape if isinstance(leaf, PackedWeight) else leaf.shape
        for path, leaf in flat.items()
    }


@MODELS
def test_what_is_packed_are_the_matrices_but_experts_and_a_plain_embedding(
    config: ModelConfig,
) -> None:
    specs = abstract_params(config, "bfloat16")
    sizes = product_sizes(config)
    for path, size in sizes.items():
        assert size.num_inputs * size.num_columns == np.prod(specs[path].shape)
    left = {path.rpartition("/")[2] for path in specs.keys() - sizes.keys()}
    matrices = {name for name in left if "norm" not in name}
    wanted = set() if config.tied_head else {"embedding_VD"}
    if config.experts is not None:
        wanted |= {"router_DE", "gate_EDF", "up_EDF", "down_EFD"}
    assert matrices == wanted


@MODELS
def test_packing_gives_the_shapes_that_programs_are_compiled_for(config: ModelConfig) -> None:
    params = init_params(config, jax.random.key(0), "bfloat16")
    abstract = jax.eval_shape(lambda: params)
    pack_params(params, config)
    assert shapes_of(abstract_packed(abstract, config)) == shapes_of(params)
    packed = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 4]
    assert len(packed) == len(product_sizes(config))
