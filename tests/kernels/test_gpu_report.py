"""The report's own check of attention: it passes what is right, and stops at what is wrong."""

import dataclasses

import jax
import pytest

from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.pool import Pool
from scripts import gpu_attention
from scripts.gpu_attention import Call, Shape

SHAPE = Shape(heads=(4, 2), head_dim=16)
MAX_ERROR = 1.2e-2


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "MAX_LAYERS", 2)


def report(impls: list[Impl], shape: Shape = SHAPE) -> list[dict[str, object]]:
    lines = gpu_attention.report(
        impls, shape, rows=[2], kv_lens=[40], splits=[], copy_bytes_per_s=1e9, max_error=MAX_ERROR
    )
    return list(lines)


def test_what_is_right_is_timed() -> None:
    checked, timed = report(["xla"])
    assert checked["impl"] == timed["impl"] == "xla"
    assert timed["kv_mib"] == 2 * 2 * 40 * 2 * 16 * 2 / 2**20  # rows, K and V, heads, bfloat16


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_pool_of_one_byte_is_read_with_its_scales(kv_dtype: str) -> None:
    _, timed = report(["xla"], dataclasses.replace(SHAPE, kv_dtype=kv_dtype))
    assert timed["kv_mib"] == 2 * 2 * 40 * 2 * (16 + 4) / 2**20


def test_what_is_wrong_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Call.attend

    def shift(call: Call, kv_C2KRH: Pool, impl: Impl, launch: None = None) -> jax.Array:
        if impl == "xla":  # every row sees one key less
            call = Call(
                q_TNH=call.q_TNH, page_table_XP=call.page_table_XP,
                q_starts_X=call.q_starts_X - 1, q_lens_X=call.q_lens_X,
                num_single_rows=call.num_single_rows,
            )  # fmt: skip
        return attend(call, kv_C2KRH, impl, launch)

    monkeypatch.setattr(Call, "attend", shift)
    with pytest.raises(SystemExit, match="attention xla is wrong by"):
        report(["xla"])
