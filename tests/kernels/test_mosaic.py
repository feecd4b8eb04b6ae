"""The Mosaic GPU kernel in jax's simulation of a GPU, its race detector on; more of it nightly.

A step costs a second there, so its edges are chosen, and several share what is compiled.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from jax import numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from tests.kernels.mosaic_steps import EDGES, SHAPES, build, error_of, run, tolerance_of
from tests.kernels.ragged import Case, random_cases

# Batches of each shape in a night: 500 of all.
MANY = 39


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    """A simulation that failed leaves its memories behind."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        pytest.param(name, cases, id=f"{name}: {' '.join(f'{c.q_len}/{c.kv_len}' for c in cases)}")
        for name, edges in EDGES.items()
        for cases in edges
    ],
)
def test_an_edge_is_right_and_without_a_race(name: str, cases: list[Case]) -> None:
    shape = SHAPES[name]
    step = build(shape, cases)
    out_TNH = run(shape, step)
    assert not gpu_callbacks.get_races().races_found
    assert out_TNH.dtype == (np.float32 if shape.is_wide else jnp.bfloat16)
    if cases:
        assert error_of(shape, step, out_TNH) < tolerance_of(shape)
    else:
        np.testing.assert_array_equal(out_TNH, np.zeros_like(out_TNH))


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_many_random_batches_are_right_and_without_a_race(name: str) -> None:
    shape = SHAPES[name]
    for seed in range(MANY):
        cases = random_cases(random.Random(seed), shape.layout, page=shape.page)
        step = build(shape, cases, seed=seed)
        out_TNH = run(shape, step)
        assert not gpu_callbacks.get_races().races_found
        assert error_of(shape, step, out_TNH) < tolerance_of(shape), (seed, cases)
