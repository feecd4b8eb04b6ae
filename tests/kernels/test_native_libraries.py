"""Libraries of native kernels side by side: a team of threads, attention for each pool's dtype."""

import ctypes

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.paged_attention import native
from jaxserve.kernels.paged_attention.native import POOL_DTYPES
from jaxserve.kernels.pool import Pool, empty_pool
from jaxserve.runner import native_build

pytestmark = pytest.mark.native

POOL_SHAPE = (1, 2, 1, 4, 16)


def attend(kv_C2KRH: Pool) -> jax.Array:
    page_table_XP, ones_X = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    return native.attend(
        jnp.ones((1, 1, 16)), kv_C2KRH, page_table_XP, ones_X, ones_X,
        num_single_rows=1, tile=1, scale=1.0, window=None, soft_cap=None,
    )  # fmt: skip


def test_all_libraries_have_their_work_done_by_one_team() -> None:
    teams = set()
    for library in native_build._loaded.values():
        library.jaxserve_get_team.restype = ctypes.c_void_p
        teams.add(library.jaxserve_get_team())
    assert set(native_build._loaded) == set(native_build.LIBRARIES)
    assert len(teams) == 1


@pytest.mark.parametrize("other", POOL_DTYPES)
@pytest.mark.parametrize("kv_dtype", POOL_DTYPES)
def test_attention_of_one_dtype_refuses_a_pool_of_another(
    kv_dtype: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = native.target_of(other)
    monkeypatch.setattr(native, "target_of", lambda _: target)
    pool = empty_pool(POOL_SHAPE, kv_dtype)
    if other == kv_dtype:
        np.testing.assert_array_equal(attend(pool), np.zeros((1, 1, 16)))
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="the pool is of another dtype than this"):
        attend(pool).block_until_ready()


def test_a_pool_of_no_dtype_that_is_read_is_told_with_those_that_are() -> None:
    with pytest.raises(ShapeError, match="native: the pool is float16, not one of float32, bfloat"):
        attend(jnp.zeros(POOL_SHAPE, jnp.float16))
