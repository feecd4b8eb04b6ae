"""Random ragged batches, each implementation against the float64 oracle; more of them nightly."""

import dataclasses
import random

import pytest

from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import Launch
from tests.kernels.ragged import (
    MARKS,
    TOLERANCE,
    Layout,
    attend,
    attend_launched,
    build_step,
    largest_error,
    random_cases,
)

# Batches of each shape; with those of the night at least 2,000 of each implementation.
FEW, MANY = 4, 220


LAYOUT = Layout(num_single_rows=5, num_tiles=6, tile=8, width=9, num_pages=60)
# Keys in shares, as a GPU would have them: batches this small are not split otherwise.
LAUNCH = Launch(rows=16, block_tokens=32, num_warps=4, num_stages=2, num_splits=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is compiled; every batch of a shape runs the same program."""

    page: int
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    layout: Layout = LAYOUT
    launch: Launch = LAUNCH


SHAPES = {
    "pages of 16": Shape(page=16),
    "pages of 32, bfloat16": Shape(page=32, dtype="bfloat16", head_dim=64),
    "pages of 64, heads of 96": Shape(page=64, head_dim=96, heads=(7, 1)),
    "pages of 128, heads of 128": Shape(page=128, head_dim=128, heads=(8, 2), dtype="bfloat16"),
    "a window": Shape(page=16, window=37, heads=(8, 1)),
    "a window and a cap": Shape(page=16, window=64, soft_cap=2.0, heads=(4, 4)),
    "fixed splits": Shape(
        page=16,
        launch=dataclasses.replace(LAUNCH, rows=32, num_splits=5, split_len=32),
    ),
    "no splits": Shape(page=16, launch=dataclasses.replace(LAUNCH, num_splits=1)),
    "pages of 4": Shape(
        page=4,
        heads=(9, 3),
        layout=dataclasses.replace(LAYOUT, width=23, num_pages=90),
        launch=dataclasses.replace(LAUNCH, block_tokens=16),
    ),
    "int8": Shape(page=16, kv_dtype="int8", dtype="bfloat16", head_dim=64),
    "int8, a window and a cap": Shape(
        page=32, kv_dtype="int8", window=37, soft_cap=2.0, heads=(7, 1), head_dim=96
    ),
    "float8": Shape(
        page=128, kv_dtype="float8_e4m3fn", dtype="bfloat16", head_dim=128, heads=(8, 2)
    ),
    "int8, heads of 80": Shape(
        page=128, kv_dtype="int8", dtype="bfloat16", head_dim=80, heads=(6, 2)
    ),
    "float8, heads of 256": Shape(
        page=32, kv_dtype="float8_e4m3fn", window=64, head_dim=256, heads=(3, 1)
    ),
    "float8, fixed splits": Shape(
        page=64,
        kv_dtype="float8_e4m3fn",
        launch=dataclasses.replace(LAUNCH, rows=32, num_splits=18, split_len=32),
    ),
}
on_every_shape = pytest.mark.parametrize(
    ("impl", "name"),
    [
        pytest.param(impl, name, marks=marks)
        for name, shape in SHAPES.items()
        for impl, marks in MARKS.items()
    ],
)


def check_batches(shape: Shape, impl: Impl, seeds: range) -> None:
    for seed in seeds:
        cases = random_cases(random.Random(seed), shape.layout, page=shape.page)
        step = build_step(
            cases,
            shape.layout,
            page=shape.page,
            heads=shape.heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            kv_dtype=shape.kv_dtype,
            seed=seed,
        )
        if impl == "triton_interpret":
            out_TNH = attend_launched(
                step, shape.layout, shape.launch, window=shape.window, soft_cap=shape.soft_cap
            )
        else:
            out_TNH = attend(
                step, shape.layout, impl=impl, window=shape.window, soft_cap=shape.soft_cap
            )
        error = largest_error(step, out_TNH, window=shape.window, soft_cap=shape.soft_cap)
        assert error < TOLERANCE[shape.dtype], (seed, cases)


@on_every_shape
def test_a_few_random_batches_are_right(impl: Impl, name: str) -> None:
    check_batches(SHAPES[name], impl, range(FEW))


@pytest.mark.nightly
@on_every_shape
def test_many_random_batches_are_right(impl: Impl, name: str) -> None:
    check_batches(SHAPES[name], impl, range(FEW, FEW + MANY))
