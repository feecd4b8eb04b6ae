"""One suite for every implementation of `paged_attention`.

Many cases share one padded shape: compiling is what costs.
"""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.xla import BLOCK_TOKENS
from tests.kernels.ragged import (
    IMPLS,
    LOSS,
    POOLS,
    QUANTIZED,
    TOLERANCE,
    Case,
    Layout,
    attend,
    build_step,
    largest_error,
    on_every_pool,
    stored,
)

BLOCK_EDGES = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 3)
AT_BLOCK_EDGES = [Case(q, kv) for q, kv in itertools.product(BLOCK_EDGES, BLOCK_EDGES) if q <= kv]
EDGES = Layout(num_single_rows=6, num_tiles=48, tile=16, width=9, num_pages=110)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_pool
def test_every_query_and_key_length_around_a_block_is_right(
    impl: Impl, kv_dtype: str | None, dtype: str
) -> None:
    step = build_step(AT_BLOCK_EDGES, EDGES, page=16, dtype=dtype, kv_dtype=kv_dtype)
    out_TNH = attend(step, EDGES, impl=impl)
    assert out_TNH.dtype == jnp.dtype(dtype)
    assert largest_error(step, out_TNH) < TOLERANCE[dtype]


LENGTHS = (1, 3, 4, 5, 8, 9, 15, 16, 17)
PAIRS = Layout(num_single_rows=2, num_tiles=6, tile=8, num_pages=80, width=23)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_pair_of_lengths_is_right_in_decode_and_prefill(impl: Impl, page: int) -> None:
    for index, (left, right) in enumerate(itertools.product(LENGTHS, LENGTHS)):
        # Two decode rows and two chunks of whole prompts; a one-token prompt is a decode row.
        cases = [Case(1, left), Case(1, right)]
        cases += [Case(length, length + 2) for length in (left, right) if length > 1]
        step = build_step(cases, PAIRS, page=page, seed=index)
        out_TNH = attend(step, PAIRS, impl=impl)
        assert largest_error(step, out_TNH) < TOLERANCE["float32"], (left, right)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (9, 3)], ids=["N=K", "N=8K", "N=3K"])
@on_every_pool
def test_query_heads_share_their_kv_head(
    impl: Impl, kv_dtype: str | None, heads: tuple[int, int]
) -> None:
    step = build_step(
        [Case(1, 9), Case(5, 17), Case(8, 8)], PAIRS, page=4, heads=heads, kv_dtype=kv_dtype
    )
    assert largest_error(step, attend(step, PAIRS, impl=impl)) < 2e-6


@pytest.mark.parametrize("window", [1, 7, BLOCK_TOKENS, 1000])
@on_every_pool
def test_a_window_hides_the_older_keys(impl: Impl, kv_dtype: str | None, window: int) -> None:
    cases = [Case(1, 200), Case(1, 5), Case(40, 140), Case(9, 9)]
    layout = Layout(num_single_rows=3, num_tiles=5, tile=16, num_pages=30, width=13)
    step = build_step(cases, layout, page=16, kv_dtype=kv_dtype)
    out_TNH = attend(step, layout, impl=impl, window=window)
    assert largest_error(step, out_TNH, window=window) < TOLERANCE["float32"]
    if window < 200:  # the test can see a window that is one too wide
        assert largest_error(step, out_TNH, window=window + 1) > 1e-3


@pytest.mark.parametrize("window", [BLOCK_TOKENS + 6, BLOCK_TOKENS - 11], ids=["over", "at"])
@on_every_pool
def test_a_window_over_a_block_edge_is_whole_where_all_rows_are_long(
    impl: Impl, kv_dtype: str | None, window: int
) -> None:
    # No row needs the first blocks, so they may be skipped, but not the one the window begins in:
    # of the second window the first key is the last one of a block.
    layout = Layout(num_single_rows=3, num_tiles=5, tile=16, num_pages=30, width=13)
    step = build_step(
        [Case(1, 200), Case(16, 3 * BLOCK_TOKENS + 3)], layout, page=16, kv_dtype=kv_dtype
    )
    out_TNH = attend(step, layout, impl=impl, window=window)
    assert largest_error(step, out_TNH, window=window) < TOLERANCE["float32"]


@on_every_pool
def test_a_soft_cap_bounds_the_scores(impl: Impl, kv_dtype: str | None) -> None:
    step = build_step([Case(1, 9), Case(5, 17), Case(8, 8)], PAIRS, page=4, kv_dtype=kv_dtype)
    out_TNH = attend(step, PAIRS, impl=impl, soft_cap=0.5)
    assert largest_error(step, out_TNH, soft_cap=0.5) < TOLERANCE["float32"]
    assert largest_error(step, out_TNH) > 1e-3


@on_every_pool
def test_a_full_page_table_is_read_to_its_end(impl: Impl, kv_dtype: str | None) -> None:
    # 23 pages of 4 are no whole number of blocks: the last one must not shift back.
    step = build_step([Case(1, 92), Case(17, 92)], PAIRS, page=4, kv_dtype=kv_dtype)
    assert largest_error(step, attend(step, PAIRS, impl=impl)) < 2e-6


