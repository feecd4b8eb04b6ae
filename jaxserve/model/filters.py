"""Top-k, top-p and min-p as one threshold per row, without sorting the vocabulary.

A filter keeps the most likely ids, so what it keeps is: the ids whose key is at or above a
threshold. A key is the score's bits in an order that unsigned comparison keeps; the three
thresholds are keys, and the largest holds. Ids that tie with the threshold are all kept.

A row whose threshold lies above its 65th score needs only its best 64 (`Candidates`). Otherwise
the threshold is found bit by bit over all ids, exactly. Both ways give the same threshold, because
top-p's probabilities are summed as integers, which add up to the same in any order.

This form is for a CPU, which reads little and branches well; `filter_passes.py` has a GPU's.
"""

from collections.abc import Callable

import flax.struct
import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

# 64, and one more that shows where they end.
NUM_CANDIDATES = 65
CHUNK = 64
SIGN = np.uint32(1 << 31)  # also the highest bit of a key
KEY_BITS = 32
Mass = tuple[jax.Array, jax.Array]


@flax.struct.dataclass(kw_only=True)
class Candidates:
    """The best ids of each row, best first; of equals the lower id first.

    Attributes:
      score_BJ, token_BJ: score and id.
      outside_B: no score outside is above this, the last candidate's; -inf where none is outside.
    """

    score_BJ: jax.Array
    token_BJ: jax.Array
    outside_B: jax.Array


