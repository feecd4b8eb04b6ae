"""Counter-based random numbers: pure functions of a key and a counter, so of nothing else.

A draw does not depend on the row it is made in, on the batch, the step or the bucket.
"""

import jax
import numpy as np
from jax import numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
NUM_ROUNDS = 20


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns two uint32 words for each element; the four inputs are uint32 of one shape.

    Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2,
    3", §4.2, in the form of the Random123 library, whose test vectors it meets. Written out here,
    and not taken from `jax.random`, because that has no stable entry to a raw counter.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    left, right = counter[0] + words[0], counter[1] + words[1]
    for group in range(NUM_ROUNDS // 4):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = _rotate_left(right, rotation) ^ left
        left = left + words[(group + 1) % 3]
        right = right + words[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def _rotate_left(word: jax.Array, by: int) -> jax.Array:
    return (word << np.uint32(by)) | (word >> np.uint32(32 - by))


def gumbel_of_bits(bits: jax.Array) -> jax.Array:
    """Returns float32 samples of the standard Gumbel distribution, one of each uint32.

    With w = (bits + 1/2) / 2^32, uniform in (0, 1), the sample is -log(-log(1 - w)), so a large
    sample comes of a small w, where float32 is finest: the upper tail reaches 22.9 in steps of
    2^-32. The other way round (-log(-log(w))) it would end at 16.6, and a token of probability
    below 2^-24 could never be drawn. w is held below 1 where float32 would round it to 1.
    """
    w = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    w = jnp.minimum(w, np.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-w))


def token_noise(
    seed_B2: jax.Array, *, output_index_B: jax.Array, choice_B: jax.Array, token_BV: jax.Array
) -> jax.Array:
    """Returns the Gumbel noise of some token ids of each row, float32 ``[B, V]``.

    Two threefry calls: the row's key from its seed, output index and choice; then a word of each
    id. So the noise of an id is the same whether all ids are worked out or a few.

    Args:
      seed_B2: uint32, the high and the low half of the 64-bit seed.
      output_index_B: which token of the output is drawn.
      token_BV: ids, any number of them in any order.
    """
    row_key = threefry2x32(
        (seed_B2[:, 0], seed_B2[:, 1]),
        (output_index_B.astype(jnp.uint32), choice_B.astype(jnp.uint32)),
    )
    key = tuple(jnp.broadcast_to(word_B[:, None], token_BV.shape) for word_B in row_key)
    counter_BV = token_BV.astype(jnp.uint32)
    bits_BV, _ = threefry2x32((key[0], key[1]), (counter_BV, jnp.zeros_like(counter_BV)))
    return gumbel_of_bits(bits_BV)
