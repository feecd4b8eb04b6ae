"""A mixture of experts: each token through the few MLPs that a router picks for it.

Only (token, expert) pairs are computed. They are sorted by expert and cut into blocks of one
expert each, and a loop takes as many blocks as there are. With 5 tokens, 3 experts, 2 of them a
token, and blocks of 4 (a pair is written as its token)::

    expert     0 0 0 0 0 | 1 1 1 | 2 2
    pair       0 1 2 3 4 | 0 2 4 | 1 3
    block      0 0 0 0 1 | 2 2 2 | 3 3
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from jaxserve.kernels.dot import dot
from jaxserve.model.config import ExpertsConfig, ModelConfig
from jaxserve.model.layers import activate
from jaxserve.model.params import Params
from jaxserve.shapes import check_shapes

# Pairs of a block: at least two, because one-row products in bfloat16 are slow on XLA:CPU, and no
# more than keeps an expert's last block from being mostly empty (bench/experts.py).
MIN_BLOCK, MAX_BLOCK = 2, 32


def experts_block(
    params: Params, y_TD: jax.Array, is_real_T: jax.Array, *, config: ModelConfig
) -> jax.Array:
    """Returns the weighted sum of each token's experts, float32; zeros in padding tokens.

    Args:
      is_real_T: False in padding tokens, which go to no expert.
    """
    check_shapes(
        y_TD=y_TD,
        is_real_T=is_real_T,
        router_DE=params["router_DE"],
        gate_EDF=params["gate_EDF"],
        up_EDF=params["up_EDF"],
        down_EFD=params["down_EFD"],
    )
    assert config.experts is not None, "a layer of experts needs config.experts"
    y_TD = y_TD.astype(params["gate_EDF"].dtype)
    share_TJ, expert_TJ = route(params, y_TD, is_real_T, experts=config.experts)
    out_TJD = run_pairs(params, y_TD, expert_TJ, config=config)
    out_TD = (out_TJD * share_TJ[:, :, None]).sum(axis=1)
    return jnp.where(is_real_T[:, None], out_TD, 0.0)


def route(
    params: Params, y_TD: jax.Array, is_real_T: jax.Array, *, experts: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the weight and the number of each of a token's experts, the likeliest first; the
    number is E, which no expert has, in padding tokens.

    The softmax is over all experts (Shazeer et al. 2017, §2.1, has it over those kept: that is
    `normalize`).
    """
    share_TE = jax.nn.softmax(dot("TD,DE->TE", y_TD, params["router_DE"]), axis=-1)
    share_TJ, expert_TJ = lax.top_k(share_TE, experts.num_active)
    if experts.normalize:
        share_TJ = share_TJ / share_TJ.sum(axis=-1, keepdims=True)
    return share_TJ, jnp.where(is_real_T[:, None], expert_TJ, experts.num_experts)


def run_pairs(
    params: Params, y_TD: jax.Array, expert_TJ: jax.Array, *, config: ModelConfig
) -> jax.Array:
    """Returns each pair's MLP output, ``out_TJD``; anything where the expert does not exist.

    A pair's row does not depend on what else is in its block but for the order of sums.
    """
    T, J = expert_TJ.shape
    E, D, _ = params["gate_EDF"].shape
    size = block_size(T, J, E)
    pairs = sort_pairs(expert_TJ, num_experts=E, size=size)

    def add_block(block: jax.Array, out_ID: jax.Array) -> jax.Array:
        expert, start = find_block(pairs, block, size=size)
        token_M = lax.dynamic_slice_in_dim(pairs.token_I, start, size)
        out_MD = run_expert(params, y_TD.at[token_M].get(mode="clip"), expert, config=config)
        # What a last block has too much belongs to later experts, whose blocks come later.
        return lax.dynamic_update_slice_in_dim(out_ID, out_MD, start, axis=0)

    empty_ID = jnp.zeros((T * J + size, D), jnp.float32)
    out_ID: jax.Array = lax.fori_loop(0, pairs.end_block_E[-1], add_block, empty_ID)
    return out_ID.at[pairs.place_TJ].get(mode="clip")


class SortedPairs(NamedTuple):
    """The pairs of a step, sorted by expert and cut into blocks.

    Attributes:
      token_I: token of each pair, and then one block of zeros: a slice that ran past the end would
        be shifted, not cut.
      place_TJ: where the sort took each pair.
      first_pair_E: where an expert's pairs begin.
      end_block_E: the blocks of the experts up to this one; the last entry is all blocks.
    """

    token_I: jax.Array
    place_TJ: jax.Array
    first_pair_E: jax.Array
    end_block_E: jax.Array


def sort_pairs(expert_TJ: jax.Array, *, num_experts: int, size: int) -> SortedPairs:
    """Returns the pairs in the order of their experts; those of no expert last, in no block."""
    T, J = expert_TJ.shape
    expert_I = expert_TJ.reshape(T * J)
    order_I = jnp.argsort(expert_I)
    count_E = jnp.bincount(expert_I, length=num_experts).astype(jnp.int32)
    return SortedPairs(
        token_I=jnp.pad(order_I // J, (0, size)),
        place_TJ=jnp.argsort(order_I).reshape(T, J),
        first_pair_E=jnp.cumsum(count_E) - count_E,
        end_block_E=jnp.cumsum(-(-count_E // size)),
    )


def find_block(pairs: SortedPairs, block: jax.Array, *, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the expert of a block, and its first pair."""
    expert = (pairs.end_block_E <= block).sum()
    first_block = jnp.where(expert > 0, pairs.end_block_E[expert - 1], 0)
    return expert, pairs.first_pair_E[expert] + (block - first_block) * size


def run_expert(
    params: Params, y_MD: jax.Array, expert: jax.Array, *, config: ModelConfig
) -> jax.Array:
    """Returns one expert's MLP of some rows, float32.

    XLA:CPU copies the expert's weights out of the stack, once a block; that is part of what
    bench/experts.py measures.
    """
    take = functools.partial(lax.dynamic_index_in_dim, index=expert, axis=0, keepdims=False)
    gate_MF = dot("MD,DF->MF", y_MD, take(params["gate_EDF"]))
    up_MF = dot("MD,DF->MF", y_MD, take(params["up_EDF"]))
    hidden_MF = (activate(gate_MF, config=config) * up_MF).astype(y_MD.dtype)
    return dot("MF,FD->MD", hidden_MF, take(params["down_EFD"]))


def block_size(num_tokens: int, num_active: int, num_experts: int) -> int:
    """Returns the pairs of a block: twice what an expert gets on average, as a power of two."""
    wanted = max(2 * num_tokens * num_active // num_experts, 1)
    return min(max(1 << (wanted - 1).bit_length(), MIN_BLOCK), MAX_BLOCK)
