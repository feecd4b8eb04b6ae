"""A row's keys in shares: who has which, and their sums as one."""

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from jaxserve.kernels.paged_attention.launch import Launch


def share_of_blocks(
    first: jax.Array | int, last: jax.Array, split: jax.Array, *, launch: Launch
) -> tuple[jax.Array | int, jax.Array]:
    """Returns the split's share of the blocks [first, last)."""
    if launch.split_len is not None:
        fixed = launch.split_len // launch.block_tokens
        return jnp.maximum(split * fixed, first), jnp.minimum((split + 1) * fixed, last)
    if launch.num_splits == 1:
        return first, last
    share = pl.cdiv(jnp.maximum(last - first, 0), launch.num_splits)
    return first + split * share, jnp.minimum(first + (split + 1) * share, last)


def combine_splits(part_XSQNH: jax.Array, log_total_XSQN: jax.Array) -> jax.Array:
    """Returns float32 ``out_XQNH`` of the splits' parts (Flash-Decoding, Dao et al. 2023).

    Args:
      log_total_XSQN: in powers of two. A split that saw no key has LOWEST and a part of 0; so has
        every split of padding.
    """
    share_XSQN = jnp.exp2(log_total_XSQN - log_total_XSQN.max(1, keepdims=True))
    share_XSQN = share_XSQN / share_XSQN.sum(1, keepdims=True)
    return (part_XSQNH * share_XSQN[..., None]).sum(1)
