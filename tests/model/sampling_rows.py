"""Packs the reference sampler's rows into device arrays, and runs the compiled sampler, in each of
its forms."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.model.sampling import Sampled, SamplingRows, Variant, sample
from tests.model.reference_sampler import Row

NUM_BIASES, NUM_BANS = 4, 3


def build_rows(rows: Sequence[Row], *, padded_vocab_size: int) -> SamplingRows:
    def column(name: str, dtype: str) -> jax.Array:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    B, V = len(rows), padded_vocab_size
    seeds = np.array([[row.seed >> 32, row.seed & 0xFFFFFFFF] for row in rows], np.uint32)
    bias_ids, bias_values = np.full((B, NUM_BIASES), V), np.zeros((B, NUM_BIASES))
    ban_ids, counts = np.full((B, NUM_BANS), V), np.zeros((B, V))
    for b, row in enumerate(rows):
        for e, (v, value) in enumerate(row.bias):
            bias_ids[b, e], bias_values[b, e] = v, value
        ban_ids[b, : len(row.bans)] = row.bans
        for v in set(row.prompt):
            counts[b, v] += 1
        for v in row.output:
            counts[b, v] += 2
    return SamplingRows(
        seed_B2=jnp.asarray(seeds),
        choice_B=column("choice", "uint32"),
        temperature_B=column("temperature", "float32"),
        top_k_B=column("top_k", "int32"),
        top_p_B=column("top_p", "float32"),
        min_p_B=column("min_p", "float32"),
        presence_B=column("presence", "float32"),
        frequency_B=column("frequency", "float32"),
        repetition_B=column("repetition", "float32"),
        bias_ids_BE=jnp.asarray(bias_ids.astype(np.int32)),
        bias_values_BE=jnp.asarray(bias_values.astype(np.float32)),
        ban_ids_BM=jnp.asarray(ban_ids.astype(np.int32)),
        min_tokens_B=column("min_tokens", "int32"),
        counts_BV=jnp.asarray(counts.astype(np.int32)),
    )


_jit = functools.partial(jax.jit, static_argnames=("vocab_size", "variant", "impl"))
_sample = _jit(sample)


def run_sample(*arguments: object, **options: object) -> Sampled:
    """Returns what the CPU's form draws, after a GPU's has drawn the same tokens."""
    sampled: Sampled = _sample(*arguments, **options, impl="candidates")
    if options["variant"] == "full":
        in_passes = _sample(*arguments, **options, impl="passes")
        np.testing.assert_array_equal(in_passes.token_B, sampled.token_B)
        np.testing.assert_array_equal(in_passes.is_finite_B, sampled.is_finite_B)
        assert not in_passes.used_fallback
    return sampled


# Rows and ids are padded to a few sizes: compiling is what these tests cost.
SIZES = (8, 64, 512)


def run(
    logits_BV: np.ndarray,
    rows: Sequence[Row],
    *,
    variant: Variant = "full",
    output_index: int | None = None,
) -> Sampled:
    """Returns what the sampler draws from real logits [B, vocab_size].

    Args:
      output_index: in place of the rows' own.
    """
    num_rows, vocab_size = logits_BV.shape
    B, V = next(size for size in SIZES if size >= num_rows), -(-vocab_size // 64) * 64
    # The padding is the best by far, so that a look at it would be seen.
    padded_BV = np.full((B, V), 9e9, np.float32)
    padded_BV[:num_rows, :vocab_size] = logits_BV
    all_rows = (*rows, *[Row(temperature=0.0)] * (B - num_rows))
    output_index_B = np.array([row.output_index for row in all_rows], np.int32)
    if output_index is not None:
        output_index_B[:] = output_index
    sampled = run_sample(
        padded_BV,
        cached_rows(all_rows, padded_vocab_size=V),
        output_index_B,
        vocab_size=vocab_size,
        variant=variant,
    )
    return Sampled(
        token_B=sampled.token_B[:num_rows],
        is_finite_B=sampled.is_finite_B[:num_rows],
        used_fallback=sampled.used_fallback,
    )


cached_rows = functools.lru_cache(maxsize=4)(build_rows)


def tokens(
    logits_BV: np.ndarray,
    rows: Sequence[Row],
    *,
    variant: Variant = "full",
    output_index: int | None = None,
) -> list[int]:
    sampled = run(logits_BV, rows, variant=variant, output_index=output_index)
    return [int(v) for v in np.asarray(sampled.token_B)]
