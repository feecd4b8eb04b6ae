"""How the GPU kernels of `paged_attention` are cut into programs, by the shape of their call."""

import dataclasses
import math
from typing import Protocol

import numpy as np

from jaxserve.errors import ShapeError
from jaxserve.kernels.pool import LARGEST
from jaxserve.shapes import HasShape

# Programs that keep an H200's 132 processors busy: two each, so that one's loads hide the other's.
WANTED_PROGRAMS = 264
MAX_SPLITS = 32
SPLIT_LEN = 512  # tokens; a whole number of every launch's blocks

# CUDA's limit on the second and third axis of a grid; the first may have 2**31 - 1.
MAX_GRID = 65535

# Bytes of a layer's pool of one-byte elements from which on the Triton backend reads it wrongly.
MAX_BYTE_POOL = 2**31

# Rows of a program's product, (query, head) pairs of one KV head: what tensor cores take at least,
# and where Hopper's own wide form begins.
MIN_ROWS, MAX_ROWS = 16, 64

# What the Mosaic kernel is written for: WGMMA, which no compute capability but 9 has; tiles of 32
# or 64 lanes, pages that are whole tiles.
MOSAIC_CAPABILITY = "9"
MOSAIC_HEAD_DIMS = (64, 96, 128, 256)
MOSAIC_MIN_PAGE = 16
# Queries of float32 are three of bfloat16: of 256 lanes that spilled 280 bytes of registers.
MOSAIC_MAX_WIDE_HEAD_DIM = 128


class HasDtype(HasShape, Protocol):
    """An array, or its shape and dtype alone."""

    @property
    def dtype(self) -> np.dtype: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How the calls of a kernel are cut into programs, whatever their rows and lengths.

    Attributes:
      rows: (query, head) pairs of a program; a power of two.
      block_tokens: keys of one turn of its loop; a power of two.
      wanted_programs: the keys of each row are shared out until a call has about so many programs.
    """

    rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    wanted_programs: int = WANTED_PROGRAMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cuts:
    """Of the calls of one query a row, and of those of chunks; None is by the formulas here."""

    decode: Cut | None = None
    chunk: Cut | None = None

    def of(self, num_queries: int) -> Cut | None:
        return self.decode if num_queries == 1 else self.chunk


BY_FORMULA = Cuts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The cut of one call, by its rows and lengths too.

    Attributes:
      rows, block_tokens, num_warps, num_stages: as in `Cut`.
      num_splits: programs that share a row's keys, evenly by its own length. 1 writes the output
        directly; more leave parts that are combined afterwards.
      split_len: tokens of each split instead, a whole number of blocks: a row's arithmetic is then
        the same in every step, whatever `num_splits` another step would have had.
    """

    rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    split_len: int | None = None


def find_launch(
    q_XQNH: HasDtype,
    kv_C2KRH: HasDtype,
    page_table_XP: HasShape,
    *,
    split_len: int | None = None,
    cuts: Cuts = BY_FORMULA,
) -> Launch:
    """Returns the launch for a call's shapes.

    Args:
      split_len: tokens of a split, where they must not depend on the step.
      cuts: what was found to be faster than the formula.
    """
    cut = cuts.of(q_XQNH.shape[1]) or plan_cut(q_XQNH, kv_C2KRH)
    return _split_up(cut, q_XQNH, kv_C2KRH, page_table_XP, split_len=split_len)