def key_of(score: jax.Array) -> jax.Array:
    """Returns uint32 keys in the order of the scores; -0 and +0 get one key.

    Positive floats rise with their bits, negative ones fall, so those are turned over::

        score  -inf       -1.0       0.0        1.0
        bits   ff800000   bf800000   00000000   3f800000
        key    007fffff   407fffff   80000000   bf800000
    """
    bits = lax.bitcast_convert_type(jnp.where(score == 0, jnp.zeros_like(score), score), jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def clip_top_k(top_k_B: jax.Array, *, num_tokens: int) -> jax.Array:
    """Returns top-k from 1 to the vocabulary, which is off."""
    return jnp.where((top_k_B < 1) | (top_k_B > num_tokens), num_tokens, top_k_B)


def key_of_min_p(min_p_B: jax.Array) -> jax.Array:
    """Returns the least key that min-p keeps: p / p_best = exp(score), and what top-k and top-p
    renormalize cancels out of the ratio."""
    return key_of(jnp.where(min_p_B > 0.0, jnp.log(min_p_B), -jnp.inf))


def find_candidates(score_BV: jax.Array) -> Candidates:
    """Returns the `NUM_CANDIDATES` best of each row."""
    B, V = score_BV.shape
    num_wanted = min(NUM_CANDIDATES, V)
    score_BJ, token_BJ = find_best_ids(score_BV, num_wanted)
    outside_B = score_BJ[:, -1] if num_wanted < V else jnp.full((B,), -jnp.inf, jnp.float32)
    return Candidates(score_BJ=score_BJ, token_BJ=token_BJ, outside_B=outside_B)


def find_best_ids(score_BV: jax.Array, num_wanted: int) -> tuple[jax.Array, jax.Array]:
    """Returns score and id of each row's best, exactly, best first; of equals the lower id first.

    Through chunk maxima: the J best ids lie in the J chunks with the highest maxima, which reads
    the row once instead of sorting it. `top_k` puts the earlier of two equals first; the chunks
    stand in the order of their ids, so the earlier is the lower id.
    """
    B, V = score_BV.shape
    num_chunks = V // CHUNK
    if num_chunks > num_wanted > 0:
        score_BLC = score_BV.reshape(B, num_chunks, CHUNK)
        _, chunk_BJ = lax.top_k(score_BLC.max(axis=2), num_wanted)
        chunk_BJ = jnp.sort(chunk_BJ, axis=1)
        pool_BJC = jnp.take_along_axis(score_BLC, chunk_BJ[:, :, None], axis=1)
        score_BJ, place_BJ = lax.top_k(pool_BJC.reshape(B, -1), num_wanted)
        best_chunk_BJ = jnp.take_along_axis(chunk_BJ, place_BJ // CHUNK, axis=1)
        token_BJ = best_chunk_BJ * CHUNK + place_BJ % CHUNK
    else:
        score_BJ, token_BJ = lax.top_k(score_BV, num_wanted)
    # Without the barrier XLA:CPU makes a full sort of a top_k that is sliced: ten times slower.
    score_BJ, token_BJ = lax.optimization_barrier((score_BJ, token_BJ))
    return score_BJ, token_BJ


def find_thresholds(
    score_BV: jax.Array,
    candidates: Candidates,
    *,
    top_k_B: jax.Array,
    top_p_B: jax.Array,
    min_p_B: jax.Array,
    is_greedy_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's threshold as a key, and whether a row needed the exact search.

    Args:
      score_BV: scaled logits, 0 at each row's best.
      top_k_B: below 1, or the vocabulary and more, is off.
      top_p_B: 1 and more is off. Of what top-k left, as HF does it.
      min_p_B: 0 and less is off.
      is_greedy_B: rows that need no threshold, and never start the search.
    """
    V = score_BV.shape[1]
    top_k_B, min_p_key_B = clip_top_k(top_k_B, num_tokens=V), key_of_min_p(min_p_B)
    zeros_B = jnp.zeros_like(top_k_B)
    total_B = lax.cond(
        jnp.any((top_p_B < 1.0) & (top_k_B == V)),
        lambda: _sum_mass(mass_of(score_BV, num_tokens=V)),
        lambda: (zeros_B, zeros_B),
    )
    near_B, is_known_B = _thresholds_of_candidates(
        candidates,
        total_B=total_B,
        top_k_B=top_k_B,
        top_p_B=top_p_B,
        min_p_key_B=min_p_key_B,
        num_tokens=V,
    )
    is_sought_B = ~is_known_B & ~is_greedy_B

    def search(place: jax.Array, threshold_B: jax.Array) -> jax.Array:
        row = sought_B[place]
        threshold = search_threshold(score_BV[row], top_k=top_k_B[row], top_p=top_p_B[row])
        return threshold_B.at[row].set(threshold)

    # Row by row: most rows need no search, and one row's keys stay in a core's cache.
    sought_B = jnp.nonzero(is_sought_B, size=is_sought_B.shape[0], fill_value=0)[0]
    threshold_B = lax.fori_loop(0, is_sought_B.sum(dtype=jnp.int32), search, near_B)
    return jnp.maximum(threshold_B, min_p_key_B), is_sought_B.any()


def _thresholds_of_candidates(
    candidates: Candidates,
    *,
    total_B: Mass,
    top_k_B: jax.Array,
    top_p_B: jax.Array,
    min_p_key_B: jax.Array,
    num_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the thresholds of top-k and top-p, and which of them are right.

    A threshold that lies somewhere below the candidates is given as 0, and is right if min-p cuts
    above it.
    """
    key_BJ, outside_B = key_of(candidates.score_BJ), key_of(candidates.outside_B)
    J = key_BJ.shape[1]
    is_all_B = candidates.outside_B == -jnp.inf
    kth_B1 = jnp.take_along_axis(key_BJ, jnp.minimum(top_k_B, J)[:, None] - 1, axis=1)
    has_kth_B = (top_k_B < num_tokens) & (top_k_B <= J)
    kth_B = jnp.where(has_kth_B, kth_B1[:, 0], jnp.uint32(0))

    # What top-p is a share of: all ids, or the candidates that top-k keeps if it keeps no others.
    mass_BJ = keep_mass(
        mass_of(candidates.score_BJ, num_tokens=num_tokens), key_BJ >= kth_B[:, None]
    )
    is_off_B = top_k_B == num_tokens
    kept_B = _sum_mass(mass_BJ)
    share_of_B = (
        jnp.where(is_off_B, total_B[0], kept_B[0]),
        jnp.where(is_off_B, total_B[1], kept_B[1]),
    )
    is_share_known_B = is_off_B | is_all_B | (has_kth_B & (kth_B > outside_B))
    target_B = target_mass(share_of_B, top_p_B, num_tokens=num_tokens)
    sums_BJ = (jnp.cumsum(mass_BJ[0], axis=1), jnp.cumsum(mass_BJ[1], axis=1))
    is_reached_BJ = has_reached(
        sums_BJ, (target_B[0][:, None], target_B[1][:, None]), num_tokens=num_tokens
    )
    first_B1 = jnp.argmax(is_reached_BJ, axis=1, keepdims=True)
    pth_B = jnp.take_along_axis(key_BJ, first_B1, axis=1)[:, 0]
    is_reached_B = is_reached_BJ.any(axis=1)

    has_top_p_B = top_p_B < 1.0
    is_below_known_B = is_all_B | (min_p_key_B > outside_B)
    threshold_B = jnp.where(has_top_p_B, jnp.where(is_reached_B, pth_B, 0), kth_B)
    is_known_B = jnp.where(
        has_top_p_B,
        is_share_known_B & (is_reached_B | is_below_known_B),
        is_off_B | has_kth_B | is_below_known_B,
    )
    return threshold_B, is_known_B


def search_threshold(score_V: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns one row's threshold of top-k and top-p: the highest key at or above which is enough.

    Found exactly, over all ids, one bit of the key at a time.
    """
    V = score_V.shape[0]
    key_V = key_of(score_V)

    def search_top_k() -> jax.Array:
        return _highest_key(lambda key: (key_V >= key).sum(dtype=jnp.int32) >= top_k)

    kth = lax.cond(top_k < V, search_top_k, lambda: jnp.uint32(0))

    def search_top_p() -> jax.Array:
        mass_V = keep_mass(mass_of(score_V, num_tokens=V), key_V >= kth)
        target = target_mass(_sum_mass(mass_V), top_p, num_tokens=V)
        return _highest_key(
            lambda key: has_reached(
                _sum_mass(keep_mass(mass_V, key_V >= key)), target, num_tokens=V
            )
        )

    pth = lax.cond(top_p < 1.0, search_top_p, lambda: jnp.uint32(0))
    return jnp.maximum(kth, pth)


def _highest_key(has_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the highest key that has enough, bit by bit from the top; 0 if none has."""

    def try_bit(place: jax.Array, key: jax.Array) -> jax.Array:
        trial = key | (SIGN >> place.astype(jnp.uint32))
        return jnp.where(has_enough(trial), trial, key)

    key: jax.Array = lax.fori_loop(0, KEY_BITS, try_bit, jnp.uint32(0))
    return key


def mass_of(score: jax.Array, *, num_tokens: int) -> Mass:
    """Returns exp(score), for scores ≤ 0, as a fixed-point number of two int32 digits.

    A digit is as wide as sums over the vocabulary allow: 15 bits for 49,152 ids, so that the mass
    is exact to 2^-30 of the best id's.
    """
    base = np.float32(1 << _digit_bits(num_tokens))
    scaled = jnp.exp(score) * base
    high = jnp.floor(scaled)
    low = jnp.floor((scaled - high) * base)
    return high.astype(jnp.int32), low.astype(jnp.int32)


def _digit_bits(num_tokens: int) -> int:
    return 31 - num_tokens.bit_length()


def keep_mass(mass: Mass, is_kept: jax.Array) -> Mass:
    return jnp.where(is_kept, mass[0], 0), jnp.where(is_kept, mass[1], 0)


def _sum_mass(mass: Mass) -> Mass:
    """Returns the sums over the last axis, read once for both digits: three times as fast on CPU
    as two sums."""

    def add(left: Mass, right: Mass) -> Mass:
        return left[0] + right[0], left[1] + right[1]

    zero = np.int32(0)
    high, low = lax.reduce(mass, (zero, zero), add, (mass[0].ndim - 1,))
    return high, low


def target_mass(total_B: Mass, top_p_B: jax.Array, *, num_tokens: int) -> Mass:
    """Returns top_p of the total, as proper digits; at least the smallest mass there is."""
    base = np.float32(1 << _digit_bits(num_tokens))
    all_B = total_B[0].astype(jnp.float32) * base + total_B[1].astype(jnp.float32)
    target_B = jnp.maximum(all_B * top_p_B, 1.0)
    high_B = jnp.floor(target_B / base)
    low_B = jnp.floor(target_B - high_B * base)
    return high_B.astype(jnp.int32), low_B.astype(jnp.int32)


def has_reached(mass: Mass, target: Mass, *, num_tokens: int) -> jax.Array:
    """Returns whether a sum of digits, not yet carried, is at least the target."""
    bits = _digit_bits(num_tokens)
    high = mass[0] + (mass[1] >> bits)
    low = mass[1] & np.int32((1 << bits) - 1)
    return (high > target[0]) | ((high == target[0]) & (low >= target[1]))
