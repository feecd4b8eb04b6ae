"""A model over a KV pool of one byte: what is written, and how near its logits stay (C62)."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.config import default_cache_dir
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl, paged_attention
from jaxserve.kernels.pool import LARGEST, QuantizedPool, empty_pool, split_pool
from jaxserve.model.layers import write_kv
from jaxserve.model.params import Params, init_params
from jaxserve.runner.native_build import attention_library, load_native
from tests.model import paged
from tests.model.paged import PAGE, T1, PagedModel, Piece, build_batch, run_in_chunks
from tests.oracle import oracle_attention, oracle_logits

PAGES = (5, 31, 8, 2, 19, 7)
IDS = tuple(np.random.default_rng(2).integers(0, T1.vocab_size, 23).tolist())
# Of attention with scores like a trained model's: float8 has three bits, int8 seven of a head's
# largest. Of the logits of a random model of three layers, whose scores are larger.
MAX_ERROR = {"int8": 1e-2, "float8_e4m3fn": 5e-2}
MAX_LOGITS_ERROR = {"int8": 5e-2, "float8_e4m3fn": 2e-1}
QUANTIZED = tuple(LARGEST)
on_both = pytest.mark.parametrize("kv_dtype", QUANTIZED)


def make_params(dtype: str = "float32") -> Params:
    return init_params(T1, jax.random.key(1), dtype)


def error_of(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the root of the mean square, over that of what is wanted."""
    return float(np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean()))


@pytest.mark.parametrize(
    "attention",
    ["reference", "xla", "triton_interpret", pytest.param("native", marks=pytest.mark.native)],
)
@on_both
def test_logits_stay_near_the_oracles(kv_dtype: str, attention: Impl) -> None:
    if attention == "native":
        load_native(default_cache_dir(), [attention_library(kv_dtype)])
    params = make_params()
    model = PagedModel(params, T1, kv_dtype=kv_dtype, kernels=Kernels(attention=attention))
    got = run_in_chunks(model, IDS, chunks=[12, 1, 10], pages=PAGES)
    assert 1e-5 < error_of(got, oracle_logits(params, IDS, T1)) < MAX_LOGITS_ERROR[kv_dtype]


@pytest.mark.parametrize("factor", [1.0, 200.0, 1e-3])
@on_both
def test_attention_is_as_near_however_large_keys_and_values_are(
    kv_dtype: str, factor: float
) -> None:
    rng = np.random.default_rng(5)
    k_TKH, v_TKH = factor * rng.standard_normal((2, paged.NUM_TOKENS, 2, 16)).astype(np.float32)
    q_TNH = rng.standard_normal((paged.NUM_TOKENS, 8, 16)).astype(np.float32)
    batch, (places,) = build_batch([Piece(PAGES, 0, IDS[:12])])
    shape = (paged.NUM_PAGES, 2, 2, PAGE, 16)
    out_TNH = paged_attention(
        jnp.asarray(q_TNH),
        write_kv(empty_pool(shape, kv_dtype), jnp.asarray(k_TKH), jnp.asarray(v_TKH), batch=batch),
        batch.page_table_XP,
        batch.q_starts_X,
        batch.q_lens_X,
        num_single_rows=paged.NUM_SINGLE_ROWS,
        tile=paged.TILE,
        scale=0.25 / factor,
        impl="xla",
    )
    wanted_TNH = oracle_attention(
        q_TNH[places].astype(np.float64),
        k_TKH[places].astype(np.float64),
        v_TKH[places].astype(np.float64),
        first_position=0,
        scale=0.25 / factor,
    )
    assert error_of(np.asarray(out_TNH)[places], wanted_TNH) < MAX_ERROR[kv_dtype]


@on_both
def test_keys_and_values_far_beyond_the_largest_number_are_scaled(kv_dtype: str) -> None:
    params = make_params()
    for layer in params["layers"].values():
        for name, factor in (("k_DKH", 20_000.0), ("v_DKH", 20_000.0), ("o_NHD", 1 / 20_000.0)):
            layer[name] = layer[name] * factor
    config = dataclasses.replace(T1, attention_scale=T1.head_dim**-0.5 / 20_000.0)
    model = PagedModel(params, config, kv_dtype=kv_dtype)
    got = run_in_chunks(model, IDS, chunks=[12, 1, 10], pages=PAGES)
    scales = [pool.scales_C2KR for pool in model.kv if isinstance(pool, QuantizedPool)]
    assert np.nanmin([np.nanmin(each) for each in scales]) > 2  # all numbers, read as they are, lie
    assert error_of(got, oracle_logits(params, IDS, config)) < MAX_LOGITS_ERROR[kv_dtype]


@on_both
def test_a_tokens_bytes_are_its_own_whatever_it_is_written_beside(kv_dtype: str) -> None:
    rng = np.random.default_rng(4)
    heads = (2, paged.NUM_TOKENS, T1.num_kv_heads, T1.head_dim)
    k_TKH, v_TKH = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    shape = (paged.NUM_PAGES, 2, T1.num_kv_heads, PAGE, T1.head_dim)
    batch, (places,) = build_batch([Piece(PAGES, 0, IDS[:12])])
    write = jax.jit(write_kv)
    together = write(empty_pool(shape, kv_dtype), k_TKH, v_TKH, batch=batch)
    apart = empty_pool(shape, kv_dtype)
    for position, token in enumerate(places):
        one, (place,) = build_batch([Piece(PAGES, position, IDS[position : position + 1])])
        others = 7.0 * jnp.ones_like(k_TKH)
        apart = write(
            apart,
            others.at[place[0]].set(k_TKH[token]),
            others.at[place[0]].set(v_TKH[token]),
            batch=one,
        )
    for left, right in zip(split_pool(together), split_pool(apart), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        assert np.asarray(left)[list(PAGES[:3])].astype(np.float32).any()


@on_both
def test_only_the_rows_of_a_steps_tokens_are_written(kv_dtype: str) -> None:
    model = PagedModel(make_params(), T1, kv_dtype=kv_dtype)
    before = [np.array(pool).tobytes() for pool in jax.tree.leaves(model.kv)]
    model.run([])
    assert [np.array(pool).tobytes() for pool in jax.tree.leaves(model.kv)] == before
    model.run([Piece((3,), 0, IDS[:1])])
    for pool in model.kv:
        assert isinstance(pool, QuantizedPool)
        is_written = np.isfinite(pool.scales_C2KR)
        assert is_written[3, :, :, 0].all()
        assert is_written.sum() == is_written[3, :, :, 0].size


@on_both
def test_a_fault_in_one_sequence_is_not_seen_by_another(kv_dtype: str) -> None:
    params = make_params()
    params["embedding_VD"] = params["embedding_VD"].at[7].set(jnp.inf)
    model = PagedModel(params, T1, kv_dtype=kv_dtype)
    healthy = [3, 9, 4, 1, 8]
    (wanted,) = model.run([Piece((1, 2), 0, healthy)])
    sick, got = model.run([Piece((3, 4), 0, [5, 7, 2]), Piece((5, 6), 0, healthy)])
    assert np.isnan(sick[1:]).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@on_both
def test_the_pool_and_its_scales_are_updated_in_place(kv_dtype: str) -> None:
    batch, _ = build_batch([Piece((1, 2), 0, IDS[:5])])
    shape = (4096, 2, T1.num_kv_heads, PAGE, T1.head_dim)
    kv = jax.eval_shape(lambda: (empty_pool(shape, kv_dtype),) * T1.num_layers)
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    memory = paged.compile_forward(make_params(), kv, batch, config=T1).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes // T1.num_layers // 4