def plan_cut(q_XQNH: HasDtype, kv_C2KRH: HasDtype) -> Cut:
    """Returns how the Triton kernel's calls are cut, by formula."""
    _, Q, N, H = q_XQNH.shape
    K = kv_C2KRH.shape[2]
    rows = min(max(power_of_two(N // K * Q), MIN_ROWS), MAX_ROWS)
    if kv_C2KRH.dtype == np.float32:
        # Multiplied without tensor cores, where every operand passes through registers.
        rows, block_tokens, num_warps = MIN_ROWS, 32 if H <= 128 else 16, 4
    else:
        if q_XQNH.dtype == np.float32:  # its three parts take all registers at 32 rows
            rows = MIN_ROWS
        block_tokens = 64 if H <= 128 else 32
        num_warps = 8 if rows == MAX_ROWS and H > 128 else 4
    return Cut(rows=rows, block_tokens=block_tokens, num_warps=num_warps, num_stages=2)


def find_split_len(num_tokens: int) -> int:
    """Returns the length of a split, in tokens, for rows of at most so many: the same for all of
    them, and at most `MAX_SPLITS` splits."""
    return SPLIT_LEN * -(-num_tokens // (SPLIT_LEN * MAX_SPLITS))


def find_mosaic_launch(
    q_XQNH: HasDtype,
    kv_C2KRH: HasDtype,
    page_table_XP: HasShape,
    *,
    split_len: int | None = None,
    cuts: Cuts = BY_FORMULA,
) -> Launch:
    """Returns the launch of the Mosaic kernel; the arguments are those of `find_launch`."""
    cut = cuts.of(q_XQNH.shape[1]) or plan_mosaic_cut(q_XQNH, kv_C2KRH)
    return _split_up(cut, q_XQNH, kv_C2KRH, page_table_XP, split_len=split_len)


def plan_mosaic_cut(q_XQNH: HasDtype, kv_C2KRH: HasDtype) -> Cut:
    """Returns how the Mosaic kernel's calls are cut, by formula: for a warpgroup, and the 64 rows
    of its products.

    All stages but one are on their way: two blocks of one byte a number, or one of two bytes.
    Three-part queries over one byte take more registers: 140 bytes were spilled at 128 lanes.
    """
    has_bytes = kv_C2KRH.dtype.itemsize == 1
    most_lanes = 64 if has_bytes and q_XQNH.dtype == np.float32 else 128
    return Cut(
        rows=MAX_ROWS,
        block_tokens=64 if q_XQNH.shape[3] <= most_lanes else 32,
        num_warps=4,
        num_stages=3 if has_bytes else 2,
    )


def _split_up(
    cut: Cut,
    q_XQNH: HasShape,
    kv_C2KRH: HasShape,
    page_table_XP: HasShape,
    *,
    split_len: int | None,
) -> Launch:
    """Returns the launch of a cut: with splits of the length asked, or to have enough programs."""
    X, Q, N, _ = q_XQNH.shape
    K, R = kv_C2KRH.shape[2:4]
    num_programs = X * -(-(N // K * Q) // cut.rows) * K
    num_tokens = page_table_XP.shape[1] * R
    if split_len is not None:
        num_splits = -(-num_tokens // split_len)
    else:
        num_splits = min(cut.wanted_programs // num_programs, num_tokens // (2 * cut.block_tokens))
        num_splits = max(1, min(num_splits, MAX_SPLITS))
    return Launch(
        rows=cut.rows,
        block_tokens=cut.block_tokens,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        num_splits=num_splits,
        split_len=split_len,
    )


def find_mosaic_problem(
    *, q_dtype: str, kv_dtype: str, head_dim: int, page_size: int
) -> str | None:
    """Returns why the Mosaic kernel cannot compute such a call."""
    if kv_dtype != "bfloat16" and kv_dtype not in LARGEST:
        return f"the KV pool is {kv_dtype}, and it reads bfloat16, {' and '.join(LARGEST)} alone"
    if head_dim not in MOSAIC_HEAD_DIMS:
        sizes = ", ".join(map(str, MOSAIC_HEAD_DIMS))
        return f"head_dim is {head_dim}, and it is written for {sizes}"
    if q_dtype not in ("bfloat16", "float32"):
        return f"queries are {q_dtype}, not bfloat16 or float32"
    if q_dtype == "float32" and head_dim > MOSAIC_MAX_WIDE_HEAD_DIM:
        return (
            f"queries are float32 and head_dim is {head_dim}: beyond {MOSAIC_MAX_WIDE_HEAD_DIM} "
            "the weights' parts do not fit in registers"
        )
    if page_size < MOSAIC_MIN_PAGE or page_size != power_of_two(page_size):
        return f"page_size is {page_size}, not a power of two from {MOSAIC_MIN_PAGE} on"
    return None


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below size."""
    return 1 << (size - 1).bit_length()


def check_launch(launch: Launch, kv_C2KRH: HasShape) -> None:
    """Refuses what a GPU kernel would run wrongly, or not at all.

    Raises:
      ShapeError: a grid over CUDA's limit, or a split that is no whole block.
    """
    num_kv_heads = kv_C2KRH.shape[2]
    if num_kv_heads > MAX_GRID or launch.num_splits > MAX_GRID:
        raise ShapeError(
            f"{num_kv_heads} KV heads and {launch.num_splits} splits, but a grid has at most "
            f"{MAX_GRID} of each; make the splits longer"
        )
    if launch.split_len is not None and launch.split_len % launch.block_tokens:
        raise ShapeError(
            f"a split of {launch.split_len} tokens is no whole number of blocks of "
            f"{launch.block_tokens}"
        )


def find_pool_problem(kv_C2KRH: HasDtype) -> str | None:
    """Returns why the Triton backend would read a layer's pool at wrong places.

    It counts elements with signed 32-bit integers wherever an array has at most 2**32 bytes. Of
    one-byte elements 2**31 or more fit in there, and their offsets would turn negative.
    """
    num_bytes = math.prod(kv_C2KRH.shape) * kv_C2KRH.dtype.itemsize
    if kv_C2KRH.dtype.itemsize == 1 and MAX_BYTE_POOL <= num_bytes <= 2**32:
        return (
            f"a pool of one-byte elements has {num_bytes} bytes in one layer; the Triton backend "
            "reads those of 2 to 4 GiB at wrong places"
        )
    return None
