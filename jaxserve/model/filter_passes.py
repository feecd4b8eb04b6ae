"""The sampler's searches for a GPU: all rows at once, in passes whose number is fixed.

A GPU is fed kernel by kernel. What `filters.py` does to read little (candidates, then row by row
what they do not settle) is hundreds of small kernels there, one after another, and a sort. Here a
search for a key reads all scores eleven times, for three of the key's bits each time, and nothing
depends on what the rows hold. Counts and masses are integers, so the keys found are those of
`filters.py`, bit for bit.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.model.filters import (
    CHUNK,
    KEY_BITS,
    clip_top_k,
    has_reached,
    keep_mass,
    key_of,
    key_of_min_p,
    mass_of,
    target_mass,
)

# Bits of a pass. With four, XLA's kernels of so many sums spilled registers on an H200.
DIGIT_BITS = 3
NUM_DIGITS = 1 << DIGIT_BITS
SHIFTS = tuple(range((KEY_BITS - 1) // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS))
# Parts of a row that are summed apart: of 32 rows enough to keep every processor busy.
NUM_PARTS = CHUNK

Best = tuple[jax.Array, jax.Array]


def find_thresholds(
    score_BV: jax.Array, *, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array
) -> jax.Array:
    """Returns each row's threshold as a key. Arguments are those of `filters.find_thresholds`."""
    B, V = score_BV.shape
    top_k_B = clip_top_k(top_k_B, num_tokens=V)
    no_key_B = jnp.zeros((B,), jnp.uint32)
    # Whether any row asks is the one thing looked at: passes for none of them would be for nothing.
    kth_B = lax.cond(
        jnp.any(top_k_B < V), lambda: _search_top_k(score_BV, top_k_B), lambda: no_key_B
    )
    pth_B = lax.cond(
        jnp.any(top_p_B < 1.0), lambda: _search_top_p(score_BV, top_p_B, kth_B), lambda: no_key_B
    )
    return jnp.maximum(jnp.maximum(kth_B, pth_B), key_of_min_p(min_p_B))


def _search_top_k(score_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    key_BV = key_of(score_BV)
    key_B = jnp.zeros(top_k_B.shape, jnp.uint32)
    for shift in SHIFTS:
        trial_BD = _trials(key_B, shift)
        least_BD = lax.optimization_barrier(trial_BD)
        is_kept = [key_BV >= least_BD[:, d : d + 1] for d in range(1, NUM_DIGITS)]
        counts = _sum_rows([is_kept_BV.astype(jnp.int32) for is_kept_BV in is_kept])
        key_B = _choose_trial(trial_BD, [count_B >= top_k_B for count_B in counts])
    return jnp.where(top_k_B < score_BV.shape[1], key_B, 0)


def _search_top_p(score_BV: jax.Array, top_p_B: jax.Array, kth_B: jax.Array) -> jax.Array:
    V = score_BV.shape[1]
    key_BV, mass_BV = key_of(score_BV), mass_of(score_BV, num_tokens=V)
    key_B = jnp.zeros(top_p_B.shape, jnp.uint32)
    target = None
    for shift in SHIFTS:
        trial_BD = _trials(key_B, shift)
        least_BD = lax.optimization_barrier(jnp.maximum(trial_BD, kth_B[:, None]))
        kept = [keep_mass(mass_BV, key_BV >= least_BD[:, d : d + 1]) for d in range(NUM_DIGITS)]
        sums = _sum_rows([part_BV for both in kept for part_BV in both])
        masses = list(zip(sums[::2], sums[1::2], strict=True))
        if target is None:  # of the first pass's trials the lowest keeps all that top-k keeps
            target = target_mass(masses[0], top_p_B, num_tokens=V)
        is_enough = [has_reached(mass, target, num_tokens=V) for mass in masses[1:]]
        key_B = _choose_trial(trial_BD, is_enough)
    return jnp.where(top_p_B < 1.0, key_B, 0)


def _trials(key_B: jax.Array, shift: int) -> jax.Array:
    """Returns the keys ``[B, 8]`` that the next digit, `shift` bits up, may lead to, the lowest, of
    0, first. The first digit has two bits alone; its highest stands there again in place of more.

    Put a barrier behind them: else XLA has the shift inside each pass, and so a kernel for each.
    """
    digit_D = np.arange(NUM_DIGITS, dtype=np.uint32)
    digit_D = np.minimum(digit_D, (1 << min(DIGIT_BITS, KEY_BITS - shift)) - 1).astype(np.uint32)
    return key_B[:, None] | (digit_D << np.uint32(shift))[None, :]


def _choose_trial(trial_BD: jax.Array, is_enough: Sequence[jax.Array]) -> jax.Array:
    """Returns the highest trial of each row that has enough; the lowest where none has.

    Args:
      is_enough: of each trial but the lowest. Once there is not, there is not for the higher ones.
    """
    key_B = trial_BD[:, 0]
    for d, is_enough_B in enumerate(is_enough, start=1):
        key_B = jnp.where(is_enough_B, trial_BD[:, d], key_B)
    return key_B


def _sum_rows(numbers: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums ``[B]`` of several int32 ``[B, V]``, all made in one reading."""

    def add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(one + other for one, other in zip(left, right, strict=True))

    zeros = (np.int32(0),) * len(numbers)
    parts = tuple(number_BV.reshape(len(number_BV), NUM_PARTS, -1) for number_BV in numbers)
    part_sums = lax.reduce(parts, zeros, add, (2,))
    return list(lax.reduce(part_sums, zeros, add, (1,)))


def find_best_ids(score_BV: jax.Array, num_wanted: int) -> tuple[jax.Array, jax.Array]:
    """Returns score and id of each row's best, as `filters.find_best_ids` does: a pass for each,
    which looks for the best of what comes after the last one."""
    B, V = score_BV.shape
    key_BV, id_1V = key_of(score_BV), jnp.arange(V, dtype=jnp.int32)[None, :]
    last_key_B, last_id_B = jnp.full((B,), ~np.uint32(0)), jnp.full((B,), np.int32(-1))
    token_BJ = jnp.zeros((B, 0), jnp.int32)
    for _ in range(num_wanted):
        # Else the first pass, whose last one is a constant, would have a kernel of its own.
        last_key_B, last_id_B = lax.optimization_barrier((last_key_B, last_id_B))
        last_key_B1 = last_key_B[:, None]
        is_left_BV = (key_BV < last_key_B1) | (
            (key_BV == last_key_B1) & (id_1V > last_id_B[:, None])
        )
        last_key_B, last_id_B = _find_best(jnp.where(is_left_BV, key_BV, 0), id_1V)
        token_BJ = jnp.concatenate([token_BJ, last_id_B[:, None]], axis=1)
    return jnp.take_along_axis(score_BV, token_BJ, axis=1), token_BJ


def _find_best(key_BV: jax.Array, id_1V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each row's highest key and its id; of equals the lowest id."""

    def choose(left: Best, right: Best) -> Best:
        is_left = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
        return jnp.where(is_left, left[0], right[0]), jnp.where(is_left, left[1], right[1])

    B, V = key_BV.shape
    id_BV = jnp.broadcast_to(id_1V, (B, V))
    nothing = np.uint32(0), np.int32(V)
    parts = key_BV.reshape(B, NUM_PARTS, -1), id_BV.reshape(B, NUM_PARTS, -1)
    best_key_B, best_id_B = lax.reduce(
        lax.reduce(parts, nothing, choose, (2,)), nothing, choose, (1,)
    )
    return best_key_B, best_id_B
