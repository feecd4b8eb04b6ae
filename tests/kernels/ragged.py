"""Ragged steps for the kernel suites, and their error against the float64 oracle.

Sequences are laid out as the runner does it, with their pages scattered over the pool and NaN in
every row that no sequence holds.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import Impl, paged_attention, triton
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts, Launch
from jaxserve.kernels.pool import LARGEST, QuantizedPool
from tests.oracle import oracle_attention

# Largest error of a query over the largest |output| of its batch. float32: sums in another order.
# bfloat16: inputs are exact in both, but the weights and the output are rounded to 8 bits, twice.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2}

# The same beside what was written into a pool of one byte, which is rounded in K and in V: to one
# part in 254 of a head's largest number, or one in 32 of each number.
LOSS = {"int8": 3e-2, "float8_e4m3fn": 2e-1}

QUANTIZED = tuple(LARGEST)
MARKS: Mapping[Impl, tuple[pytest.MarkDecorator, ...]] = {
    "reference": (),
    "xla": (),
    "triton_interpret": (),
    "triton": (pytest.mark.gpu,),
    "native": (pytest.mark.native,),
}
IMPLS = [pytest.param(impl, marks=marks) for impl, marks in MARKS.items()]
# Each implementation with a pool of the queries' own dtype (None), and of each of one byte.
POOLS = [
    pytest.param(impl, dtype, marks=marks, id=f"{impl}-{dtype}" if dtype else impl)
    for dtype in (None, *QUANTIZED)
    for impl, marks in MARKS.items()
]
on_every_pool = pytest.mark.parametrize(("impl", "kv_dtype"), POOLS)


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence of a step: `q_len` queries, the last at position `kv_len - 1`."""

    q_len: int
    kv_len: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The padded sizes of a step."""

    num_single_rows: int
    num_tiles: int
    tile: int
    width: int
    num_pages: int


@dataclasses.dataclass
class Step:
    """The kernel's inputs for some cases, and where each case's queries are.

    Attributes:
      keys, values: what each case's part of the pool stands for.
      written: each case's K and V before the pool's rounding.
    """

    q_TNH: np.ndarray
    kv_C2KRH: Any  # a pool of numpy's arrays
    page_table_XP: np.ndarray
    q_starts_X: np.ndarray
    q_lens_X: np.ndarray
    tokens: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    written: list[tuple[np.ndarray, np.ndarray]]


def stored(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers of one byte as a pool has them."""
    return numbers if numbers.dtype == np.int8 else numbers.view(np.uint8)


def empty_rows(shape: tuple[int, ...], dtype: str) -> Any:  # noqa: ANN401
    """Returns a pool whose every number is NaN, or where there is none, large and of scale NaN."""
    if dtype not in QUANTIZED:
        return np.full(shape, np.nan, jnp.dtype(dtype))
    number = 113 if dtype == "int8" else np.nan
    return QuantizedPool(
        bytes_C2KRH=stored(np.full(shape, number, jnp.dtype(dtype))),  # type: ignore[arg-type]
        scales_C2KR=np.full(shape[:-1], np.nan, np.float32),  # type: ignore[arg-type]
    )


