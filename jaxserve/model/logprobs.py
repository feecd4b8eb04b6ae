"""Log-probabilities of tokens: what the model itself says, before anything touches its logits."""

import flax.struct
import jax
from jax import numpy as jnp

from jaxserve.kernels.choice import SamplingImpl
from jaxserve.model import filter_passes, filters
from jaxserve.model.config import LOWEST_LOGPROB
from jaxserve.shapes import check_shapes


@flax.struct.dataclass(kw_only=True)
class Logprobs:
    """One token's log-probability in each row, and the most likely tokens. Everything is finite,
    also in rows whose logits are not; those are meaningless.

    Ids with equal logits stand in the order of the ids, in the list and in the ranks: a token of
    rank r is the list's r-th.

    Attributes:
      logprob_B: float32, at least `LOWEST_LOGPROB`.
      rank_B: int32, from 1.
      top_ids_BJ, top_logprobs_BJ: most likely first. Where the vocabulary has fewer than J ids,
        what stands after them is padding.
    """

    logprob_B: jax.Array
    rank_B: jax.Array
    top_ids_BJ: jax.Array
    top_logprobs_BJ: jax.Array


def find_logprobs(
    logits_BV: jax.Array,
    token_B: jax.Array,
    *,
    vocab_size: int,
    num_top: int,
    impl: SamplingImpl,
) -> Logprobs:
    """Returns the log-softmax over the real vocabulary, of one token and the best of each row.

    Args:
      logits_BV: float32, the model's own; what stands at `vocab_size` and beyond is not read.
      token_B: int32 real ids.
      num_top: J; at most V.
      impl: how the best are found; another one finds the same.
    """
    check_shapes(logits_BV=logits_BV, token_B=token_B)
    id_1V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None, :]
    logits_BV = jnp.where(id_1V < vocab_size, logits_BV, -jnp.inf)
    logits_BV = jnp.where(logits_BV == 0, 0.0, logits_BV)  # top_k puts -0 below +0
    best_B1 = logits_BV.max(axis=1, keepdims=True)
    log_sum_B1 = jnp.log(jnp.exp(logits_BV - best_B1).sum(axis=1, keepdims=True))

    def logprob_of(logit_BJ: jax.Array) -> jax.Array:
        logprob_BJ = (logit_BJ - best_B1) - log_sum_B1
        is_in_range_BJ = logprob_BJ > LOWEST_LOGPROB  # false for NaN
        return jnp.where(is_in_range_BJ, logprob_BJ, LOWEST_LOGPROB)

    token_B1 = token_B[:, None]
    logit_B1 = jnp.take_along_axis(logits_BV, token_B1, axis=1)
    is_before_BV = (logits_BV > logit_B1) | ((logits_BV == logit_B1) & (id_1V < token_B1))
    forms = {"candidates": filters.find_best_ids, "passes": filter_passes.find_best_ids}
    top_logit_BJ, top_ids_BJ = forms[impl](logits_BV, num_top)
    return Logprobs(
        logprob_B=logprob_of(logit_B1)[:, 0],
        rank_B=1 + is_before_BV.sum(axis=1, dtype=jnp.int32),
        top_ids_BJ=top_ids_BJ,
        top_logprobs_BJ=logprob_of(top_logit_BJ),
    )
