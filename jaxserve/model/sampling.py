"""Logits to tokens: the sampler, on the device, in float32, row by row.

Order: bans and biases, penalties, mask, temperature, top-k, top-p, min-p, draw. A token is the
argmax of the scaled logits plus Gumbel noise (Gumbel 1954; the Gumbel-max trick), and the noise of
an id is a pure function of (seed, output index, choice, id). So a row's token depends on nothing
else: not on its place, its batch mates, the variant or the way the filters were worked out.
"""

from typing import Literal

import flax.struct
import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.choice import SamplingImpl
from jaxserve.model import filter_passes
from jaxserve.model.filters import CHUNK, Candidates, find_candidates, find_thresholds, key_of
from jaxserve.model.masks import keep_allowed
from jaxserve.model.penalties import add_bias, ban, penalize
from jaxserve.model.threefry import token_noise
from jaxserve.shapes import check_shapes

# greedy: every row takes the argmax. plain: rows are greedy or have a temperature only.
# full: anything; needed when one row has bans, biases, penalties, a mask or filters.
Variant = Literal["greedy", "plain", "full"]

GREEDY_TEMPERATURE = 1e-5


@flax.struct.dataclass(kw_only=True)
class SamplingRows:
    """How each row's token is drawn. A padding row may hold anything; temperature 0 is cheapest.

    Attributes:
      seed_B2: uint32, high and low half of the 64-bit seed.
      choice_B: uint32, which of a request's choices this is.
      temperature_B: float32; 1e-5 and less (and NaN) is greedy.
      top_k_B: int32; 0 is off.
      top_p_B: float32; 1 is off.
      min_p_B: float32; 0 is off.
      presence_B, frequency_B, repetition_B: float32; 0, 0 and 1 are off.
      bias_ids_BE: int32 ids, each at most once; the padded vocabulary size, or more, in padding.
      bias_values_BE: float32.
      ban_ids_BM: int32 ids that cannot come before `min_tokens_B` outputs; padded likewise.
      min_tokens_B: int32.
      counts_BV: int32; bit 0: the id is in the prompt; the bits above: how often it was output.
    """

    seed_B2: jax.Array
    choice_B: jax.Array
    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    presence_B: jax.Array
    frequency_B: jax.Array
    repetition_B: jax.Array
    bias_ids_BE: jax.Array
    bias_values_BE: jax.Array
    ban_ids_BM: jax.Array
    min_tokens_B: jax.Array
    counts_BV: jax.Array


@flax.struct.dataclass(kw_only=True)
class Sampled:
    """The outcome of `sample`.

    Attributes:
      token_B: int32, always a real id.
      is_finite_B: false where the logits held NaN or +inf, or nothing but -inf: the token is then
        meaningless. Of full also where bans, penalties or mask leave nothing above -inf.
      used_fallback: a scalar; whether a row's filters needed more than the best 64 ids. False of
        `passes`, which have no such few to begin with.
    """

    token_B: jax.Array
    is_finite_B: jax.Array
    used_fallback: jax.Array


def sample(
    logits_BV: jax.Array,
    rows: SamplingRows,
    output_index_B: jax.Array,
    *,
    vocab_size: int,
    variant: Variant,
    impl: SamplingImpl,
    mask_BW: jax.Array | None = None,
) -> Sampled:
    """Returns one token for each row.

    Args:
      logits_BV: float32; V a multiple of 64; what stands at `vocab_size` and beyond is not read.
      rows: one for each row of logits. greedy reads nothing of it, plain only seed, choice and
        temperature.
      output_index_B: int32, index in the output of the token to be drawn.
      impl: of full's filters; another one gives the same tokens.
      mask_BW: uint32, the ids that may be drawn, as in `model/masks.py`; read by full only. None
        allows all.

    Raises:
      ShapeError: the arrays do not fit together; while tracing.
    """
    check_shapes(
        logits_BV=logits_BV, output_index_B=output_index_B, temperature_B=rows.temperature_B
    )
    if logits_BV.shape[1] % CHUNK:
        raise ShapeError(f"logits_BV has {logits_BV.shape[1]} ids, not a multiple of {CHUNK}")
    is_real_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32) < vocab_size
    logits_BV = jnp.where(is_real_V[None, :], logits_BV, -jnp.inf)
    is_finite_B = is_usable(logits_BV)
    used_fallback = jnp.zeros((), jnp.bool)
    match variant:
        case "greedy":
            token_B = find_best(logits_BV)
        case "plain":
            token_B = find_best(add_noise(scale(logits_BV, rows), rows, output_index_B))
        case "full":
            logits_BV = adjust(logits_BV, rows, output_index_B)
            if mask_BW is not None:
                logits_BV = keep_allowed(logits_BV, mask_BW)
            is_finite_B &= is_usable(logits_BV)
            score_BV = scale(logits_BV, rows)
            if impl == "passes":
                token_B = _draw_in_passes(score_BV, rows, output_index_B)
            else:
                token_B, used_fallback = _draw_by_candidates(score_BV, rows, output_index_B)
    return Sampled(
        token_B=jnp.minimum(token_B, vocab_size - 1),
        is_finite_B=is_finite_B,
        used_fallback=used_fallback,
    )


def record(counts_BV: jax.Array, row_B: jax.Array, token_B: jax.Array) -> jax.Array:
    """Returns the counts with one more output of each row's token; rows past the end do nothing."""
    return counts_BV.at[row_B, token_B].add(2, mode="drop")


