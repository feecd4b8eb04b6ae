"""The native norm, and the native rotation with its write, against numpy and the model's own."""

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.kernels.pool import Pool
from jaxserve.kernels.rows import norm, rotate_and_write
from jaxserve.model.batch import TokenBatch
from jaxserve.model.layers import write_kv
from jaxserve.model.rope import rotate

pytestmark = pytest.mark.native

BFLOAT16_ROUNDING = 1.001 * 2**-8  # half a unit of the last of eight bits
EPS = 1e-5

_norm = jax.jit(norm, static_argnames="eps")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normed(x_TD: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
    y_TD = _norm(x_TD, weight_D, eps=EPS)
    assert y_TD.dtype == jnp.bfloat16
    return np.asarray(y_TD).astype(np.float64)


def normed_in_float64(x_TD: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
    x = x_TD.astype(np.float64)
    factor: np.ndarray = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    wanted: np.ndarray = x * factor * weight_D
    return wanted


@pytest.mark.parametrize("T", [1, 2, 15, 33, 300])
@pytest.mark.parametrize("D", [1, 15, 16, 17, 48, 576, 2049, 9000])
def test_a_norm_is_right_and_rounded_once(T: int, D: int) -> None:
    x_TD, weight_D = 3 * normal(1, T, D), 1 + normal(2, D)
    y_TD = normed(x_TD, weight_D)
    np.testing.assert_allclose(y_TD, normed_in_float64(x_TD, weight_D), rtol=BFLOAT16_ROUNDING)


def test_a_norm_of_zeros_is_zeros_and_of_large_numbers_is_finite() -> None:
    x_TD = np.zeros((3, 64), np.float32)
    x_TD[1], x_TD[2] = 1e-20, 1e15
    y_TD = normed(x_TD, np.ones(64, np.float32))
    np.testing.assert_allclose(y_TD, normed_in_float64(x_TD, np.ones(64)), rtol=BFLOAT16_ROUNDING)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_spoils_its_own_norm_alone(bad: float) -> None:
    x_TD, weight_D = normal(3, 50, 576), normal(4, 576)
    wanted_TD = normed(x_TD, weight_D)
    x_TD[21, 7] = bad
    y_TD = normed(x_TD, weight_D)
    assert np.isnan(y_TD[21, 7])
    others = np.arange(50) != 21
    np.testing.assert_array_equal(y_TD[others], wanted_TD[others])


def test_a_norm_does_not_depend_on_how_many_rows_there_are() -> None:
    x_TD, weight_D = normal(5, 130, 577), normal(6, 577)
    wanted_TD = normed(x_TD, weight_D)
    for T in (1, 2, 13, 64, 129):
        np.testing.assert_array_equal(normed(x_TD[:T], weight_D), wanted_TD[:T])
        np.testing.assert_array_equal(normed(x_TD[-T:], weight_D), wanted_TD[-T:])


def _case(
    T: int, *, heads: tuple[int, int, int], num_pairs: int, page_size: int, dtype: str
) -> dict[str, jax.Array]:
    """Random numbers, a pool of random numbers, and a place of its own for each token; every
    fifth is padding."""
    N, K, H = heads
    rng = np.random.default_rng(T)
    C = T // page_size + 3
    places = rng.permutation(C * page_size)[:T]
    pages_T = np.where(np.arange(T) % 5 == 4, C + np.arange(T), places // page_size)
    angles_TP = 10 * normal(7, T, num_pairs)
    return {
        "q_TNH": jnp.asarray(normal(8, T, N, H)),
        "k_TKH": jnp.asarray(normal(9, T, K, H)),
        "v_TKH": jnp.asarray(normal(10, T, K, H)),
        "cos_TP": jnp.cos(angles_TP),
        "sin_TP": jnp.sin(angles_TP),
        "kv_C2KRH": jnp.asarray(normal(11, C, 2, K, page_size, H), dtype),
        "pages_T": jnp.asarray(pages_T, jnp.int32),
        "rows_T": jnp.asarray(places % page_size, jnp.int32),
    }


@functools.partial(jax.jit, donate_argnames="kv_C2KRH")
def _native(
    *,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    cos_TP: jax.Array,
    sin_TP: jax.Array,
    kv_C2KRH: jax.Array,
    pages_T: jax.Array,
    rows_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return rotate_and_write(
        q_TNH, k_TKH, v_TKH, (cos_TP, sin_TP), kv_C2KRH, pages_T=pages_T, rows_T=rows_T
    )


@jax.jit
def _by_xla(
    *,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    cos_TP: jax.Array,
    sin_TP: jax.Array,
    kv_C2KRH: jax.Array,
    pages_T: jax.Array,
    rows_T: jax.Array,
) -> tuple[jax.Array, Pool]:
    anything = jnp.zeros(1, jnp.int32)
    batch = TokenBatch(
        token_ids_T=pages_T,
        positions_T=pages_T,
        write_pages_T=pages_T,
        write_rows_T=rows_T,
        page_table_XP=anything[None],
        q_starts_X=anything,
        q_lens_X=anything,
        prompt_lens_X=anything,
    )
    q_TNH, k_TKH = (rotate(x_TNH, cos_TP, sin_TP) for x_TNH in (q_TNH, k_TKH))
    return q_TNH.astype(kv_C2KRH.dtype), write_kv(kv_C2KRH, k_TKH, v_TKH, batch=batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("T", [1, 2, 31, 64, 290])
@pytest.mark.parametrize(
    ("heads", "num_pairs", "page_size"),
    [
        ((9, 3, 64), 32, 16),
        ((4, 4, 128), 64, 32),
        ((2, 1, 16), 8, 1),  # fewer pairs than lanes
        ((6, 2, 80), 20, 16),  # half of a head turns, and pairs are no multiple of lanes
        ((3, 3, 7), 3, 4),  # an odd head
        ((2, 2, 32), 0, 16),  # nothing turns
    ],
    ids=str,
)
def test_a_rotation_and_its_write_are_xlas(
    heads: tuple[int, int, int], num_pairs: int, page_size: int, T: int, dtype: str
) -> None:
    case = _case(T, heads=heads, num_pairs=num_pairs, page_size=page_size, dtype=dtype)
    wanted_TNH, wanted_kv = _by_xla(**case)
    turned_TNH, kv_C2KRH = _native(**case)
    assert turned_TNH.dtype == kv_C2KRH.dtype == dtype
    tolerance = BFLOAT16_ROUNDING if dtype == "bfloat16" else 1e-6
    for got, wanted in ((turned_TNH, wanted_TNH), (kv_C2KRH, wanted_kv)):
        difference = np.abs(np.float64(got) - np.float64(wanted))
        # of the numbers that are added: what cancels leaves their rounding
        assert (difference <= 2 * tolerance * (np.abs(np.float64(wanted)) + 1)).all()
        assert (np.asarray(got) == np.asarray(wanted)).mean() > (0.99 if tolerance > 1e-3 else 0.4)


def test_what_no_token_owns_is_left_as_it_was() -> None:
    case = _case(64, heads=(2, 2, 32), num_pairs=16, page_size=16, dtype="bfloat16")
    before = np.asarray(case["kv_C2KRH"]).copy()
    C = before.shape[0]
    pages_T, rows_T = np.asarray(case["pages_T"]), np.asarray(case["rows_T"])
    _, kv_C2KRH = _native(**case)
    is_owned_CR = np.zeros((C, 16), bool)
    is_real_T = pages_T < C
    is_owned_CR[pages_T[is_real_T], rows_T[is_real_T]] = True
    is_same = (np.asarray(kv_C2KRH) == before).all(axis=(1, 2, 4))
    assert is_same[~is_owned_CR].all()
    assert not is_same[is_owned_CR].any()


NUM_PAGES = 3  # of what `_case` makes of three tokens; the first page past the end is padding's


@pytest.mark.parametrize(
    ("page", "row"),
    [(-1, 0), (NUM_PAGES, 0), (NUM_PAGES, 15), (10**9, 0), (2**31 - 1, 3), (0, -1), (0, 16)],
)
def test_a_place_outside_of_the_pool_takes_nothing(page: int, row: int) -> None:
    case = _case(3, heads=(2, 2, 32), num_pairs=16, page_size=16, dtype="float32")
    case["pages_T"] = jnp.full(3, page, jnp.int32)
    case["rows_T"] = jnp.full(3, row, jnp.int32)
    before = np.asarray(case["kv_C2KRH"]).copy()
    assert len(before) == NUM_PAGES
    _, kv_C2KRH = _native(**case)
    np.testing.assert_array_equal(np.asarray(kv_C2KRH), before)


def test_a_token_is_turned_alike_whatever_is_beside_it() -> None:
    case = _case(130, heads=(9, 3, 64), num_pairs=32, page_size=16, dtype="bfloat16")
    wanted_TNH, wanted_kv = (np.asarray(each) for each in _native(**case))
    for T in (1, 7, 64):
        case = _case(130, heads=(9, 3, 64), num_pairs=32, page_size=16, dtype="bfloat16")
        first = {name: each if name == "kv_C2KRH" else each[:T] for name, each in case.items()}
        turned_TNH, kv_C2KRH = _native(**first)
        np.testing.assert_array_equal(np.asarray(turned_TNH), wanted_TNH[:T])
        pages_T, rows_T = np.asarray(case["pages_T"])[:T], np.asarray(case["rows_T"])[:T]
        real = pages_T < wanted_kv.shape[0]
        at = (pages_T[real], slice(None), slice(None), rows_T[real])
        np.testing.assert_array_equal(np.asarray(kv_C2KRH)[at], wanted_kv[at])


def test_a_donated_pool_is_written_where_it_is() -> None:
    case = _case(40, heads=(2, 2, 32), num_pairs=16, page_size=16, dtype="bfloat16")
    memory = _native.lower(**case).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == case["kv_C2KRH"].nbytes
    assert memory.temp_size_in_bytes < case["kv_C2KRH"].nbytes


def test_a_pool_that_is_read_again_is_not_written_over() -> None:
    case = _case(20, heads=(2, 2, 32), num_pairs=16, page_size=16, dtype="bfloat16")
    before = np.asarray(case["kv_C2KRH"]).copy()

    @jax.jit
    def run(case: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, kv_C2KRH = _native(**case)
        return kv_C2KRH, case["kv_C2KRH"] + 0

    new_kv, old_kv = run(case)
    np.testing.assert_array_equal(np.asarray(old_kv), before)
    assert (np.asarray(new_kv) != before).any()
    np.testing.assert_array_equal(np.asarray(case["kv_C2KRH"]), before)