def round_heads(heads: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of one byte and a float32 scale for each head ``[..., H]``, by float64."""
    scales = (np.abs(heads).max(-1) / LARGEST[dtype]).astype(np.float32)
    numbers = np.clip(heads / scales[..., None], -LARGEST[dtype], LARGEST[dtype])
    return (np.rint(numbers) if dtype == "int8" else numbers).astype(jnp.dtype(dtype)), scales


def build_step(
    cases: list[Case],
    layout: Layout,
    *,
    page: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    seed: int = 0,
) -> Step:
    """
    Args:
      dtype: of the queries.
      kv_dtype: of a pool of one byte; None is one of the queries' dtype.
    """
    (N, K), H = heads, head_dim
    rng = np.random.default_rng(seed)
    num_single_rows, tile, num_pages = layout.num_single_rows, layout.tile, layout.num_pages
    X, T = num_single_rows + layout.num_tiles, num_single_rows + layout.num_tiles * tile

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    step = Step(
        q_TNH=normal(T, N, H),
        kv_C2KRH=empty_rows((num_pages, 2, K, page, H), kv_dtype or dtype),
        page_table_XP=rng.integers(0, num_pages, (X, layout.width)).astype(np.int32),
        q_starts_X=np.zeros(X, np.int32),
        q_lens_X=np.zeros(X, np.int32),
        tokens=[],
        keys=[],
        values=[],
        written=[],
    )
    # The last page of the pool is used first: an index that wraps or clamps would find it.
    free = [num_pages - 1, *rng.permutation(np.arange(1, num_pages - 1))]
    single, row = iter(range(num_single_rows)), num_single_rows
    for case in cases:
        keys, values = normal(case.kv_len, K, H), normal(case.kv_len, K, H)
        kv_S2KH, scales_S2K = np.stack([keys, values], axis=1), None
        step.written.append((keys, values))
        if kv_dtype is not None:
            # Scales far apart: one in another's place is seen.
            kv_S2KH = kv_S2KH * 2.0 ** rng.uniform(-2, 1, kv_S2KH.shape[:-1])[..., None]
            step.written[-1] = (kv_S2KH[:, 0], kv_S2KH[:, 1])
            kv_S2KH, scales_S2K = round_heads(kv_S2KH, kv_dtype)
            keys, values = (kv_S2KH.astype(np.float64) * scales_S2K[..., None]).swapaxes(0, 1)
        pages = [int(free.pop(0)) for _ in range(-(-case.kv_len // page))]
        for position in range(case.kv_len):
            place = (pages[position // page], slice(None), slice(None), position % page)
            if scales_S2K is None:
                step.kv_C2KRH[place] = kv_S2KH[position]
            else:
                step.kv_C2KRH.bytes_C2KRH[place] = stored(kv_S2KH[position])
                step.kv_C2KRH.scales_C2KR[place] = scales_S2K[position]
        start = case.kv_len - case.q_len
        if case.q_len == 1:
            rows, size, first = [next(single)], 1, None
        else:
            size = tile
            rows = list(range(row, row + -(-case.q_len // tile)))
            row, first = rows[-1] + 1, num_single_rows + (rows[0] - num_single_rows) * tile
        for index, x in enumerate(rows):
            step.page_table_XP[x, : len(pages)] = pages
            step.q_starts_X[x] = start + index * size
            step.q_lens_X[x] = min(size, case.q_len - index * size)
        step.tokens.append(np.arange(case.q_len) + (rows[0] if first is None else first))
        step.keys.append(keys)
        step.values.append(values)
    assert row <= X
    return step


def random_cases(rng: random.Random, layout: Layout, *, page: int) -> list[Case]:
    """Returns at least one case, together no more than the layout holds; half of the lengths are at
    the edge of a page."""
    longest, free_pages = layout.width * page, layout.num_pages - 2
    free_rows, free_tiles = layout.num_single_rows, layout.num_tiles
    cases: list[Case] = []
    for _ in range(rng.randint(1, layout.num_single_rows + layout.num_tiles)):
        kv_len = rng.randint(1, longest)
        if rng.random() < 0.5:
            kv_len = min(max(kv_len // page * page + rng.choice((-1, 0, 1)), 1), longest)
        q_len = rng.randint(1, min(kv_len, free_tiles * layout.tile or 1))
        if rng.random() < 0.5 or q_len == 1:
            q_len = 1
        num_pages, num_tiles = -(-kv_len // page), -(-q_len // layout.tile)
        if num_pages > free_pages or (q_len == 1 and not free_rows):
            continue
        free_pages -= num_pages
        free_rows -= q_len == 1
        free_tiles -= num_tiles if q_len > 1 else 0
        cases.append(Case(q_len, kv_len))
    return cases or [Case(1, 1)]


run = jax.jit(
    paged_attention,
    static_argnames=(
        "num_single_rows",
        "tile",
        "scale",
        "window",
        "soft_cap",
        "split_len",
        "cuts",
        "impl",
    ),
)


def attend(
    step: Step,
    layout: Layout,
    *,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    split_len: int | None = None,
    cuts: Cuts = BY_FORMULA,
) -> np.ndarray:
    out_TNH = run(
        step.q_TNH,
        step.kv_C2KRH,
        step.page_table_XP,
        step.q_starts_X,
        step.q_lens_X,
        num_single_rows=layout.num_single_rows,
        tile=layout.tile,
        scale=step.q_TNH.shape[-1] ** -0.5,
        impl=impl,
        window=window,
        soft_cap=soft_cap,
        split_len=split_len,
        cuts=cuts,
    )
    return np.asarray(out_TNH)


def attend_launched(
    step: Step,
    layout: Layout,
    launch: Launch,
    *,
    kernel: Callable[..., jax.Array] = triton.attend,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Returns what an interpreted GPU kernel gives with this launch."""
    B, (_, N, H) = layout.num_single_rows, step.q_TNH.shape
    row_fields = (step.page_table_XP, step.q_starts_X, step.q_lens_X)
    attend_rows = _compile_rows(kernel, launch, H**-0.5, window, soft_cap)
    outputs = [
        attend_rows(
            step.q_TNH[tokens].reshape(-1, tile, N, H),
            step.kv_C2KRH,
            *(field[rows] for field in row_fields),
        )
        for tokens, rows, tile in (
            (slice(B), slice(B), 1),
            (slice(B, None), slice(B, None), layout.tile),
        )
    ]
    return np.concatenate([np.asarray(out).reshape(-1, N, H) for out in outputs])


@functools.cache
def _compile_rows(
    kernel: Callable[..., jax.Array],
    launch: Launch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Callable[..., jax.Array]:
    return jax.jit(
        functools.partial(
            kernel,
            launch=launch,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            interpret=True,
        )
    )


def largest_error(
    step: Step, out_TNH: np.ndarray, *, window: int | None = None, soft_cap: float | None = None
) -> float:
    """The largest error relative to the largest output; padding queries must be 0."""
    wanted_TNH = np.zeros(step.q_TNH.shape)
    for tokens, keys, values in zip(step.tokens, step.keys, step.values, strict=True):
        wanted_TNH[tokens] = oracle_attention(
            step.q_TNH[tokens].astype(np.float64),
            keys.astype(np.float64),
            values.astype(np.float64),
            first_position=len(keys) - len(tokens),
            scale=step.q_TNH.shape[-1] ** -0.5,
            window=window,
            soft_cap=soft_cap,
        )
    is_padding_T = np.ones(len(out_TNH), bool)
    is_padding_T[np.concatenate(step.tokens)] = False
    np.testing.assert_array_equal(out_TNH[is_padding_T], 0.0)
    return float(np.abs(out_TNH.astype(np.float64) - wanted_TNH).max() / np.abs(wanted_TNH).max())
