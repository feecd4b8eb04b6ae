"""What the compiled programs do: pure functions of device arrays."""

import dataclasses

import jax
from jax import Array, lax
from jax import numpy as jnp

from jaxserve.kernels.pool import Pool, empty_pool
from jaxserve.model import sampling as sampler
from jaxserve.model.batch import split_rows
from jaxserve.model.logprobs import find_logprobs
from jaxserve.model.params import Params
from jaxserve.model.sampling import SamplingRows, Variant
from jaxserve.model.transformer import forward, logits
from jaxserve.plan import Bucket
from jaxserve.runner import results
from jaxserve.runner.batch import unpack
from jaxserve.runner.spec import RunnerSpec
from jaxserve.runner.state import RowState, gather_sampling, init_state
from jaxserve.shapes import check_shapes

KV = tuple[Pool, ...]


def init_arrays(*, spec: RunnerSpec) -> tuple[KV, RowState, Array]:
    """Returns the empty pool, the state rows and the hidden-state buffer."""
    kv = empty_pages(spec.num_pages, spec=spec)
    hidden_TD = jnp.zeros((spec.max_step_tokens, spec.model.hidden_size), jnp.float32)
    return kv, init_state(spec), hidden_TD


def empty_pages(num_pages: int, *, spec: RunnerSpec) -> KV:
    """Returns so many pages of zeros, layer by layer."""
    shape = (num_pages, *spec.kv_shape[1:])
    return tuple(empty_pool(shape, spec.kv_dtype) for _ in range(spec.model.num_layers))


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
    num_single_rows, tile = bucket.decode_seqs, spec.chunk_tile
    if spec.batch_invariant:
        batch = split_rows(batch, num_single_rows=num_single_rows, tile=tile)
        num_single_rows = bucket.num_tokens
    kv, new_TD = forward(
        params,
        kv,
        batch,
        config=spec.model,
        num_single_rows=num_single_rows,
        tile=tile,
        kernels=spec.kernels,
    )
    hidden_TD = lax.dynamic_update_slice(hidden_TD, new_TD, (0, 0))
    return kv, page_table_BP, hidden_TD, jnp.zeros((), jnp.int32)


def output_step(
    head: Params,
    hidden_TD: Array,
    last_token_B: Array,
    sampling: SamplingRows,
    rows_4R: Array,
    *,
    spec: RunnerSpec,
    variant: Variant,
) -> tuple[Array, Array]:
    """Returns the last tokens with the sampled ones in them (donate them), and the result.

    Args:
      head: the parameters that `logits` reads.
      rows_4R: hidden index, state row and output index of each row to sample, and whether its
        log-probability is wanted, which `full` alone gives. Rows may share a hidden index.
    """
    check_shapes(hidden_TD=hidden_TD, last_token_B=last_token_B, rows_4R=rows_4R)
    hidden_index_R, row_R, output_index_R, _ = rows_4R
    sampled = sampler.sample(
        _logits_at(head, hidden_TD, hidden_index_R, spec=spec),
        gather_sampling(sampling, row_R, padded_vocab=spec.model.padded_vocab_size),
        output_index_R,
        vocab_size=spec.model.vocab_size,
        variant=variant,
        impl=spec.kernels.sampling,
    )
    last_token_B = last_token_B.at[row_R].set(sampled.token_B, mode="drop")
    return last_token_B, results.pack_sampled(sampled)


