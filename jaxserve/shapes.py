"""The letters that name array dimensions, and the one check of them.

A name's suffix spells its shape: ``q_TNH`` is [T, N, H]; a digit is a literal size.

T  tokens of a step, all sequences end to end, padded to a bucket
B  sequences (one-token rows, state rows) of a step
X  attention rows: one-token rows, or chunk tiles
Q  queries of an attention row: 1, or the tile size
P  pages of one sequence (the width of the page table)
C  pages in the pool
R  rows of a page (page_size); one row holds the K and V of one token
S  context length, P * R
N  query heads    K  KV heads    G  N // K, query heads per KV head
H  head size      D  model size  F  MLP hidden size
V  vocabulary, padded            L  layers
E  experts; or entries of a sparse per-row list (biases)
  M  another small width (bans; queries of a KV head)
J  candidates of a sampler's row; experts of a token
I  (token, expert) pairs of a step
W  words of a token mask, V // 32; or entries of a program of fixed width
"""

from typing import Protocol

from jaxserve.errors import ShapeError


class HasShape(Protocol):
    """A jax array, a numpy array or a ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_shapes(**arrays: HasShape) -> dict[str, int]:
    """Bind the letters of each keyword's suffix to sizes, and return the sizes.

    ``check_shapes(q_BNH=q, kv_lens_B=lens)`` returns ``{"B": .., "N": .., "H": ..}``. Only
    ``.shape`` is read, so under ``jit`` this runs once, while tracing.

    Raises:
      ShapeError: an array has the wrong rank, or one letter would get two sizes.
    """
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        letters = name.rpartition("_")[2]
        if len(letters) != len(array.shape):
            raise ShapeError(f"{name} must have {len(letters)} dims, got shape {array.shape}")
        for letter, size in zip(letters, array.shape, strict=True):
            want = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if size != want:
                raise ShapeError(f"{name}: {letter} is {size} in {array.shape}, expected {want}")
    return sizes
