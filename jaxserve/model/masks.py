"""Token masks: one bit an id, packed where grammars are, unpacked where logits are."""

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.shapes import check_shapes

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Returns the words of one row's mask, for so many ids."""
    return -(-vocab_size // WORD_BITS)


def keep_allowed(logits_BV: jax.Array, mask_BW: jax.Array) -> jax.Array:
    """Returns the logits with -inf where an id's bit is 0; a mask of ones changes no bit of them.

    Args:
      mask_BW: uint32; id v is bit v % 32 of word v // 32.

    Raises:
      ShapeError: the mask is not as wide as the logits; while tracing.
    """
    sizes = check_shapes(logits_BV=logits_BV, mask_BW=mask_BW)
    B, V, W = sizes["B"], sizes["V"], sizes["W"]
    if W * WORD_BITS != V:
        raise ShapeError(f"mask_BW has {W} words for {V} ids, expected {V / WORD_BITS}")
    shift_11M = jnp.arange(WORD_BITS, dtype=jnp.uint32)[None, None, :]
    bit_BWM = (mask_BW[:, :, None] >> shift_11M) & np.uint32(1)
    return jnp.where(bit_BWM.reshape(B, V) == 1, logits_BV, -jnp.inf)