def full_output_step(
    head: Params,
    hidden_TD: Array,
    last_token_B: Array,
    sampling: SamplingRows,
    rows_4R: Array,
    mask_RW: Array,
    *,
    spec: RunnerSpec,
) -> tuple[Array, SamplingRows, Array]:
    """Like `output_step`, for `full`: it also counts the tokens (donate the sampling rows).

    Args:
      mask_RW: the ids that each row may sample; all ones where it may sample any.
    """
    check_shapes(hidden_TD=hidden_TD, last_token_B=last_token_B, rows_4R=rows_4R, mask_RW=mask_RW)
    hidden_index_R, row_R, output_index_R, wants_logprobs_R = rows_4R
    logits_RV = _logits_at(head, hidden_TD, hidden_index_R, spec=spec)
    sampled = sampler.sample(
        logits_RV,
        gather_sampling(sampling, row_R, padded_vocab=spec.model.padded_vocab_size),
        output_index_R,
        vocab_size=spec.model.vocab_size,
        variant="full",
        impl=spec.kernels.sampling,
        mask_BW=mask_RW,
    )
    columns_RI = lax.cond(
        jnp.any(wants_logprobs_R > 0),
        lambda: _logprob_columns(logits_RV, sampled.token_B, spec=spec),
        lambda: jnp.zeros((row_R.shape[0], results.num_logprob_columns(spec)), jnp.int32),
    )
    last_token_B = last_token_B.at[row_R].set(sampled.token_B, mode="drop")
    counts_BV = sampler.record(sampling.counts_BV, row_R, sampled.token_B)
    sampling = dataclasses.replace(sampling, counts_BV=counts_BV)
    result_RI = jnp.concatenate([results.pack_sampled(sampled), columns_RI], axis=1)
    return last_token_B, sampling, result_RI


def score_step(head: Params, hidden_TD: Array, rows_2W: Array, *, spec: RunnerSpec) -> Array:
    """Returns the result for some tokens of the step: the log-probability of a given token each.

    Args:
      rows_2W: hidden index, and the token.
    """
    check_shapes(hidden_TD=hidden_TD, rows_2W=rows_2W)
    hidden_index_W, token_W = rows_2W
    logits_WV = _logits_at(head, hidden_TD, hidden_index_W, spec=spec)
    is_finite_W1 = sampler.is_usable(logits_WV)[:, None].astype(jnp.int32)
    return jnp.concatenate([is_finite_W1, _logprob_columns(logits_WV, token_W, spec=spec)], axis=1)


def _logits_at(head: Params, hidden_TD: Array, hidden_index_R: Array, *, spec: RunnerSpec) -> Array:
    hidden_RD = hidden_TD.at[hidden_index_R].get(mode="clip")
    return logits(head, hidden_RD, config=spec.model, matmul=spec.kernels.matmul)


def _logprob_columns(logits_RV: Array, token_R: Array, *, spec: RunnerSpec) -> Array:
    logprobs = find_logprobs(
        logits_RV,
        token_R,
        vocab_size=spec.model.vocab_size,
        num_top=spec.max_logprobs,
        impl=spec.kernels.sampling,
    )
    return results.pack_logprobs(logprobs)


def copy_pages(kv: KV, pages_2W: Array) -> KV:
    """Returns the pool (donate it) with page `pages_2W[0]` copied to page `pages_2W[1]`; all are
    read before any is written. Padding: target past the end."""
    source_W, target_W = pages_2W

    def copy(pool: Array) -> Array:
        return pool.at[target_W].set(pool.at[source_W].get(mode="clip"), mode="drop")

    copied: KV = jax.tree.map(copy, kv)
    return copied


def page_out(kv: KV, pages_W: Array) -> KV:
    """Returns pages of the pool, layer by layer: ``out_W2KRH``. Padding: any page."""
    pages: KV = jax.tree.map(lambda pool: pool.at[pages_W].get(mode="clip"), kv)
    return pages


def page_in(kv: KV, pages_W: Array, layers: KV) -> KV:
    """Returns the pool (donate it) with pages written to `pages_W`. Padding: past the end.

    Args:
      layers: of each layer its ``in_W2KRH``. One array of them all would be cut up again, which
        takes four times as long as to write it.
    """
    for in_W2KRH in layers:
        check_shapes(pages_W=pages_W, in_W2KRH=in_W2KRH)
    written: KV = jax.tree.map(
        lambda pool, pages: pool.at[pages_W].set(pages, mode="drop"), kv, layers
    )
    return written
