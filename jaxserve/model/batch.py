"""What one forward step reads besides parameters and KV."""

import dataclasses
import functools

import flax.struct
import jax
import numpy as np
from jax import numpy as jnp


@flax.struct.dataclass(kw_only=True)
class TokenBatch:
    """One step's tokens, padded to a bucket; every array is int32.

    One-token rows come first, then tiles of `tile` tokens, each of one sequence; a sequence's
    tiles follow one another. T = num_single_rows + num_tiles * tile, X = num_single_rows +
    num_tiles.

    Attributes:
      token_ids_T: the tokens to compute; any id in padding.
      positions_T: position of each token in its sequence; anything in padding.
      write_pages_T: pool page that takes the token's K/V; C or more, past the end, in padding.
        Never -1, which would be the last page.
      write_rows_T: row of that page; in [0, R), also in padding.
      page_table_XP: pool pages of each attention row, in position order; unused entries hold
        anything.
      q_starts_X: position of the row's first token; anything in padding rows.
      q_lens_X: tokens of the row that count; 0 in padding rows.
      prompt_lens_X: length of the prompt of the row's sequence, without its outputs; anything in
        padding rows.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    write_pages_T: jax.Array
    write_rows_T: jax.Array
    page_table_XP: jax.Array
    q_starts_X: jax.Array
    q_lens_X: jax.Array
    prompt_lens_X: jax.Array


def spread_rows(value_X: jax.Array, *, num_single_rows: int, tile: int) -> jax.Array:
    """Returns each token's share of what attention rows have: ``value_T``."""
    spread = jnp.repeat(value_X[num_single_rows:], tile, axis=0)
    return jnp.concatenate([value_X[:num_single_rows], spread])


def split_rows(batch: TokenBatch, *, num_single_rows: int, tile: int) -> TokenBatch:
    """Returns the same tokens with an attention row for each: X = T, all of one token.

    A token's attention is then the same operation on the same shape wherever in a step it stands.
    """
    spread = functools.partial(spread_rows, num_single_rows=num_single_rows, tile=tile)
    is_real_T = find_real_tokens(batch.q_lens_X, num_single_rows=num_single_rows, tile=tile)
    return dataclasses.replace(
        batch,
        page_table_XP=spread(batch.page_table_XP),
        q_starts_X=batch.positions_T,
        q_lens_X=is_real_T.astype(jnp.int32),
        prompt_lens_X=spread(batch.prompt_lens_X),
    )


def find_real_tokens(q_lens_X: jax.Array, *, num_single_rows: int, tile: int) -> jax.Array:
    """Returns ``is_real_T``: False in padding tokens."""
    num_tiles = q_lens_X.shape[0] - num_single_rows
    offset_T = np.r_[np.zeros(num_single_rows), np.tile(np.arange(tile), num_tiles)]
    lens_T = spread_rows(q_lens_X, num_single_rows=num_single_rows, tile=tile)
    return jnp.asarray(offset_T, jnp.int32) < lens_T
