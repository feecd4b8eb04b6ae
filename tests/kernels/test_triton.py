"""The Triton kernel's own matters: how its work is cut, and that a slip in it would be seen.

What it computes is tested with all implementations.
"""

import dataclasses
import functools
import itertools
import types
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention import paged_attention, triton
from jaxserve.kernels.paged_attention.launch import (
    MAX_GRID,
    MAX_SPLITS,
    Cut,
    Cuts,
    Launch,
    find_launch,
)
from jaxserve.kernels.pool import empty_pool
from tests.kernels.ragged import (
    QUANTIZED,
    TOLERANCE,
    Case,
    Layout,
    Step,
    attend,
    attend_launched,
    build_step,
    largest_error,
)

PAGE = 16
LAYOUT = Layout(num_single_rows=4, num_tiles=5, tile=8, width=8, num_pages=40)
# Around the edges of pages, of blocks of 32 and of splits of 64, and a tile that is not full.
CASES = [Case(1, 15), Case(1, 17), Case(1, 33), Case(1, 128), Case(19, 83), Case(9, 64)]
LAUNCH = Launch(rows=16, block_tokens=32, num_warps=4, num_stages=2)


class Sized(NamedTuple):
    """An array's shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype


@pytest.mark.parametrize("window", [None, 18], ids=["all keys", "window"])
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_any_number_of_splits_gives_the_same_sums(num_splits: int, window: int | None) -> None:
    step = build_step(CASES, LAYOUT, page=PAGE)
    launch = dataclasses.replace(LAUNCH, num_splits=num_splits)
    out_TNH = attend_launched(step, LAYOUT, launch, window=window)
    assert largest_error(step, out_TNH, window=window) < TOLERANCE["float32"]


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.nightly), 96, 128, 256])
def test_a_head_of_any_size_is_padded_inside_the_kernel(head_dim: int) -> None:
    for dtype, kv_dtype in itertools.product(("float32", "bfloat16"), (None, *QUANTIZED)):
        step = build_step(
            CASES[1:5], LAYOUT, page=PAGE, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype
        )
        out_TNH = attend_launched(step, LAYOUT, dataclasses.replace(LAUNCH, num_splits=2))
        assert largest_error(step, out_TNH) < TOLERANCE[dtype]


def test_a_tile_of_many_pairs_is_shared_out_among_programs() -> None:
    # 8 queries of 7 heads are 56 pairs: programs of 16 begin in the middle of a query.
    step = build_step(CASES, LAYOUT, page=PAGE, heads=(7, 1))
    for rows in (16, 32, 64):
        out_TNH = attend_launched(step, LAYOUT, dataclasses.replace(LAUNCH, rows=rows))
        assert largest_error(step, out_TNH) < TOLERANCE["float32"]


def test_splits_of_one_length_make_a_row_the_same_in_every_step() -> None:
    narrow = build_step([Case(1, 100)], LAYOUT, page=PAGE)
    wide_layout = dataclasses.replace(LAYOUT, width=12, num_pages=60)
    wide = build_step([Case(1, 100), Case(1, 190), Case(1, 3)], wide_layout, page=PAGE)
    wide.q_TNH[0] = narrow.q_TNH[0]
    for pages_from, pages_to in zip(
        narrow.page_table_XP[0, :7], wide.page_table_XP[0, :7], strict=True
    ):
        wide.kv_C2KRH[pages_to] = narrow.kv_C2KRH[pages_from]

    def are_equal(num_splits: int, num_wide_splits: int, *, split_len: int | None) -> bool:
        launch = dataclasses.replace(LAUNCH, num_splits=num_splits, split_len=split_len)
        wide_launch = dataclasses.replace(launch, num_splits=num_wide_splits)
        in_narrow = attend_launched(narrow, LAYOUT, launch)[0]
        in_wide = attend_launched(wide, wide_layout, wide_launch)[0]
        return np.array_equal(in_narrow, in_wide)

    assert are_equal(2, 3, split_len=64)
    assert not are_equal(2, 4, split_len=None)  # the test can see bits that differ


def test_a_caller_names_the_length_of_a_split() -> None:
    step = build_step(CASES, LAYOUT, page=PAGE)
    with pytest.raises(ShapeError, match="100 tokens is no whole number of blocks of 32"):
        attend(step, LAYOUT, impl="triton_interpret", split_len=100)
    out_TNH = attend(step, LAYOUT, impl="triton_interpret", split_len=32)
    assert largest_error(step, out_TNH) < TOLERANCE["float32"]


def test_the_splits_of_a_long_context_are_used_by_a_call_of_few_rows() -> None:
    def launch_of(X: int, Q: int, P: int, split_len: int | None = None) -> Launch:
        return find_launch(
            Sized((X, Q, 32, 128), jnp.dtype("bfloat16")),
            Sized((1000, 2, 8, 16, 128), jnp.dtype("bfloat16")),
            Sized((X, P), jnp.dtype("int32")),
            split_len=split_len,
        )

    assert launch_of(1, 1, 2048).num_splits == MAX_SPLITS
    assert launch_of(8, 1, 2048).num_splits == 4
    assert launch_of(64, 1, 2048).num_splits == 1
    assert launch_of(1, 1, 16).num_splits == 2  # 256 tokens: two blocks each
    assert launch_of(64, 1, 2048, split_len=1024).num_splits == 32
    assert launch_of(32, 16, 2048).rows == 64


def test_a_measured_cut_is_taken_in_place_of_the_formulas() -> None:
    cut = Cut(rows=32, block_tokens=128, num_warps=8, num_stages=3, wanted_programs=16)

    def launch_of(Q: int, cuts: Cuts, split_len: int | None = None) -> Launch:
        return find_launch(
            Sized((2, Q, 32, 128), jnp.dtype("bfloat16")),
            Sized((1000, 2, 8, 16, 128), jnp.dtype("bfloat16")),
            Sized((2, 2048), jnp.dtype("int32")),
            split_len=split_len,
            cuts=cuts,
        )

    wanted = Launch(rows=32, block_tokens=128, num_warps=8, num_stages=3, num_splits=1)
    assert launch_of(1, Cuts(decode=cut)) == wanted  # 2 rows of 8 heads are 16 programs already
    more = dataclasses.replace(cut, wanted_programs=64)
    assert launch_of(1, Cuts(decode=more)).num_splits == 4
    assert launch_of(1, Cuts(decode=more), split_len=4096).num_splits == 8  # whatever is wanted
    assert launch_of(16, Cuts(decode=cut)) == launch_of(16, Cuts())
    assert launch_of(16, Cuts(chunk=cut)).block_tokens == 128
    assert launch_of(1, Cuts(chunk=cut)) == launch_of(1, Cuts())


@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_a_callers_cut_reaches_the_kernel(kind: str) -> None:
    step = build_step(CASES, LAYOUT, page=PAGE)
    cut = Cut(rows=32, block_tokens=64, num_warps=4, num_stages=2, wanted_programs=64)
    cuts = Cuts(**{kind: cut})
    out_TNH = attend(step, LAYOUT, impl="triton_interpret", cuts=cuts)
    assert largest_error(step, out_TNH) < TOLERANCE["float32"]
    with pytest.raises(ShapeError, match="32 tokens is no whole number of blocks of 64"):
        attend(step, LAYOUT, impl="triton_interpret", split_len=32, cuts=cuts)


def test_what_the_backend_runs_wrongly_is_refused() -> None:
    def check(launch: Launch = LAUNCH, *, heads: int = 2, pages: int = 10, dtype: str) -> None:
        pool = jax.eval_shape(functools.partial(empty_pool, (pages, 2, heads, 16, 128), dtype))
        attend_rows = functools.partial(
            triton.attend, scale=1.0, window=None, soft_cap=None, launch=launch
        )
        q_XQNH = jax.ShapeDtypeStruct((1, 1, heads, 128), jnp.bfloat16)
        rows = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 8), (1,), (1,))]
        jax.eval_shape(attend_rows, q_XQNH, pool, *rows)

    page_bytes = 2 * 2 * 16 * 128
    check(pages=2**31 // page_bytes - 1, dtype="int8")
    check(pages=2**32 // page_bytes + 1, dtype="int8")
    check(pages=2**32 // page_bytes, dtype="bfloat16")
    for pages in (2**31 // page_bytes, 2**32 // page_bytes):
        with pytest.raises(ShapeError, match="reads those of 2 to 4 GiB at wrong places"):
            check(pages=pages, dtype="int8")
    with pytest.raises(ShapeError, match=f"a grid has at most {MAX_GRID} of each"):
        check(heads=MAX_GRID + 1, dtype="bfloat16")
    with pytest.raises(ShapeError, match="100 tokens is no whole number of blocks of 32"):
        check(dataclasses.replace(LAUNCH, split_len=100), dtype="bfloat16")


def test_a_batch_of_any_size_has_its_rows_on_the_grids_long_axis() -> None:
    X = MAX_GRID + 1
    arrays: list[tuple[tuple[int, ...], str]] = [
        ((X, 4, 16), "bfloat16"),
        ((100, 2, 2, 16, 16), "bfloat16"),
        ((X, 4), "int32"),
        ((X,), "int32"),
        ((X,), "int32"),
    ]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arrays]

    def attend_all(*arrays: jax.Array) -> jax.Array:
        return paged_attention(*arrays, num_single_rows=X, tile=1, scale=1.0, impl="triton")

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        # Nothing is kept between versions of jax, so nothing need be stable.
        unchecked = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        export = jax.export.export(
            jax.jit(attend_all), platforms=["cuda"], disabled_checks=unchecked
        )
        text = export(*arguments).mlir_module()
    assert f"grid_x = {X} : i32" in text


# A slip each, and a part of the source that it changes.
SLIPS = {
    "the page after, at a page's last token": ("key_S // R", "(key_S + 1) // R"),
    "the row after": ("(key_S % R)[:, None]", "((key_S + 1) % R)[:, None]"),
    "a key too few": (
        "jnp.minimum(last_query + 1, q_len), 0)",
        "jnp.minimum(last_query, q_len), 0)",
    ),
    "a key too many": ("key_S[None, :] <= position_M", "key_S[None, :] - 1 <= position_M"),
    "its own key unseen": ("key_S[None, :] <= position_M", "key_S[None, :] < position_M"),
    "the block before a window's": ("- window + 1, 0)", "- window + 33, 0)"),
    "rows that no sequence holds": ("is_held_S = key_S < end", "is_held_S = key_S >= 0"),
    "lanes past the head": ("lane_H < H", "lane_H >= 0"),
    "a split left out": ("-(-end // S), split, launch", "-(-end // S), split + 1, launch"),
    "splits added up, not weighed": ("jnp.log2(total_M)", "0.0"),
    "the next KV head": ("which, k, (", "which, (k + 1) % K, ("),
}


def slipped_kernel(old: str, new: str) -> types.ModuleType:
    source = Path(triton.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    module = types.ModuleType("slipped")
    exec(compile(source.replace(old, new), "slipped.py", "exec"), module.__dict__)
    return module


SCALE_SLIPS = {
    "K without its scale": ("load_scales(0)[None, :]", "1.0"),
    "V without its scale": ("load_scales(1)[None, :]", "1.0"),
    "K's scale on V": ("load_scales(1)", "load_scales(0)"),
    "V's scale in the total": ("shrink_M + weight_MS.sum(1)", "shrink_M + scaled_MS.sum(1)"),
    "the scale of the row after": ("which, k, key_S % R)", "which, k, (key_S + 1) % R)"),
    "the scale of another head": ("which, k, key_S % R)", "which, 0, key_S % R)"),
    "scales that nobody wrote": ("mask=is_held_S, other=0.0)", "mask=key_S >= 0, other=0.0)"),
}


def error_of(step: Step, kernel: types.ModuleType, *, window: int | None) -> float:
    launch = dataclasses.replace(LAUNCH, num_splits=3)
    out_TNH = attend_launched(step, LAYOUT, launch, kernel=kernel.attend, window=window)
    try:
        return largest_error(step, out_TNH, window=window)
    except AssertionError:
        return np.inf  # padding was not 0


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_the_kernel_is_seen(name: str) -> None:
    window = 18 if "window" in name else None
    step = build_step(CASES, LAYOUT, page=PAGE, head_dim=12)
    assert error_of(step, triton, window=window) < TOLERANCE["float32"]
    assert not error_of(step, slipped_kernel(*SLIPS[name]), window=window) < 1e-3


@pytest.mark.parametrize("name", SCALE_SLIPS)
def test_a_slip_with_the_scales_is_seen(name: str) -> None:
    step = build_step(CASES, LAYOUT, page=PAGE, kv_dtype="int8")
    assert error_of(step, triton, window=None) < TOLERANCE["float32"]
    assert not error_of(step, slipped_kernel(*SCALE_SLIPS[name]), window=None) < 1e-3
