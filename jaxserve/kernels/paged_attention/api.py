"""Attention of ragged queries over a paged KV pool: decode, chunk and verify are the same call."""

import functools
from typing import Literal, Protocol

import jax
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention import native, reference, xla
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts
from jaxserve.kernels.pool import LARGEST, Pool, QuantizedPool
from jaxserve.shapes import check_shapes

# "triton" and "mosaic" need a CUDA GPU; with "_interpret" their kernels are simulated, slowly.
RowImpl = Literal["reference", "xla", "triton", "triton_interpret", "mosaic", "mosaic_interpret"]
Impl = RowImpl | Literal["native"]


class Attend(Protocol):
    """What a `RowImpl` provides: attention of X rows of Q queries each."""

    def __call__(
        self,
        q_XQNH: jax.Array,
        kv_C2KRH: Pool,
        page_table_XP: jax.Array,
        q_starts_X: jax.Array,
        q_lens_X: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> jax.Array: ...


def paged_attention(
    q_TNH: jax.Array,
    kv_C2KRH: Pool,
    page_table_XP: jax.Array,
    q_starts_X: jax.Array,
    q_lens_X: jax.Array,
    *,
    num_single_rows: int,
    tile: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    split_len: int | None = None,
    cuts: Cuts = BY_FORMULA,
    impl: Impl,
) -> jax.Array:
    """Returns ``out_TNH`` in q's dtype; queries that are padding give 0.

    The queries are one-token rows first, then tiles of one sequence each; here two rows and two
    tiles of four, the second tile half full::

        T:        0 1 | 2 3 4 5 | 6 7 . .
        X:        0 1 |    2    |    3
        q_lens_X: 1 1 |    4    |    2

    Query j of row x sits at position ``q_starts_X[x] + j`` and sees the keys up to that position;
    with a window w, only the last w of them. Their K/V is already in the pool.

    Args:
      kv_C2KRH: the pool; K at [:, 0], V at [:, 1]. Never read past a row's last query, so what
        stands there (NaN too) changes nothing. Of one byte: K's scales are multiplied with the
        scores, V's with the weights; no block of either is scaled.
      page_table_XP: int32; page p of row x holds its positions [p * R, (p + 1) * R). Entries past
        the row's last page may hold anything.
      q_starts_X: int32, position of the row's first query; anything in padding rows.
      q_lens_X: int32, queries that count; 0 in padding rows, which cost no time of their own.
      num_single_rows: rows of X that have one query.
      tile: queries of each later row; not read when there are none.
      scale: factor on q·k, before the soft cap.
      split_len: where an implementation sums a row's keys in shares, their length in tokens. Given,
        a row's bits depend on its own length alone; None lets a step's shape decide.
      cuts: of a GPU kernel's work, where they were found by measuring.
      impl: chosen once by the runner at start-up. There is no silent fallback.

    Raises:
      ShapeError: wrong rank, dtype or layout; while tracing.
    """
    sizes = check_shapes(
        q_TNH=q_TNH,
        kv_C2KRH=kv_C2KRH,
        page_table_XP=page_table_XP,
        q_starts_X=q_starts_X,
        q_lens_X=q_lens_X,
    )
    _check_scales(kv_C2KRH)
    num_tiles = sizes["X"] - num_single_rows
    if num_tiles < 0 or sizes["T"] != num_single_rows + num_tiles * tile:
        raise ShapeError(
            f"q_TNH has {sizes['T']} tokens, but {num_single_rows} one-token rows and {num_tiles} "
            f"tiles of {tile} need {num_single_rows + num_tiles * tile}"
        )
    if sizes["N"] % sizes["K"]:
        raise ShapeError(f"{sizes['N']} query heads cannot share {sizes['K']} KV heads evenly")
    for name, array in (
        ("page_table_XP", page_table_XP),
        ("q_starts_X", q_starts_X),
        ("q_lens_X", q_lens_X),
    ):
        if array.dtype != jnp.int32:
            raise ShapeError(f"{name} must be int32, got {array.dtype}")

    if impl == "native":
        return native.attend(
            q_TNH,
            kv_C2KRH,
            page_table_XP,
            q_starts_X,
            q_lens_X,
            num_single_rows=num_single_rows,
            tile=tile,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
    attend = functools.partial(
        _attend_of(impl, split_len, cuts), scale=scale, window=window, soft_cap=soft_cap
    )
    B, N, H = num_single_rows, sizes["N"], sizes["H"]
    parts = []
    if B:
        out_B1NH = attend(
            q_TNH[:B].reshape(B, 1, N, H), kv_C2KRH, page_table_XP[:B], q_starts_X[:B], q_lens_X[:B]
        )
        parts.append(out_B1NH.reshape(B, N, H))
    if num_tiles:
        out_XQNH = attend(
            q_TNH[B:].reshape(num_tiles, tile, N, H),
            kv_C2KRH,
            page_table_XP[B:],
            q_starts_X[B:],
            q_lens_X[B:],
        )
        parts.append(out_XQNH.reshape(num_tiles * tile, N, H))
    return jnp.concatenate(parts)


def _check_scales(kv_C2KRH: Pool) -> None:
    if isinstance(kv_C2KRH, QuantizedPool):
        check_shapes(kv_C2KRH=kv_C2KRH, scales_C2KR=kv_C2KRH.scales_C2KR)
    if isinstance(kv_C2KRH, QuantizedPool) != (kv_C2KRH.dtype.name in LARGEST):
        raise ShapeError(
            f"kv_C2KRH is {kv_C2KRH.dtype}: {' and '.join(LARGEST)} come with scales as a "
            "QuantizedPool, and nothing else does"
        )


def _attend_of(impl: RowImpl, split_len: int | None, cuts: Cuts) -> Attend:
    match impl:
        case "reference":
            return reference.attend
        case "xla":
            return xla.attend
        case "triton" | "triton_interpret":
            # Imported where it is chosen: Pallas takes a moment that no other start-up should pay.
            from jaxserve.kernels.paged_attention import triton

            return functools.partial(
                triton.attend,
                split_len=split_len,
                cuts=cuts,
                interpret=impl == "triton_interpret",
            )
        case "mosaic" | "mosaic_interpret":
            from jaxserve.kernels.paged_attention import mosaic

            return functools.partial(
                mosaic.attend,
                split_len=split_len,
                cuts=cuts,
                interpret=impl == "mosaic_interpret",
            )
