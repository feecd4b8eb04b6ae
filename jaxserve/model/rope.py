"""Rotary position embedding."""

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle per position of each pair, float32 [head_dim // 2].

    Rounded where the reference implementations round, which models are trained and checked with:
    exponent, power and reciprocal each to float32. A float64 table would be 4e-4 radians away from
    theirs at position 8191. The power itself is exact, as theirs nearly always is; numpy's float32
    power is not, and differs from theirs in one of six.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    inverse: np.ndarray = np.float32(1.0) / powers
    return inverse


def rope_tables(
    positions_T: jax.Array, *, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of each position's angles, float32 [T, head_dim // 2]."""
    frequencies_1H = jnp.asarray(inverse_frequencies(rope, head_dim))[None, :]
    angles_TH = positions_T.astype(jnp.float32)[:, None] * frequencies_1H
    # The barrier keeps XLA from working out the sines again in every layer and for every head.
    cos_TH, sin_TH = jax.lax.optimization_barrier((jnp.cos(angles_TH), jnp.sin(angles_TH)))
    return cos_TH, sin_TH


def rotate(x_TNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Returns x with each pair (x[h], x[h + H/2]) turned by its angle, in x's dtype.

    Su et al. 2021, RoFormer, §3.2.2, with the halves of a head as the pairs (the layout of HF
    checkpoints) and not neighbours (the paper's, and GGUF's for llama): a checkpoint stored the
    other way is permuted when it is loaded.
    """
    first_TNH, second_TNH = jnp.split(x_TNH, 2, axis=-1)
    cos_T1H = cos_TH[:, None, :].astype(x_TNH.dtype)
    sin_T1H = sin_TH[:, None, :].astype(x_TNH.dtype)
    return jnp.concatenate(
        [
            first_TNH * cos_T1H - second_TNH * sin_T1H,
            second_TNH * cos_T1H + first_TNH * sin_T1H,
        ],
        axis=-1,
    )
