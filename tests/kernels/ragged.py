"""Ragged steps for the kernel suites, and their error against the float64 oracle.

Sequences are laid out as the runner does it, with their pages scattered over the pool and NaN in
every row that no sequence holds.
"""

import dataclasses
import functools
import random
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import Impl, paged_attention, triton
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts, Launch
from tests.oracle import oracle_attention

# Largest error of a query over the largest |output| of its batch. float32: sums in another order.
# bfloat16: inputs are exact in both, but the weights and the output are rounded to 8 bits, twice.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2}

IMPLS = (
    "reference",
    "xla",
    "triton_interpret",
    pytest.param("native", marks=pytest.mark.native),
    pytest.param("triton", marks=pytest.mark.gpu),
)


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
    """The kernel's inputs for some cases, and where each case's queries are."""

    q_TNH: np.ndarray
    kv_C2KRH: np.ndarray
    page_table_XP: np.ndarray
    q_starts_X: np.ndarray
    q_lens_X: np.ndarray
    tokens: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def build_step(
    cases: list[Case],
    layout: Layout,
    *,
    page: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: str = "float32",
    seed: int = 0,
) -> Step:
    (N, K), H = heads, head_dim
    rng = np.random.default_rng(seed)
    num_single_rows, tile, num_pages = layout.num_single_rows, layout.tile, layout.num_pages
    X, T = num_single_rows + layout.num_tiles, num_single_rows + layout.num_tiles * tile

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    step = Step(
        q_TNH=normal(T, N, H),
        kv_C2KRH=np.full((num_pages, 2, K, page, H), np.nan, jnp.dtype(dtype)),
        page_table_XP=rng.integers(0, num_pages, (X, layout.width)).astype(np.int32),
        q_starts_X=np.zeros(X, np.int32),
        q_lens_X=np.zeros(X, np.int32),
        tokens=[],
        keys=[],
        values=[],
    )
    # The last page of the pool is used first: an index that wraps or clamps would find it.
    free = [num_pages - 1, *rng.permutation(np.arange(1, num_pages - 1))]
    single, row = iter(range(num_single_rows)), num_single_rows
    for case in cases:
        keys, values = normal(case.kv_len, K, H), normal(case.kv_len, K, H)
        pages = [int(free.pop(0)) for _ in range(-(-case.kv_len // page))]
        for position in range(case.kv_len):
            place = (pages[position // page], slice(None), slice(None), position % page)
            step.kv_C2KRH[place] = np.stack([keys[position], values[position]])
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
