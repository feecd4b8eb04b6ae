"""Rotary position embedding and the ways to stretch it past the length a model was trained with.

Frequencies are rounded where the reference implementation (HF transformers,
modeling_rope_utils.py) rounds them, which models are trained and checked with: a float64 table
would be 4e-4 radians away from theirs at position 8191. Powers are exact to the last digit of
float32. So are the C library's; torch's vectorized one is not in three of a hundred, which depend
on the processor, and numpy's in one of six.
"""

import math

import jax
import numpy as np
from jax import numpy as jnp
from numpy import float32

from jaxserve.model.config import RopeConfig

# In this file H is the pairs that turn, R = 2H the dimensions that turn.


def rope_tables(
    positions_T: jax.Array, prompt_lens_T: jax.Array, *, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of each position's angles, float32 [T, pairs that turn].

    Two kinds change with the sequence's length. There position p has the frequencies for length
    max(prompt length, p + 1): those with which the reference computes it, when it reads the prompt
    at once and then token by token. So K in the pool is right for good, whatever the chunks were.

    Args:
      prompt_lens_T: length of the prompt of the token's sequence; read by dynamic and longrope.
    """
    angles_TH = positions_T.astype(jnp.float32)[:, None] * _frequencies(
        jnp.maximum(prompt_lens_T, positions_T + 1), rope, head_dim
    )
    cos_TH, sin_TH = jnp.cos(angles_TH), jnp.sin(angles_TH)
    if rope.attention_factor != 1.0:
        cos_TH, sin_TH = cos_TH * rope.attention_factor, sin_TH * rope.attention_factor
    # The barrier keeps XLA from working out the sines again in every layer and for every head.
    cos_TH, sin_TH = jax.lax.optimization_barrier((cos_TH, sin_TH))
    return cos_TH, sin_TH


def rotate(x_TNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Returns x with each pair (x[h], x[h + R/2]) turned by its angle, in x's dtype.

    The tables are R/2 wide; dimensions from R on stay as they are (partial rotary).

    Su et al. 2021, RoFormer, §3.2.2, with the halves of a head as the pairs (the layout of HF
    checkpoints) and not neighbours (the paper's, and GGUF's for llama): a checkpoint stored the
    other way is permuted when it is loaded.
    """
    num_pairs = cos_TH.shape[1]
    first_TNH, second_TNH, rest_TNH = jnp.split(x_TNH, (num_pairs, 2 * num_pairs), axis=-1)
    cos_T1H = cos_TH[:, None, :].astype(x_TNH.dtype)
    sin_T1H = sin_TH[:, None, :].astype(x_TNH.dtype)
    return jnp.concatenate(
        [
            first_TNH * cos_T1H - second_TNH * sin_T1H,
            second_TNH * cos_T1H + first_TNH * sin_T1H,
            rest_TNH,
        ],
        axis=-1,
    )


def _frequencies(lens_T: jax.Array, rope: RopeConfig, head_dim: int) -> jax.Array:
    """Returns the frequencies for each length, [T, H], or [1, H] where the length is nothing."""
    short_1H = jnp.asarray(inverse_frequencies(rope, head_dim))[None, :]
    if rope.kind not in ("dynamic", "longrope"):
        return short_1H
    assert rope.original_max_position is not None, f"{rope.kind} needs an original length"
    is_long_T1 = (lens_T > rope.original_max_position)[:, None]
    if rope.kind == "longrope":
        long_1H = jnp.asarray(_longrope(rope, head_dim, rope.long_factors))[None, :]
        return jnp.where(is_long_T1, long_1H, short_1H)
    return jnp.where(is_long_T1, _dynamic(lens_T, rope, head_dim), short_1H)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle per position of each pair, float32 [pairs that turn].

    Of dynamic and longrope those up to the original length.
    """
    match rope.kind:
        case "default" | "dynamic":
            return float32(1) / _powers(rope, head_dim)
        case "linear":
            return float32(1) / _powers(rope, head_dim) / float32(rope.factor)
        case "llama3":
            return _llama3(rope, head_dim)
        case "yarn":
            return _yarn(rope, head_dim)
        case "longrope":
            return _longrope(rope, head_dim, rope.short_factors)


def _exponents(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns 2h/R of each pair h."""
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    return np.arange(0, rotary_dim, 2, dtype=float32) / float32(rotary_dim)


def _powers(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns theta^(2h/R) of each pair h."""
    exponents_H = _exponents(rope, head_dim).astype(np.float64)
    powers_H: np.ndarray = np.power(np.float64(float32(rope.theta)), exponents_H).astype(float32)
    return powers_H


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Long waves are stretched by the factor, short ones kept, those between blended.

    Source: apply_scaling of github.com/meta-llama/llama-models, models/llama3/model.py.
    """
    assert rope.original_max_position is not None, "llama3 needs an original length"
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    inverse_H = float32(1) / _powers(rope, head_dim)
    wavelength_H = float32(1) / inverse_H * float32(2 * math.pi)
    is_long_H = wavelength_H > float32(original / low)
    is_short_H = wavelength_H < float32(original / high)
    scaled_H = np.where(is_long_H, inverse_H / float32(rope.factor), inverse_H)
    turns_H = float32(1) / wavelength_H * float32(original)
    smooth_H = (turns_H - float32(low)) / float32(high - low)
    blended_H = (float32(1) - smooth_H) * scaled_H / float32(rope.factor) + smooth_H * scaled_H
    return np.where(~is_long_H & ~is_short_H, blended_H, scaled_H)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Pairs that turn more than `beta_fast` times over the original length are kept, those that
    turn less than `beta_slow` times are stretched by the factor, a ramp in between.

    Peng et al. 2023, YaRN, §3.2.
    """
    powers_H = _powers(rope, head_dim)
    num_pairs = len(powers_H)
    low, high = _yarn_range(rope, 2 * num_pairs)
    ramp_H = (np.arange(num_pairs, dtype=float32) - float32(low)) / float32(high - low)
    kept_H = float32(1) - np.clip(ramp_H, float32(0), float32(1))
    stretched_H = float32(1) / (float32(rope.factor) * powers_H)
    blended_H: np.ndarray = stretched_H * (float32(1) - kept_H) + float32(1) / powers_H * kept_H
    return blended_H


def _yarn_range(rope: RopeConfig, rotary_dim: int) -> tuple[float, float]:
    """Returns the pairs, as fractions, between which the ramp lies."""
    assert rope.original_max_position is not None, "yarn needs an original length"
    # The pair that turns n times over the original length, from L / (2 pi theta^(2h/R)) = n.
    low, high = (
        rotary_dim
        * math.log(rope.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high + 0.001 if low == high else high  # no division by zero


def _longrope(rope: RopeConfig, head_dim: int, factors: tuple[float, ...]) -> np.ndarray:
    """Each pair is stretched by a factor of its own (Ding et al. 2024, LongRoPE)."""
    inverse_H: np.ndarray = float32(1) / (np.array(factors, float32) * _powers(rope, head_dim))
    return inverse_H


def _dynamic(lens_T: jax.Array, rope: RopeConfig, head_dim: int) -> jax.Array:
    """Returns [T, H] with a base that grows with the length beyond the original one.

    "Dynamic NTK": theta' = theta * (factor * len / original - factor + 1)^(R / (R - 2)).

    The powers are the only float64 of the device code: in float32 their error is 1e-7, which at
    position 60000 turns a pair by 6e-3. They cost T * H powers a step.
    """
    assert rope.original_max_position is not None, "dynamic needs an original length"
    exponents_H = _exponents(rope, head_dim)
    rotary_dim = 2 * len(exponents_H)
    growth_T = jnp.float32(rope.factor) * lens_T.astype(jnp.float32)
    growth_T = growth_T / jnp.float32(rope.original_max_position) - jnp.float32(rope.factor - 1)
    growth_T = _exact_power(growth_T, rotary_dim / (rotary_dim - 2))
    theta_T1 = (jnp.float32(rope.theta) * growth_T)[:, None]
    return jnp.float32(1) / _exact_power(theta_T1, exponents_H[None, :])


def _exact_power(base: jax.Array, exponent: np.ndarray | float) -> jax.Array:
    """Returns float32 base ** exponent, rounded once."""
    with jax.enable_x64(True):
        power = jnp.power(base.astype(jnp.float64), jnp.asarray(exponent, jnp.float64))
        return power.astype(jnp.float32)
