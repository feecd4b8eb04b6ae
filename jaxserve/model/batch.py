"""What one forward step reads besides parameters and KV."""

import flax.struct
import jax


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
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    write_pages_T: jax.Array
    write_rows_T: jax.Array
    page_table_XP: jax.Array
    q_starts_X: jax.Array
    q_lens_X: jax.Array
