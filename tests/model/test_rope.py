"""Angles against HF's tables, to the bit where floats allow it, and against float64."""

import dataclasses
import functools
import math
import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model.config import RopeConfig
from jaxserve.model.rope import inverse_frequencies, rope_tables, rotate
from tests.model.golden import weights
from tests.model.rope_golden import cases
from tests.model.rope_golden.cases import CASES, Case

HERE = pathlib.Path(__file__).parent


@functools.cache
def golden_tables() -> dict[str, np.ndarray]:
    return dict(np.load(HERE / "rope_golden" / "tables.npz"))


def rope_of(case: Case) -> RopeConfig:
    """Returns our words for HF's."""
    hf, fields = case.parameters, dict[str, object]()
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    fields |= {name: hf[name] for name in names if name in hf}
    if "partial_rotary_factor" in hf:
        fields["rotary_dim"] = int(case.head_dim * hf["partial_rotary_factor"])
    fields["original_max_position"] = hf.get("original_max_position_embeddings")
    match hf["rope_type"]:
        case "dynamic":
            fields["original_max_position"] = case.max_position
        case "longrope":
            fields["short_factors"] = tuple(hf["short_factor"])
            fields["long_factors"] = tuple(hf["long_factor"])
            stretch = case.max_position / hf["original_max_position_embeddings"]
            length = math.log(hf["original_max_position_embeddings"])
            fields["attention_factor"] = math.sqrt(1 + math.log(stretch) / length)
        case "yarn":
            above, below = hf.get("mscale", 1.0), hf.get("mscale_all_dim", 0.0)
            growth = 0.1 * math.log(hf["factor"])
            fields["attention_factor"] = (above * growth + 1) / (below * growth + 1)
    if "attention_factor" in hf:
        fields["attention_factor"] = hf["attention_factor"]
    return RopeConfig(theta=hf["rope_theta"], kind=hf["rope_type"], **fields)  # type: ignore[arg-type]  # by name


def tables_of(rope: RopeConfig, case: Case) -> tuple[np.ndarray, np.ndarray]:
    positions_T = jnp.array(cases.POSITIONS, jnp.int32)
    prompt_lens_T = jnp.full(positions_T.shape, case.prompt_len, jnp.int32)
    tables = jax.jit(functools.partial(rope_tables, rope=rope, head_dim=case.head_dim))
    cos_TH, sin_TH = tables(positions_T, prompt_lens_T)
    assert cos_TH.dtype == sin_TH.dtype == jnp.float32
    return np.asarray(cos_TH), np.asarray(sin_TH)


def error_of(rope: RopeConfig, name: str) -> float:
    cos_TH, sin_TH = tables_of(rope, CASES[name])
    golden = golden_tables()
    wanted_TH = np.stack([golden[f"{name}/cos"], golden[f"{name}/sin"]])
    return float(np.abs(np.stack([cos_TH, sin_TH]) - wanted_TH).max())


@pytest.mark.parametrize("name", CASES)
def test_tables_are_hfs_at_near_and_far_positions(name: str) -> None:
    rope = rope_of(CASES[name])
    golden = golden_tables()[f"{name}/inverse_frequencies"]
    np.testing.assert_array_equal(inverse_frequencies(rope, CASES[name].head_dim), golden)
    assert error_of(rope, name) < 1e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("default", {"theta": 500001.0}),
        ("partial", {"rotary_dim": 22}),
        ("linear", {"factor": 1.0}),
        ("dynamic, alone", {"kind": "linear"}),
        ("dynamic, alone", {"kind": "default"}),
        ("dynamic, alone", {"original_max_position": 2047}),
        ("llama3", {"kind": "linear"}),
        ("llama3", {"low_freq_factor": 1.1}),
        ("llama3", {"high_freq_factor": 3.9}),
        ("llama3", {"original_max_position": 8191}),
        ("yarn", {"attention_factor": 1.0}),
        ("yarn", {"beta_fast": 16.0}),
        ("yarn", {"beta_slow": 2.0}),
        ("yarn, all set", {"truncate": True}),
        ("longrope, alone", {"attention_factor": 1.0}),
        ("longrope, alone", {"original_max_position": 8192}),
        ("longrope, alone", {"long_factors": CASES["longrope, alone"].parameters["short_factor"]}),
    ],
)
def test_the_tables_see_each_setting_that_is_wrong(name: str, change: dict[str, object]) -> None:
    rope = dataclasses.replace(rope_of(CASES[name]), **change)  # type: ignore[arg-type]  # by name
    if rope.rotary_dim == 22:
        assert len(inverse_frequencies(rope, CASES[name].head_dim)) == 11
    else:
        assert error_of(rope, name) > 1e-4


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_tables_follow_the_length_of_the_prompt(name: str) -> None:
    alone, prompt = CASES[f"{name}, alone"], CASES[f"{name}, long prompt"]
    cos_TH, long_cos_TH = (tables_of(rope_of(case), case)[0] for case in (alone, prompt))
    is_same_T = (cos_TH == long_cos_TH).all(axis=1)
    # Position 0 is never turned. From 8191 on, a position's own length is no shorter.
    assert is_same_T.tolist() == [True, False, False, False, True, True, True]


@pytest.mark.parametrize("name", weights.MODELS)
def test_frequencies_are_hfs_to_the_bit(name: str) -> None:
    golden = np.load(pathlib.Path(weights.__file__).parent / "logits.npz")
    rope = RopeConfig(theta=weights.MODELS[name]["rope_theta"])
    got = inverse_frequencies(rope, weights.SIZES["head_dim"])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, golden[f"{name}/inverse_frequencies"])


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


def test_dimensions_beyond_the_rotary_ones_stay_as_they_are() -> None:
    x_TNH = jax.random.normal(jax.random.key(0), (3, 2, 16), jnp.float32)
    at_T = jnp.arange(3, dtype=jnp.int32)
    rope = RopeConfig(rotary_dim=6)
    turned_TNH = rotate(x_TNH, *rope_tables(at_T, at_T, rope=rope, head_dim=16))
    np.testing.assert_array_equal(turned_TNH[..., 6:], x_TNH[..., 6:])
    whole_TNH = rotate(x_TNH[..., :6], *rope_tables(at_T, at_T, rope=RopeConfig(), head_dim=6))
    np.testing.assert_array_equal(turned_TNH[..., :6], whole_TNH)
    assert np.abs(turned_TNH[1:, :, :6] - x_TNH[1:, :, :6]).min(axis=(1, 2)).max() > 0
