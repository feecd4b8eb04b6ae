"""State rows: what the device keeps of each running sequence, and the programs that fill them."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import flax.struct
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from jaxserve.model.sampling import SamplingRows, Variant
from jaxserve.plan import RowLoad
from jaxserve.request import SamplingParams
from jaxserve.runner.spec import RunnerSpec
from jaxserve.shapes import check_shapes

LOAD_WIDTH = 8  # rows of one run of the load program
COUNT_WIDTH = 1024  # (row, token, amount) triples of one run of the count program


@flax.struct.dataclass
class RowState:
    """B state rows; a sequence owns one while it runs. A row nobody owns holds what was left in it.

    Attributes:
      page_table_BP: pool pages in position order; page 0 where unused.
      last_token_B: the token last sampled into the row.
    """

    page_table_BP: Array
    last_token_B: Array
    sampling: SamplingRows


def init_state(spec: RunnerSpec) -> RowState:
    """Returns rows without pages and with neutral sampling: greedy, nothing biased or banned."""
    B, V = spec.max_seqs, spec.model.padded_vocab_size
    no_rows = jnp.full((B,), B, jnp.int32)
    empty = SamplingRows(
        seed_B2=jnp.zeros((B, 2), jnp.uint32),
        choice_B=jnp.zeros((B,), jnp.uint32),
        temperature_B=jnp.zeros((B,), jnp.float32),
        top_k_B=jnp.zeros((B,), jnp.int32),
        top_p_B=jnp.zeros((B,), jnp.float32),
        min_p_B=jnp.zeros((B,), jnp.float32),
        presence_B=jnp.zeros((B,), jnp.float32),
        frequency_B=jnp.zeros((B,), jnp.float32),
        repetition_B=jnp.zeros((B,), jnp.float32),
        bias_ids_BE=jnp.zeros((B, spec.max_logit_bias), jnp.int32),
        bias_values_BE=jnp.zeros((B, spec.max_logit_bias), jnp.float32),
        ban_ids_BM=jnp.zeros((B, spec.max_ban_ids), jnp.int32),
        min_tokens_B=jnp.zeros((B,), jnp.int32),
        counts_BV=jnp.zeros((B, V), jnp.int32),
    )
    return RowState(
        page_table_BP=jnp.zeros((B, spec.pages_per_seq), jnp.int32),
        last_token_B=jnp.zeros((B,), jnp.int32),
        sampling=gather_sampling(empty, no_rows, padded_vocab=V),
    )


def gather_sampling(sampling: SamplingRows, row_R: Array, *, padded_vocab: int) -> SamplingRows:
    """Returns one sampling row for each of `row_R`; a row past the end is neutral, so that padding
    can neither change a result nor ask for a fallback."""

    def take(leaf: Array, neutral: float) -> Array:
        return leaf.at[row_R].get(mode="fill", fill_value=neutral)

    return SamplingRows(
        seed_B2=take(sampling.seed_B2, 0),
        choice_B=take(sampling.choice_B, 0),
        temperature_B=take(sampling.temperature_B, 0.0),
        top_k_B=take(sampling.top_k_B, 0),
        top_p_B=take(sampling.top_p_B, 1.0),
        min_p_B=take(sampling.min_p_B, 0.0),
        presence_B=take(sampling.presence_B, 0.0),
        frequency_B=take(sampling.frequency_B, 0.0),
        repetition_B=take(sampling.repetition_B, 1.0),
        bias_ids_BE=take(sampling.bias_ids_BE, padded_vocab),
        bias_values_BE=take(sampling.bias_values_BE, 0.0),
        ban_ids_BM=take(sampling.ban_ids_BM, padded_vocab),
        min_tokens_B=take(sampling.min_tokens_B, 0),
        counts_BV=take(sampling.counts_BV, 0),
    )


def find_variant(
    sampling: SamplingParams, output_index: int, *, is_masked: bool, has_logprobs: bool
) -> Variant:
    """Returns the least that the output program must do for this token.

    Args:
      is_masked: it is drawn under a mask.
      has_logprobs: its log-probability is wanted.
    """
    is_banned = output_index < sampling.min_tokens
    if is_masked or has_logprobs or is_banned or sampling.has_penalties or sampling.logit_bias:
        return "full"
    if sampling.is_greedy:
        return "greedy"
    has_filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return "full" if has_filters else "plain"


# Parts of one packed load, in order; floats are carried as their bits.
_INT_PARTS = ("row", "seed_hi", "seed_lo", "choice", "top_k", "min_tokens")
_FLOAT_PARTS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


def load_len(spec: RunnerSpec) -> int:
    """Returns the ints of one packed row load."""
    lists = spec.pages_per_seq + 2 * spec.max_logit_bias + spec.max_ban_ids
    return len(_INT_PARTS) + len(_FLOAT_PARTS) + lists


def build_row_loads(loads: Sequence[RowLoad], spec: RunnerSpec) -> Iterator[np.ndarray]:
    """Yields packed loads, `LOAD_WIDTH` rows at a time. Padding: row `max_seqs` (past the end),
    page 0, and ids `padded_vocab_size` (past the end)."""
    for first in range(0, len(loads), LOAD_WIDTH):
        packed_LI = np.zeros((LOAD_WIDTH, load_len(spec)), np.int32)
        packed_LI[:, 0] = spec.max_seqs
        for packed_I, load in zip(packed_LI, loads[first:], strict=False):
            _pack_load(packed_I, load, spec)
        yield packed_LI


def _pack_load(packed_I: np.ndarray, load: RowLoad, spec: RunnerSpec) -> None:
    sampling, bias = load.sampling, load.sampling.logit_bias
    assert len(load.pages) <= spec.pages_per_seq, f"too many pages: {load}"
    assert len(bias) <= spec.max_logit_bias, f"too many biases: {load}"
    assert len(load.stop_ids) <= spec.max_ban_ids, f"too many stop ids: {load}"
    scalars_I, pages_P, bias_ids_E, bias_values_E, ban_ids_M = np.split(packed_I, _load_cuts(spec))
    seed = (load.seed >> 32, load.seed & 0xFFFFFFFF, load.choice)
    scalars_I[0] = load.row
    scalars_I[1:4] = np.array(seed, np.uint32).view(np.int32)
    scalars_I[4:6] = sampling.top_k, sampling.min_tokens
    scalars_I[6:].view(np.float32)[:] = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    bias_ids_E[:] = ban_ids_M[:] = spec.model.padded_vocab_size
    pages_P[: len(load.pages)] = load.pages
    bias_ids_E[: len(bias)] = list(bias)
    bias_values_E.view(np.float32)[: len(bias)] = list(bias.values())
    ban_ids_M[: len(load.stop_ids)] = load.stop_ids


def load_rows(state: RowState, packed_LI: Array, *, spec: RunnerSpec) -> RowState:
    """Returns the state with the loaded rows: pages, parameters, and counts cleared."""
    check_shapes(packed_LI=packed_LI, page_table_BP=state.page_table_BP)
    scalars, pages_LP, bias_ids_LE, bias_bits_LE, ban_ids_LM = jnp.split(
        packed_LI, _load_cuts(spec), axis=1
    )
    row_L, seed_hi_L, seed_lo_L, choice_L, top_k_L, min_tokens_L = scalars.T[: len(_INT_PARTS)]
    temperature_L, top_p_L, min_p_L, presence_L, frequency_L, repetition_L = _floats(
        scalars.T[len(_INT_PARTS) :]
    )

    def put(leaf: Array, value: Array) -> Array:
        return leaf.at[row_L].set(value.astype(leaf.dtype), mode="drop")

    rows = state.sampling
    seed_L2 = lax.bitcast_convert_type(jnp.stack([seed_hi_L, seed_lo_L], axis=1), jnp.uint32)
    sampling = SamplingRows(
        seed_B2=put(rows.seed_B2, seed_L2),
        choice_B=put(rows.choice_B, lax.bitcast_convert_type(choice_L, jnp.uint32)),
        temperature_B=put(rows.temperature_B, temperature_L),
        top_k_B=put(rows.top_k_B, top_k_L),
        top_p_B=put(rows.top_p_B, top_p_L),
        min_p_B=put(rows.min_p_B, min_p_L),
        presence_B=put(rows.presence_B, presence_L),
        frequency_B=put(rows.frequency_B, frequency_L),
        repetition_B=put(rows.repetition_B, repetition_L),
        bias_ids_BE=put(rows.bias_ids_BE, bias_ids_LE),
        bias_values_BE=put(rows.bias_values_BE, _floats(bias_bits_LE)),
        ban_ids_BM=put(rows.ban_ids_BM, ban_ids_LM),
        min_tokens_B=put(rows.min_tokens_B, min_tokens_L),
        counts_BV=rows.counts_BV.at[row_L].set(0, mode="drop"),
    )
    return dataclasses.replace(
        state, page_table_BP=put(state.page_table_BP, pages_LP), sampling=sampling
    )


def _load_cuts(spec: RunnerSpec) -> list[int]:
    """Returns where a packed load is cut: scalars, pages, bias ids, bias values, ban ids."""
    E = spec.max_logit_bias
    lens = (len(_INT_PARTS) + len(_FLOAT_PARTS), spec.pages_per_seq, E, E)
    return np.cumsum(lens).tolist()


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def build_counts(loads: Sequence[RowLoad], spec: RunnerSpec) -> Iterator[np.ndarray]:
    """Yields (row, token, amount) triples, `COUNT_WIDTH` at a time, for loads that carry prompt or
    output. Amount: 1 where the id is in the prompt, plus twice its count in the output. Padding:
    row `max_seqs`, past the end."""
    triples = [
        (load.row, token, (token in prompt) + 2 * output[token])
        for load in loads
        if load.prompt or load.output
        for prompt, output in [(frozenset(load.prompt), Counter(load.output))]
        for token in prompt | output.keys()
    ]
    for first in range(0, len(triples), COUNT_WIDTH):
        some = triples[first : first + COUNT_WIDTH]
        triples_3I = np.zeros((3, COUNT_WIDTH), np.int32)
        triples_3I[0] = spec.max_seqs
        triples_3I[:, : len(some)] = np.array(some, np.int32).T
        yield triples_3I


def add_counts(counts_BV: Array, triples_3I: Array) -> Array:
    """Returns the counts with the amounts added; their rows were cleared by `load_rows`."""
    check_shapes(counts_BV=counts_BV, triples_3I=triples_3I)
    row_I, token_I, amount_I = triples_3I
    return counts_BV.at[row_I, token_I].add(amount_I, mode="drop")
