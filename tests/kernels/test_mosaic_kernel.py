"""The Mosaic GPU kernel's own matters: how its work is cut, what it refuses, and that a slip in it,
a forgotten barrier too, would be seen."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.extend.core
import numpy as np
import pytest
from jax import numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention import mosaic, paged_attention
from jaxserve.kernels.paged_attention.launch import (
    MAX_GRID,
    MAX_SPLITS,
    Cut,
    Cuts,
    Launch,
    find_mosaic_launch,
    find_mosaic_problem,
    plan_mosaic_cut,
)
from jaxserve.kernels.pool import empty_pool
from tests.kernels.mosaic_steps import LAUNCH, Shape, build, error_of, run
from tests.kernels.ragged import TOLERANCE, Case, attend, build_step

SMALL = dataclasses.replace(
    Shape().layout, num_single_rows=2, num_tiles=1, tile=8, width=25, num_pages=50
)
SHAPE = Shape(layout=SMALL, heads=(9, 1), launch=dataclasses.replace(LAUNCH, num_splits=2))
WINDOWED = dataclasses.replace(SHAPE, window=90)
SCALED = dataclasses.replace(SHAPE, kv_dtype="float8_e4m3fn")
# Seven blocks in two shares, through a ring of two; a row that ends a token after a page; a tile
# that is not full.
CASES = [Case(1, 400), Case(1, 17), Case(5, 200)]

# A slip each, and a part of the source that it changes.
SLIPS = {
    "queries not waited for": ("        plgpu.barrier_wait(q_loaded)\n", ""),
    "K not waited for": ("        plgpu.barrier_wait(k_loaded.at[stage])\n", ""),
    "V not waited for": ("        plgpu.barrier_wait(v_loaded.at[stage])\n", ""),
    "output not waited for": ("    plgpu.wait_smem_to_gmem(0)", "    pass"),
    "output not committed": ("    plgpu.commit_smem()\n    row, pairs", "    row, pairs"),
    "the page after, at a page's last token": ("ref[x, key // R]", "ref[x, (key + 1) // R]"),
    "a key more, at a page's edge": ("first=end - first_key,", "first=end + 1 - first_key,"),
    "a key too few": ("start + jnp.minimum(last_query + 1, q_len), 0)", "start, 0)"),
    "its own key unseen": ("key_MS <= along_rows(position_M", "key_MS < along_rows(position_M"),
    "a window one too wide": ("key_MS > along_rows(", "key_MS >= along_rows("),
    "the block before a window's": ("call.window + 1, 0)", "call.window + 65, 0)"),
    "a split left out": ("pl.cdiv(end, S), split,", "pl.cdiv(end, S), split + 1,"),
    "splits added up, not weighed": ("top_M + jnp.log2(total_M)", "top_M"),
    "the next KV head's K": ("(page * 2 + which) * K + k,", "(page * 2 + 1 - which) * K + k,"),
    "a block fetched too early": ("fetch(index + stages, stage)", "fetch(index + 1, stage)"),
}
# The same over a pool of one byte; K, V and their scales are copied and waited for together.
SCALE_SLIPS = {
    "the scale of the token before": (
        "along_columns(k_scales[stage]",
        "along_columns(jnp.roll(k_scales[stage], 1)",
    ),
    "scales that nobody wrote": (", first_zero=end - first_key", ""),
    "scales not waited for": (
        "scales_smem.at[place], loaded.at[stage])",
        "scales_smem.at[place], q_loaded)",
    ),
}

# What is written there and not committed a product or a copy may not see.
UNCOMMITTED = {
    "K's block": ("            plgpu.commit_smem()\n        score_MS", "        score_MS"),
    "V's block, weights": ("        plgpu.commit_smem()\n        # The barrier", "        # The"),
    "output": SLIPS["output not committed"],
}


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    """A simulation that failed leaves its memories behind."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def slipped_kernel(old: str, new: str) -> types.ModuleType:
    source = Path(mosaic.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    module = types.ModuleType("slipped")
    exec(compile(source.replace(old, new), "slipped.py", "exec"), module.__dict__)
    return module


def fault_of(shape: Shape, kernel: types.ModuleType) -> str | None:
    """Returns what the simulation or the oracle finds in a kernel."""
    step = build(shape, CASES)
    try:
        out_TNH = run(shape, step, kernel=kernel)
        error = error_of(shape, step, out_TNH)
    except jax.errors.JaxRuntimeError as raised:
        return str(raised)
    except AssertionError:
        return "padding is not 0"
    if gpu_callbacks.get_races().races_found:
        return "race"
    return None if error < TOLERANCE["bfloat16"] else f"error {error}"


@pytest.mark.parametrize("shape", [SHAPE, WINDOWED, SCALED], ids=["all keys", "window", "float8"])
def test_what_the_slips_are_cut_from_has_no_fault(shape: Shape) -> None:
    assert fault_of(shape, mosaic) is None


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_the_kernel_is_seen(name: str) -> None:
    shape = WINDOWED if "window" in name else SHAPE
    assert fault_of(shape, slipped_kernel(*SLIPS[name])) is not None


@pytest.mark.parametrize("name", SCALE_SLIPS)
def test_a_slip_with_the_scales_is_seen(name: str) -> None:
    assert fault_of(SCALED, slipped_kernel(*SCALE_SLIPS[name])) is not None


def equations_of(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Yields all that a program does, of its loops and choices too, in order."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(leaf, "jaxpr", leaf)
            if isinstance(inner, jax.extend.core.Jaxpr):
                yield from equations_of(inner)


def find_uncommitted(kernel: types.ModuleType, kv_dtype: str) -> list[str]:
    """Returns what reads shared memory past the threads while a write there is not committed."""
    q_XQNH, _, *rows = shapes_of(8)
    pool = jax.eval_shape(functools.partial(empty_pool, (100, 2, 2, 16, 64), kv_dtype))
    q_XQNH = jax.ShapeDtypeStruct((8, 1, 4, 64), q_XQNH.dtype)
    attend_rows = functools.partial(kernel.attend, scale=1.0, window=None, soft_cap=None)
    program = jax.make_jaxpr(attend_rows)(q_XQNH, pool, *rows).jaxpr
    assert program is not None
    readers: list[str] = []
    is_committed, num_products = True, 0
    for equation in equations_of(program):
        match equation.primitive.name:
            case "swap" if "smem" in str(equation.invars[0].aval):
                is_committed = False
            case "commit_smem":
                is_committed = True
            case "wgmma_ref" | "copy_smem_to_gmem" as reader:
                num_products += reader == "wgmma_ref"
                if not is_committed:
                    readers.append(reader)
    assert num_products == 2  # the names are jax's
    return readers


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_what_a_product_or_a_copy_reads_is_committed(kv_dtype: str) -> None:
    assert find_uncommitted(mosaic, kv_dtype) == []
    for name, slip in UNCOMMITTED.items():
        is_found = find_uncommitted(slipped_kernel(*slip), kv_dtype) != []
        assert is_found == (name != "K's block" or kv_dtype != "bfloat16"), name


def test_garbage_past_a_row_and_in_padding_changes_no_bit() -> None:
    step = build(SHAPE, CASES[1:])
    wanted_TNH = run(SHAPE, step)
    step.q_starts_X[1] = 2**30
    step.page_table_XP[1] = -1
    step.page_table_XP[0, 2:] = 2**30  # past the last page of a row of 17
    is_padding_T = np.ones(len(step.q_TNH), bool)
    is_padding_T[np.concatenate(step.tokens)] = False
    step.q_TNH[is_padding_T] = np.nan
    np.testing.assert_array_equal(run(SHAPE, step), wanted_TNH)


def test_splits_of_one_length_make_a_row_the_same_in_every_step() -> None:
    narrow_shape = dataclasses.replace(SHAPE, layout=dataclasses.replace(SMALL, width=13))
    wide_shape = dataclasses.replace(SHAPE, layout=dataclasses.replace(SMALL, width=20))
    narrow = build(narrow_shape, [Case(1, 100)])
    wide = build(wide_shape, [Case(1, 100), Case(1, 200)])
    wide.q_TNH[0] = narrow.q_TNH[0]
    for before, after in zip(narrow.page_table_XP[0, :7], wide.page_table_XP[0, :7], strict=True):
        wide.kv_C2KRH[after] = narrow.kv_C2KRH[before]

    def are_equal(num_splits: int, num_wide_splits: int, *, split_len: int | None) -> bool:
        launch = dataclasses.replace(LAUNCH, num_splits=num_splits, split_len=split_len)
        wide_launch = dataclasses.replace(launch, num_splits=num_wide_splits)
        in_narrow = run(dataclasses.replace(narrow_shape, launch=launch), narrow)[0]
        in_wide = run(dataclasses.replace(wide_shape, launch=wide_launch), wide)[0]
        return np.array_equal(in_narrow, in_wide)

    assert are_equal(4, 5, split_len=64)
    assert not are_equal(1, 2, split_len=None)  # the test can see bits that differ


def test_a_caller_reaches_the_kernel_by_name() -> None:
    step = build(SHAPE, CASES)
    cut = Cut(rows=64, block_tokens=32, num_warps=4, num_stages=3, wanted_programs=12)
    for split_len, cuts in ((None, Cuts()), (64, Cuts()), (None, Cuts(decode=cut))):
        out_TNH = attend(step, SMALL, impl="mosaic_interpret", split_len=split_len, cuts=cuts)
        assert error_of(SHAPE, step, out_TNH) < TOLERANCE["bfloat16"]
    with pytest.raises(ShapeError, match="100 tokens is no whole number of blocks of 64"):
        attend(step, SMALL, impl="mosaic_interpret", split_len=100)


def test_a_launch_of_other_rows_is_refused() -> None:
    step = build(SHAPE, CASES)
    for rows in (16, 128):
        shape = dataclasses.replace(SHAPE, launch=dataclasses.replace(SHAPE.launch, rows=rows))
        with pytest.raises(ShapeError, match=f"a launch of {rows} rows, but its products have 64"):
            run(shape, step)


def problem_of(
    *,
    q_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    head_dim: int = 128,
    page_size: int = 16,
) -> str | None:
    return find_mosaic_problem(
        q_dtype=q_dtype, kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size
    )


def test_what_the_kernel_cannot_do_is_refused_by_name() -> None:
    assert problem_of() is None
    assert problem_of(q_dtype="float32", page_size=128) is None
    assert problem_of(kv_dtype="int8") is problem_of(kv_dtype="float8_e4m3fn") is None
    for problem, wanted in (
        (problem_of(kv_dtype="float32"), "the KV pool is float32, and it reads bfloat16, int8 and"),
        (problem_of(head_dim=80), "head_dim is 80, and it is written for 64, 96, 128, 256"),
        (problem_of(q_dtype="float16"), "queries are float16, not bfloat16 or float32"),
        (problem_of(q_dtype="float32", head_dim=256), "queries are float32 and head_dim is 256"),
        (problem_of(page_size=8), "page_size is 8, not a power of two from 16 on"),
        (problem_of(page_size=48), "page_size is 48, not a power of two from 16 on"),
    ):
        assert problem is not None
        assert problem.startswith(wanted)


def test_a_call_that_is_refused_says_whose_limit_it_is() -> None:
    step = build_step([Case(1, 9)], SMALL, page=16, head_dim=64)
    with pytest.raises(ShapeError, match="mosaic: the KV pool is float32"):
        attend(step, SMALL, impl="mosaic_interpret")


def test_blocks_of_one_byte_have_as_many_bytes_on_their_way() -> None:
    def cut_of(dtype: str, kv_dtype: str, head_dim: int) -> tuple[int, int]:
        cut = plan_mosaic_cut(
            jax.ShapeDtypeStruct((8, 1, 32, head_dim), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((1000, 2, 8, 16, head_dim), jnp.dtype(kv_dtype)),
        )
        return cut.block_tokens, cut.num_stages

    assert cut_of("bfloat16", "bfloat16", 128) == (64, 2)
    assert cut_of("bfloat16", "int8", 128) == (64, 3)
    assert cut_of("bfloat16", "float8_e4m3fn", 256) == (32, 3)
    assert cut_of("float32", "bfloat16", 128) == (64, 2)
    assert cut_of("float32", "int8", 64) == (64, 3)
    assert cut_of("float32", "int8", 96) == (32, 3)  # registers


def test_the_splits_of_a_long_context_are_used_by_a_call_of_few_rows() -> None:
    def launch_of(X: int, Q: int, P: int, split_len: int | None = None) -> Launch:
        return find_mosaic_launch(
            jax.ShapeDtypeStruct((X, Q, 32, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((1000, 2, 8, 16, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((X, P), jnp.int32),
            split_len=split_len,
        )

    assert launch_of(1, 1, 2048).num_splits == MAX_SPLITS
    assert launch_of(8, 1, 2048).num_splits == 4
    assert launch_of(64, 1, 2048).num_splits == 1
    assert launch_of(1, 1, 16).num_splits == 2  # 256 tokens: two blocks each
    assert launch_of(64, 1, 2048, split_len=1024).num_splits == 32
    assert launch_of(4, 32, 2048).num_splits == 4  # 128 pairs a row: two programs


def shapes_of(num_rows: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the arguments of a decode step of many rows."""
    arrays: list[tuple[tuple[int, ...], str]] = [
        ((num_rows, 4, 64), "bfloat16"),
        ((100, 2, 2, 16, 64), "bfloat16"),
        ((num_rows, 4), "int32"),
        ((num_rows,), "int32"),
        ((num_rows,), "int32"),
    ]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arrays]


def test_a_batch_of_any_size_has_its_rows_on_the_grids_long_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[tuple[int, ...]] = []
    real_kernel = plgpu.kernel

    def watch(body: Callable[..., None], *, grid: tuple[int, ...], **options: object) -> object:
        grids.append(grid)
        return real_kernel(body, grid=grid, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(plgpu, "kernel", watch)
    X = MAX_GRID + 1

    def attend_all(*arrays: jax.Array) -> jax.Array:
        return paged_attention(*arrays, num_single_rows=X, tile=1, scale=1.0, impl="mosaic")

    jax.eval_shape(attend_all, *shapes_of(X))
    assert grids == [(1, 2, X)]  # Mosaic turns it around: the last is CUDA's first


def test_the_kernel_is_lowered_for_a_gpu_where_there_is_none() -> None:
    def attend_all(*arrays: jax.Array) -> jax.Array:
        return paged_attention(*arrays, num_single_rows=8, tile=1, scale=1.0, impl="mosaic")

    # Nothing is kept between versions of jax, so nothing need be stable.
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    export = jax.export.export(jax.jit(attend_all), platforms=["cuda"], disabled_checks=unchecked)
    assert "@mosaic_gpu_v2" in export(*shapes_of(8)).mlir_module()
