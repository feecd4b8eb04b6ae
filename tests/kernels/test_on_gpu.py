"""The GPU kernels where they are meant to run: compiled, on a GPU, against the oracle in float64.

All else about them is tested without one, interpreted.
"""

import dataclasses

import jax
import pytest

from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import MOSAIC_CAPABILITY
from tests.kernels.ragged import (
    QUANTIZED,
    TOLERANCE,
    Case,
    Layout,
    attend,
    build_step,
    largest_error,
)

pytestmark = pytest.mark.gpu

LAYOUT = Layout(num_single_rows=6, num_tiles=5, tile=16, width=81, num_pages=180)
# Around the edges of pages and of blocks, a row long enough to be split, tiles that are not full.
CASES = [
    Case(1, 1), Case(1, 16), Case(1, 65), Case(1, 1290), Case(40, 140), Case(9, 64),
]  # fmt: skip
HEADS = {"N=K": (2, 2), "N=4K": (8, 2), "N=7K": (7, 1)}


@pytest.fixture(autouse=True)
def _hopper(request: pytest.FixtureRequest) -> None:
    is_mosaic = request.node.callspec.params["impl"] == "mosaic"
    capability = getattr(jax.devices()[0], "compute_capability", "")
    if is_mosaic and capability.split(".")[0] != MOSAIC_CAPABILITY:
        pytest.skip(f"mosaic needs compute capability {MOSAIC_CAPABILITY}, not {capability}")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_a_compiled_kernel_is_right(impl: Impl, head_dim: int, heads: str) -> None:
    step = build_step(
        CASES, LAYOUT, page=16, heads=HEADS[heads], head_dim=head_dim, dtype="bfloat16"
    )
    out_TNH = attend(step, LAYOUT, impl=impl)
    assert largest_error(step, out_TNH) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_a_compiled_kernel_reads_one_byte(
    impl: Impl, head_dim: int, page: int, kv_dtype: str
) -> None:
    step = build_step(
        CASES, LAYOUT, page=page, head_dim=head_dim, dtype="bfloat16", kv_dtype=kv_dtype
    )
    assert largest_error(step, attend(step, LAYOUT, impl=impl)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_a_compiled_kernel_keeps_windows_caps_and_splits_of_one_length(impl: Impl) -> None:
    step = build_step(CASES, LAYOUT, page=16, head_dim=64, dtype="bfloat16")
    for options in ({"window": 100}, {"soft_cap": 2.0}, {"window": 70, "soft_cap": 2.0}):
        out_TNH = attend(step, LAYOUT, impl=impl, split_len=512, **options)
        assert largest_error(step, out_TNH, **options) < TOLERANCE["bfloat16"], options


@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_the_oracle_sees_a_key_too_few(impl: Impl) -> None:
    step = build_step(CASES, LAYOUT, page=16, head_dim=64, dtype="bfloat16")
    late = dataclasses.replace(step, q_starts_X=step.q_starts_X - 1)
    assert not largest_error(step, attend(late, LAYOUT, impl=impl)) < TOLERANCE["bfloat16"]