def is_usable(logits_BV: jax.Array) -> jax.Array:
    """Returns which rows have no NaN, no +inf, and something above -inf."""
    is_below_inf_B = (logits_BV < jnp.inf).all(axis=1)  # false for NaN too, which a max may not see
    return is_below_inf_B & (logits_BV.max(axis=1) > -jnp.inf)


def is_greedy(rows: SamplingRows) -> jax.Array:
    return ~(rows.temperature_B > GREEDY_TEMPERATURE)


def adjust(logits_BV: jax.Array, rows: SamplingRows, output_index_B: jax.Array) -> jax.Array:
    """Returns the logits after bans, biases and penalties."""
    logits_BV = ban(
        logits_BV, ban_ids_BM=rows.ban_ids_BM, is_banned_B=output_index_B < rows.min_tokens_B
    )
    logits_BV = add_bias(
        logits_BV, bias_ids_BE=rows.bias_ids_BE, bias_values_BE=rows.bias_values_BE
    )
    return penalize(
        logits_BV,
        counts_BV=rows.counts_BV,
        presence_B=rows.presence_B,
        frequency_B=rows.frequency_B,
        repetition_B=rows.repetition_B,
    )


def scale(logits_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Returns (logit - row's best) / temperature, so at most 0; greedy rows as if it were 1.

    The best is taken off first: a temperature of 1e-4 would take logits of 1e35 to infinity.
    """
    best_B1 = logits_BV.max(axis=1, keepdims=True)
    temperature_B = jnp.where(is_greedy(rows), 1.0, rows.temperature_B)
    return (logits_BV - best_B1) / temperature_B[:, None]


def add_noise(score_BV: jax.Array, rows: SamplingRows, output_index_B: jax.Array) -> jax.Array:
    """Returns the scores of all ids with their noise; greedy rows as they were."""
    token_1V = jnp.arange(score_BV.shape[1], dtype=jnp.int32)[None, :]
    return _noised(score_BV, jnp.broadcast_to(token_1V, score_BV.shape), rows, output_index_B)


def _noised(
    score_BV: jax.Array, token_BV: jax.Array, rows: SamplingRows, output_index_B: jax.Array
) -> jax.Array:
    noise_BV = token_noise(
        rows.seed_B2,
        output_index_B=output_index_B,
        choice_B=rows.choice_B,
        token_BV=token_BV,
    )
    return jnp.where(is_greedy(rows)[:, None], score_BV, score_BV + noise_BV)


def find_best(score_BV: jax.Array) -> jax.Array:
    """Returns the lowest id with the highest score; V where all are NaN."""
    token_1V = jnp.arange(score_BV.shape[1], dtype=jnp.int32)[None, :]
    return _lowest_best(score_BV, jnp.broadcast_to(token_1V, score_BV.shape))


def _lowest_best(score_BV: jax.Array, token_BV: jax.Array) -> jax.Array:
    best_B1 = score_BV.max(axis=1, keepdims=True)
    none = np.iinfo(np.int32).max
    return jnp.where(score_BV == best_B1, token_BV, none).min(axis=1)


def _draw_in_passes(
    score_BV: jax.Array, rows: SamplingRows, output_index_B: jax.Array
) -> jax.Array:
    threshold_B = filter_passes.find_thresholds(
        score_BV, top_k_B=rows.top_k_B, top_p_B=rows.top_p_B, min_p_B=rows.min_p_B
    )
    return find_best(add_noise(_keep(score_BV, threshold_B), rows, output_index_B))


def _draw_by_candidates(
    score_BV: jax.Array, rows: SamplingRows, output_index_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's token, and whether more than the candidates were needed."""
    is_greedy_B = is_greedy(rows)
    candidates = find_candidates(score_BV)
    threshold_B, has_searched = find_thresholds(
        score_BV,
        candidates,
        top_k_B=rows.top_k_B,
        top_p_B=rows.top_p_B,
        min_p_B=rows.min_p_B,
        is_greedy_B=is_greedy_B,
    )

    def draw(score_BV: jax.Array, token_BV: jax.Array) -> jax.Array:
        kept_BV = _keep(score_BV, threshold_B)
        return _lowest_best(_noised(kept_BV, token_BV, rows, output_index_B), token_BV)

    def draw_from_all() -> jax.Array:
        token_1V = jnp.arange(score_BV.shape[1], dtype=jnp.int32)[None, :]
        return draw(score_BV, jnp.broadcast_to(token_1V, score_BV.shape))

    needs_all = jnp.any(~is_greedy_B & _keeps_outside(candidates, threshold_B))
    token_B = lax.cond(
        needs_all, draw_from_all, lambda: draw(candidates.score_BJ, candidates.token_BJ)
    )
    return token_B, has_searched | needs_all


def _keep(score_BV: jax.Array, threshold_B: jax.Array) -> jax.Array:
    """Returns the scores at or above each row's threshold, and -inf in place of the others."""
    return jnp.where(key_of(score_BV) >= threshold_B[:, None], score_BV, -jnp.inf)


def _keeps_outside(candidates: Candidates, threshold_B: jax.Array) -> jax.Array:
    """Returns which rows keep an id that is not a candidate."""
    return (key_of(candidates.outside_B) >= threshold_B) & (candidates.outside_B > -jnp.inf)
