"""Shapes and edges for the Mosaic GPU kernel, and its run in jax's simulation of a GPU."""

import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.paged_attention import mosaic
from jaxserve.kernels.paged_attention.launch import Launch
from tests.kernels.ragged import (
    TOLERANCE,
    Case,
    Layout,
    Step,
    attend_launched,
    build_step,
    largest_error,
)

LAYOUT = Layout(num_single_rows=2, num_tiles=2, tile=16, num_pages=30, width=13)
LAUNCH = Launch(rows=64, block_tokens=64, num_warps=4, num_stages=2)
BYTE_LAUNCH = dataclasses.replace(LAUNCH, num_stages=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is compiled; every step of a shape runs the same program."""

    page: int = 16
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 64
    window: int | None = None
    soft_cap: float | None = None
    layout: Layout = LAYOUT
    launch: Launch = LAUNCH
    is_wide: bool = False  # float32 queries
    kv_dtype: str | None = None  # of one byte; None is bfloat16


PAGE_32 = dataclasses.replace(LAYOUT, width=7)
PAGE_128 = dataclasses.replace(LAYOUT, width=3)
SHAPES = {
    "plain": Shape(),
    "pages of 32, heads of 96, two KV heads": Shape(
        page=32, head_dim=96, heads=(6, 2), layout=PAGE_32
    ),
    "pages of 128": Shape(page=128, layout=PAGE_128, head_dim=128, heads=(8, 1)),
    "pages of 64, heads of 256": Shape(
        page=64,
        head_dim=256,
        heads=(3, 1),
        launch=dataclasses.replace(LAUNCH, block_tokens=32),
        layout=dataclasses.replace(LAYOUT, width=4),
    ),
    "a window": Shape(window=37, heads=(7, 1)),
    "a window and a cap, split": Shape(
        window=64, soft_cap=2.0, launch=dataclasses.replace(LAUNCH, num_splits=2)
    ),
    "three splits": Shape(launch=dataclasses.replace(LAUNCH, num_splits=3), heads=(1, 1)),
    "splits of one length": Shape(
        launch=dataclasses.replace(LAUNCH, num_splits=4, split_len=64), heads=(5, 1)
    ),
    "float32 queries": Shape(is_wide=True, launch=dataclasses.replace(LAUNCH, num_splits=2)),
    "int8": Shape(kv_dtype="int8", heads=(4, 2), launch=BYTE_LAUNCH),
    "int8, pages of 128, heads of 128, a window and a cap, split": Shape(
        kv_dtype="int8",
        page=128,
        head_dim=128,
        window=37,
        soft_cap=2.0,
        layout=PAGE_128,
        launch=dataclasses.replace(BYTE_LAUNCH, num_splits=2),
    ),
    "float8, pages of 32, heads of 96": Shape(
        kv_dtype="float8_e4m3fn",
        page=32,
        head_dim=96,
        heads=(6, 2),
        layout=PAGE_32,
        launch=BYTE_LAUNCH,
    ),
    "float8, heads of 128, float32 queries": Shape(
        kv_dtype="float8_e4m3fn",
        head_dim=128,
        heads=(3, 1),
        is_wide=True,
        launch=dataclasses.replace(BYTE_LAUNCH, block_tokens=32),
    ),
}
# Around the edges of a page, of a block, of the two stages of the ring, and of the page table.
EDGES = {
    "plain": [
        [Case(1, 1)],
        [Case(1, 15), Case(1, 16)],
        [Case(1, 17), Case(1, 63)],
        [Case(1, 64), Case(1, 65)],
        [Case(1, 128), Case(1, 129)],
        [Case(1, 192), Case(1, 208)],
        [Case(16, 16)],
        [Case(17, 64)],
        [Case(31, 65), Case(1, 2)],
        [Case(32, 200)],
        [],
    ],
    "pages of 32, heads of 96, two KV heads": [
        [Case(1, 31), Case(1, 33)],
        [Case(1, 96), Case(16, 97)],
        [Case(23, 129)],
    ],
    "pages of 128": [
        [Case(1, 127), Case(1, 129)],
        [Case(1, 128), Case(1, 257)],
        [Case(9, 128)],
        [Case(32, 160)],
    ],
    "pages of 64, heads of 256": [
        [Case(1, 31), Case(1, 33)],
        [Case(1, 64), Case(1, 65)],
        [Case(17, 96)],
    ],
    "a window": [
        [Case(1, 37), Case(1, 38)],
        [Case(1, 36), Case(1, 101)],
        [Case(1, 208), Case(20, 138)],
        [Case(32, 40)],
    ],
    "a window and a cap, split": [
        [Case(1, 64), Case(1, 128)],
        [Case(1, 129), Case(16, 130)],
        [Case(2, 2)],
    ],
    "three splits": [
        [Case(1, 1), Case(1, 64)],
        [Case(1, 65), Case(1, 129)],
        [Case(1, 193), Case(1, 208)],
        [Case(30, 130)],
    ],
    "splits of one length": [
        [Case(1, 63), Case(1, 64)],
        [Case(1, 65), Case(1, 208)],
        [Case(19, 83)],
        [],
    ],
    "float32 queries": [
        [Case(1, 16), Case(1, 65)],
        [Case(1, 130), Case(17, 83)],
        [Case(32, 33)],
        [],
    ],
    "int8": [
        [Case(1, 16), Case(1, 65)],
        [Case(17, 208)],
        [],
    ],
    "int8, pages of 128, heads of 128, a window and a cap, split": [
        [Case(1, 127), Case(1, 129)],
        [Case(9, 257)],
    ],
    "float8, pages of 32, heads of 96": [
        [Case(1, 31), Case(1, 192)],
        [Case(23, 129)],
    ],
    "float8, heads of 128, float32 queries": [
        [Case(1, 129), Case(17, 96)],
    ],
}


# Copies that a program may have on its way, each with a clock of its own: where two share one,
# the second's barrier is taken for the first's too.
NUM_CLOCKS = 64


@functools.cache
def watched(kernel: types.ModuleType) -> Callable[..., jax.Array]:
    """Returns a module's kernel with its races looked for."""

    def attend_watched(*arrays: jax.Array, interpret: bool, **options: object) -> jax.Array:
        assert interpret
        params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=NUM_CLOCKS)
        out_XQNH: jax.Array = kernel.attend(*arrays, interpret=params, **options)
        return out_XQNH

    return attend_watched


def build(shape: Shape, cases: list[Case], *, seed: int = 0) -> Step:
    step = build_step(
        cases or [Case(1, 1)],
        shape.layout,
        page=shape.page,
        heads=shape.heads,
        head_dim=shape.head_dim,
        dtype="bfloat16",
        kv_dtype=shape.kv_dtype,
        seed=seed,
    )
    if shape.is_wide:
        step.q_TNH = step.q_TNH.astype(np.float32)
    if not cases:
        step.q_lens_X[:] = 0
    return step


def run(shape: Shape, step: Step, *, kernel: types.ModuleType = mosaic) -> np.ndarray:
    return attend_launched(
        step,
        shape.layout,
        shape.launch,
        kernel=watched(kernel),
        window=shape.window,
        soft_cap=shape.soft_cap,
    )


def error_of(shape: Shape, step: Step, out_TNH: np.ndarray) -> float:
    return largest_error(step, out_TNH, window=shape.window, soft_cap=shape.soft_cap)


def tolerance_of(shape: Shape) -> float:
    return TOLERANCE["float32" if shape.is_wide else "bfloat16"]
