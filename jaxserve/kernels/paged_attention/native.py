"""`paged_attention` in C++ for a CPU (`kernels/native/attention_call.h`)."""

from typing import Final

import jax
import numpy as np

from jaxserve.errors import ShapeError
from jaxserve.kernels.pool import Pool, split_pool

# Each has a function of its own, so that a start compiles what its pool wants and no more.
POOL_DTYPES: Final = ("float32", "bfloat16", "int8", "float8_e4m3fn")
HEAD_MULTIPLE: Final = 16
MAX_HEAD_DIM: Final = 512


def attend(
    q_TNH: jax.Array,
    kv_C2KRH: Pool,
    page_table_XP: jax.Array,
    q_starts_X: jax.Array,
    q_lens_X: jax.Array,
    *,
    num_single_rows: int,
    tile: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Returns ``out_TNH`` in q's dtype: rows of one query and tiles in one call, which has all
    threads at work on both, as `api.paged_attention` has them. `load_native` comes first.

    Raises:
      ShapeError: see `find_attention_problem`; the pool is of no dtype that is read here.
    """
    if problem := find_attention_problem(q_TNH.shape[-1]):
        raise ShapeError(f"native: {problem}")
    if kv_C2KRH.dtype.name not in POOL_DTYPES:
        allowed = ", ".join(POOL_DTYPES)
        raise ShapeError(f"native: the pool is {kv_C2KRH.dtype}, not one of {allowed}")
    stored_C2KRH, scales_C2KR = split_pool(kv_C2KRH)
    call = jax.ffi.ffi_call(
        target_of(kv_C2KRH.dtype.name), jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)
    )
    out_TNH: jax.Array = call(
        q_TNH,
        stored_C2KRH,
        page_table_XP,
        q_starts_X,
        q_lens_X,
        *(() if scales_C2KR is None else (scales_C2KR,)),
        num_single_rows=np.int64(num_single_rows),
        tile=np.int64(tile),
        scale=np.float32(scale),
        window=np.int64(window or 0),
        soft_cap=np.float32(soft_cap or 0.0),
    )
    return out_TNH


def target_of(pool_dtype: str) -> str:
    """Returns the name by which XLA knows the function of a pool of one of `POOL_DTYPES`."""
    return f"jaxserve_paged_attention_{pool_dtype}"


def find_attention_problem(head_dim: int) -> str | None:
    """Returns why a model's attention cannot be computed so."""
    if head_dim % HEAD_MULTIPLE or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, not a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD_DIM}"
    return None