@pytest.mark.parametrize("garbage", [-1, 2**30], ids=["minus one", "huge"])
@on_every_pool
def test_what_padding_rows_hold_changes_no_bit_of_the_others(
    impl: Impl, kv_dtype: str | None, garbage: int
) -> None:
    step = build_step([Case(1, 9), Case(5, 17)], PAIRS, page=4, kv_dtype=kv_dtype)
    wanted_TNH = attend(step, PAIRS, impl=impl)
    is_padding_X = step.q_lens_X == 0
    step.q_starts_X[is_padding_X] = garbage
    step.page_table_XP[is_padding_X] = garbage
    step.page_table_XP[2, 5:] = garbage  # past the last page of a real row too
    is_padding_T = np.ones(len(step.q_TNH), bool)
    is_padding_T[np.concatenate(step.tokens)] = False
    step.q_TNH[is_padding_T] = np.nan
    out_TNH = attend(step, PAIRS, impl=impl)
    np.testing.assert_array_equal(out_TNH, wanted_TNH)


@on_every_pool
def test_a_step_of_padding_alone_gives_zeros(impl: Impl, kv_dtype: str | None) -> None:
    step = build_step([Case(1, 9)], PAIRS, page=4, kv_dtype=kv_dtype)
    step.q_lens_X[:] = 0
    out_TNH = attend(step, PAIRS, impl=impl)
    np.testing.assert_array_equal(out_TNH, np.zeros_like(out_TNH))


@pytest.mark.parametrize(
    ("impl", "kv_dtype"), [pool for pool in POOLS if pool.values[0] != "reference"]
)
def test_a_row_is_the_same_bit_for_bit_beside_a_much_longer_one(
    impl: Impl, kv_dtype: str | None
) -> None:
    short, long = Case(1, 9), Case(1, 90)
    alone = build_step([short], PAIRS, page=4, kv_dtype=kv_dtype)
    both = build_step([short, long], PAIRS, page=4, kv_dtype=kv_dtype)
    out_alone, out_both = (attend(step, PAIRS, impl=impl) for step in (alone, both))
    np.testing.assert_array_equal(out_alone[0], out_both[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_wider_than_the_pool_come_out_in_their_own_dtype(impl: Impl) -> None:
    step = build_step([Case(1, 9), Case(5, 17)], PAIRS, page=4, dtype="bfloat16")
    step.q_TNH = step.q_TNH.astype(np.float32)
    out_TNH = attend(step, PAIRS, impl=impl)
    assert out_TNH.dtype == np.float32
    assert largest_error(step, out_TNH) < TOLERANCE["float32"]  # nothing was rounded on the way


on_every_native_pool = pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED])


