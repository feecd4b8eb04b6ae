"""Angles against HF's table and against float64."""

import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model.config import RopeConfig
from jaxserve.model.rope import inverse_frequencies, rope_tables, rotate
from tests.model.golden import weights


@pytest.mark.parametrize("name", weights.MODELS)
def test_frequencies_are_hfs_to_the_bit(name: str) -> None:
    golden = np.load(pathlib.Path(weights.__file__).parent / "logits.npz")
    rope = RopeConfig(theta=weights.MODELS[name]["rope_theta"])
    got = inverse_frequencies(rope, weights.SIZES["head_dim"])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, golden[f"{name}/inverse_frequencies"])


def test_tables_are_exact_at_far_positions() -> None:
    positions = np.array([0, 1, 7, 100, 8191, 8192, 60000], np.int32)
    rope = RopeConfig(theta=100000.0)
    cos_TH, sin_TH = rope_tables(
        jnp.asarray(positions), jnp.asarray(positions), rope=rope, head_dim=64
    )
    # The angle is a float32 product, as in HF; its cosine is then right to the last digits.
    angle_TH = positions.astype(np.float32)[:, None] * inverse_frequencies(rope, 64)[None]
    np.testing.assert_allclose(cos_TH, np.cos(angle_TH.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sin_TH, np.sin(angle_TH.astype(np.float64)), atol=1e-6)


def test_a_score_depends_on_the_distance_alone() -> None:
    q_1NH, k_1NH = jax.random.normal(jax.random.key(0), (2, 1, 1, 16), jnp.float32)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rotate(x, *rope_tables(at_1, at_1, rope=RopeConfig(), head_dim=16))
            for x, at_1 in (
                (q_1NH, jnp.array([q_position], jnp.int32)),
                (k_1NH, jnp.array([k_position], jnp.int32)),
            )
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-2)
