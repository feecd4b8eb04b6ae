"""What the compiled programs do: pure functions of device arrays."""

import dataclasses

from jax import Array, lax
from jax import numpy as jnp

from jaxserve.model import sampling as sampler
from jaxserve.model.params import Params
from jaxserve.model.sampling import SamplingRows, Variant
from jaxserve.model.transformer import forward, logits
from jaxserve.plan import Bucket
from jaxserve.runner.batch import unpack
from jaxserve.runner.spec import RunnerSpec
from jaxserve.runner.state import RowState, gather_sampling, init_state
from jaxserve.shapes import check_shapes

COPY_WIDTH = 16  # pages of one run of the copy program

KV = tuple[Array, ...]


def init_arrays(*, spec: RunnerSpec) -> tuple[KV, RowState, Array]:
    """Returns the empty pool, the state rows and the hidden-state buffer."""
    kv = tuple(jnp.zeros(spec.kv_shape, spec.kv_dtype) for _ in range(spec.model.num_layers))
    hidden_TD = jnp.zeros((spec.max_step_tokens, spec.model.hidden_size), jnp.float32)
    return kv, init_state(spec), hidden_TD


def forward_step(
    params: Params,
    kv: KV,
    page_table_BP: Array,
    hidden_TD: Array,
    last_token_B: Array,
    packed_I: Array,
    *,
    spec: RunnerSpec,
    bucket: Bucket,
) -> tuple[KV, Array, Array, Array]:
    """Returns the pool and page table with this step in them, the step's hidden states at the head
    of the buffer, and a mark that is ready when the step is done.

    Donate the pool, the page table and the buffer.
    """
    page_table_BP, batch = unpack(packed_I, page_table_BP, last_token_B, bucket=bucket, spec=spec)
    kv, new_TD = forward(
        params,
        kv,
        batch,
        config=spec.model,
        num_single_rows=bucket.decode_seqs,
        tile=spec.chunk_tile,
        attention=spec.attention,
    )
    hidden_TD = lax.dynamic_update_slice(hidden_TD, new_TD, (0, 0))
    return kv, page_table_BP, hidden_TD, jnp.zeros((), jnp.int32)


def output_step(
    head: Params,
    hidden_TD: Array,
    last_token_B: Array,
    sampling: SamplingRows,
    rows_3R: Array,
    *,
    spec: RunnerSpec,
    variant: Variant,
) -> tuple[Array, Array]:
    """Returns the last tokens with the sampled ones in them (donate them), and the result.

    Args:
      head: the parameters that `logits` reads.
      rows_3R: hidden index, state row and output index of each row to sample.

    Returns:
      result_R3: token, 1 where the logits were finite, 1 where the step fell back to exact filters.
    """
    check_shapes(hidden_TD=hidden_TD, last_token_B=last_token_B, rows_3R=rows_3R)
    hidden_index_R, row_R, output_index_R = rows_3R
    hidden_RD = hidden_TD.at[hidden_index_R].get(mode="clip")
    logits_RV = logits(head, hidden_RD, config=spec.model)
    rows = gather_sampling(sampling, row_R, padded_vocab=spec.model.padded_vocab_size)
    sampled = sampler.sample(
        logits_RV, rows, output_index_R, vocab_size=spec.model.vocab_size, variant=variant
    )
    last_token_B = last_token_B.at[row_R].set(sampled.token_B, mode="drop")
    fallback_R = jnp.broadcast_to(sampled.used_fallback, row_R.shape)
    columns = (sampled.token_B, sampled.is_finite_B, fallback_R)
    return last_token_B, jnp.stack([c.astype(jnp.int32) for c in columns], axis=1)


def full_output_step(
    head: Params,
    hidden_TD: Array,
    last_token_B: Array,
    sampling: SamplingRows,
    rows_3R: Array,
    *,
    spec: RunnerSpec,
) -> tuple[Array, SamplingRows, Array]:
    """Like `output_step`, for `full`: it also counts the tokens (donate the sampling rows)."""
    last_token_B, result_R3 = output_step(
        head, hidden_TD, last_token_B, sampling, rows_3R, spec=spec, variant="full"
    )
    counts_BV = sampler.record(sampling.counts_BV, rows_3R[1], result_R3[:, 0])
    return last_token_B, dataclasses.replace(sampling, counts_BV=counts_BV), result_R3


def copy_pages(kv: KV, pages_2W: Array) -> KV:
    """Returns the pool (donate it) with page `pages_2W[0]` copied to page `pages_2W[1]`; all are
    read before any is written. Padding: target past the end."""
    source_W, target_W = pages_2W

    def copy(pool_C2KRH: Array) -> Array:
        return pool_C2KRH.at[target_W].set(pool_C2KRH.at[source_W].get(mode="clip"), mode="drop")

    return tuple(copy(pool_C2KRH) for pool_C2KRH in kv)