@pytest.mark.native
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_native_pool
def test_a_native_query_is_the_same_bit_for_bit_in_a_tile_and_alone(
    kv_dtype: str | None, dtype: str, head_dim: int
) -> None:
    layout = Layout(num_single_rows=40, num_tiles=3, tile=16, num_pages=30, width=8)
    step = build_step(
        [Case(40, 100)],
        layout,
        page=16,
        heads=(6, 2),
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    step.page_table_XP[:40] = step.page_table_XP[40]
    step.q_starts_X[:40], step.q_lens_X[:40] = np.arange(60, 100), 1
    step.q_TNH[:40] = step.q_TNH[step.tokens[0]]
    for window in (None, 37):
        out_TNH = attend(step, layout, impl="native", window=window)
        np.testing.assert_array_equal(out_TNH[:40], out_TNH[step.tokens[0]])


@pytest.mark.native
@on_every_native_pool
def test_a_nan_of_a_sequence_stays_its_own(kv_dtype: str | None) -> None:
    step = build_step([Case(1, 40), Case(1, 33)], PAIRS, page=4, kv_dtype=kv_dtype)
    wanted_TNH = attend(step, PAIRS, impl="native")
    for place in (0, 1):  # K, V
        spoiled = dataclasses.replace(step, kv_C2KRH=copy.deepcopy(step.kv_C2KRH))
        pool = spoiled.kv_C2KRH
        faulty = pool if kv_dtype is None else pool.scales_C2KR  # a number of one byte is none
        faulty[step.page_table_XP[0, 5], place, :, 2] = np.nan
        out_TNH = attend(spoiled, PAIRS, impl="native")
        assert np.isnan(out_TNH[0]).all()
        np.testing.assert_array_equal(out_TNH[1], wanted_TNH[1])


@pytest.mark.native
@pytest.mark.parametrize("page", [2**30, 2**31 - 1, -1, -(2**31)])
def test_a_native_call_reads_nothing_outside_of_its_arrays(page: int) -> None:
    """What the scheduler never gives: another process's memory shall not be its end."""
    step = build_step([Case(1, 40), Case(1, 33), Case(8, 30)], PAIRS, page=4)
    wanted_TNH = attend(step, PAIRS, impl="native")
    step.page_table_XP[0] = page
    step.q_lens_X[2:4], step.q_starts_X[2:4] = (2**31 - 1, -5), (0, 2**31 - 1)
    step.q_lens_X[4], step.q_starts_X[4] = 8, 2**31 - 1
    step.q_lens_X[5], step.q_starts_X[5] = 3, -(2**31)
    out_TNH = attend(step, PAIRS, impl="native")
    assert out_TNH.shape == wanted_TNH.shape
    np.testing.assert_array_equal(out_TNH[1], wanted_TNH[1])


@pytest.mark.native
def test_subnormal_numbers_are_the_same_on_every_thread() -> None:
    layout = Layout(num_single_rows=512, num_tiles=0, tile=1, num_pages=70, width=16)
    step = build_step([Case(1, 60)], layout, page=4)
    step.kv_C2KRH *= np.float32(1e-38)
    step.q_TNH[:] = step.q_TNH[0]
    step.page_table_XP[:], step.q_starts_X[:], step.q_lens_X[:] = step.page_table_XP[0], 59, 1
    for _ in range(10):  # a thread that sleeps takes no part
        out_TNH = attend(step, layout, impl="native")
        np.testing.assert_array_equal(out_TNH, np.broadcast_to(out_TNH[:1], out_TNH.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_number_of_one_byte_is_itself(impl: Impl, kv_dtype: str, dtype: str) -> None:
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(kv_dtype))
    numbers = numbers[np.isfinite(numbers.astype(np.float64)) & (numbers != -128)]
    layout = Layout(num_single_rows=1, num_tiles=0, tile=1, num_pages=20, width=16)
    kv_len = len(numbers)
    step = build_step(
        [Case(1, kv_len)], layout, page=16, head_dim=64, dtype=dtype, kv_dtype=kv_dtype
    )
    step.q_TNH[:] = np.abs(step.q_TNH)
    # Key s has one number everywhere, the value beside it another; both weigh what others do, so
    # that the smallest, which a processor may take for 0, is seen like the largest.
    both_2S = np.stack([numbers, np.roll(numbers, 77)])
    size_2S = np.maximum(np.abs(both_2S.astype(np.float64)), 2.0**-9)
    scales_2S = (np.array([0.1, 1.0])[:, None] / size_2S).astype(np.float32)
    for position in range(kv_len):
        place = (step.page_table_XP[0, position // 16], slice(None), slice(None), position % 16)
        step.kv_C2KRH.bytes_C2KRH[place] = stored(both_2S[:, position])[:, None, None]
        step.kv_C2KRH.scales_C2KR[place] = scales_2S[:, position, None]
    whole_2S = both_2S.astype(np.float64) * scales_2S
    step.keys[0], step.values[0] = (
        np.broadcast_to(x[:, None, None], (kv_len, 2, 64)) for x in whole_2S
    )
    assert largest_error(step, attend(step, layout, impl=impl)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_pool_of_one_byte_is_near_what_was_written(impl: Impl, kv_dtype: str) -> None:
    step = build_step(AT_BLOCK_EDGES, EDGES, page=16, dtype="bfloat16", kv_dtype=kv_dtype)
    out_TNH = attend(step, EDGES, impl=impl)
    assert largest_error(step, out_TNH) < TOLERANCE["bfloat16"]
    step.keys, step.values = map(list, zip(*step.written, strict=True))
    assert TOLERANCE["float32"] < largest_error(step, out_TNH) < LOSS[kv_dtype]


def test_a_pool_of_one_byte_and_scales_go_together() -> None:
    step = build_step([Case(1, 9)], PAIRS, page=4, kv_dtype="int8")
    pool = step.kv_C2KRH
    step.kv_C2KRH = pool.bytes_C2KRH
    with pytest.raises(ShapeError, match=r"is int8: .* come with scales as a QuantizedPool"):
        attend(step, PAIRS, impl="xla")
    step.kv_C2KRH = pool.replace(scales_C2KR=pool.scales_C2KR[:, :, :, :3])
    with pytest.raises(ShapeError, match="scales_C2KR: R is 3 in"):
        attend(step, PAIRS, impl="xla")
    step.kv_C2KRH = pool.replace(bytes_C2KRH=pool.bytes_C2KRH.astype(np.float32))
    with pytest.raises(ShapeError, match=r"is float32: .* and nothing else does"):
        attend(step, PAIRS, impl="xla")


def test_wrong_layouts_are_refused_by_name() -> None:
    step = build_step([Case(1, 9)], PAIRS, page=4)
    with pytest.raises(ShapeError, match=r"50 tokens, but 2 one-token rows and 6 tiles of 4 need"):
        attend(step, dataclasses.replace(PAIRS, tile=4), impl="xla")
    step.q_TNH = step.q_TNH[:, :3]
    with pytest.raises(ShapeError, match="3 query heads cannot share 2 KV heads evenly"):
        attend(step, PAIRS, impl="xla")
    step = build_step([Case(1, 9)], PAIRS, page=4)
    step.q_lens_X = step.q_lens_X.astype(np.uint32)
    with pytest.raises(ShapeError, match="q_lens_X must be int32, got uint32"):
        attend(step, PAIRS, impl="xla")
