"""What changes logits before they are scaled: bans, biases and repetition penalties."""

import jax
from jax import numpy as jnp


def ban(logits_BV: jax.Array, *, ban_ids_BM: jax.Array, is_banned_B: jax.Array) -> jax.Array:
    """Returns the logits with a row's banned ids at -inf where `is_banned_B` holds."""
    V = logits_BV.shape[1]
    row_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    ids_BM = jnp.where(is_banned_B[:, None], ban_ids_BM, V)  # V is past the end: dropped
    return logits_BV.at[row_B1, ids_BM].set(-jnp.inf, mode="drop")


def add_bias(
    logits_BV: jax.Array, *, bias_ids_BE: jax.Array, bias_values_BE: jax.Array
) -> jax.Array:
    """Returns the logits with each row's biases added to its ids."""
    row_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    return logits_BV.at[row_B1, bias_ids_BE].add(bias_values_BE, mode="drop")


def penalize(
    logits_BV: jax.Array,
    *,
    counts_BV: jax.Array,
    presence_B: jax.Array,
    frequency_B: jax.Array,
    repetition_B: jax.Array,
) -> jax.Array:
    """Returns the logits with the three penalties; neutral ones (0, 0, 1) change no bit.

    Repetition is HF's rule (Keskar et al. 2019, CTRL, §4.1, with the sign taken into account): ids
    of prompt or output, positive logits divided, negative ones multiplied. Presence and frequency
    are OpenAI's: ids of the output only, once each and once per occurrence.
    """
    is_used_BV = counts_BV > 0
    repetition_B1 = repetition_B[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    logits_BV = jnp.where(is_used_BV, repeated_BV, logits_BV)
    num_outputs_BV = counts_BV >> 1
    is_output_BV = (num_outputs_BV > 0).astype(jnp.float32)
    return (
        logits_BV
        - presence_B[:, None] * is_output_BV
        - frequency_B[:, None] * num_outputs_BV.astype(jnp.float32)
    )
