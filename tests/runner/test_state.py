"""State rows: what a load packs, what the sampler must do, what padding reads."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.plan import RowLoad
from jaxserve.request import SamplingParams
from jaxserve.runner import state
from tests.runner.driver import MODEL, tiny_sizes

SPEC = tiny_sizes().spec
B, V = SPEC.max_seqs, MODEL.padded_vocab_size

LOAD = RowLoad(
    sequence_id=1,
    row=3,
    pages=(9, 119),
    sampling=SamplingParams(
        temperature=0.25,
        top_k=7,
        top_p=0.5,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=0.75,
        repetition_penalty=1.25,
        logit_bias={5: -100.0, 130: 3.5},
        min_tokens=6,
    ),
    seed=(0xFFFFFFFF << 32) | 0x80000001,
    choice=4,
    stop_ids=(2, 130),
    prompt=(5, 5, 9),
    output=(9, 9, 7),
)


def test_a_load_fills_its_row_and_no_other() -> None:
    before = state.init_state(SPEC)
    (packed_LI,) = state.build_row_loads([LOAD], SPEC)
    after = jax.jit(functools.partial(state.load_rows, spec=SPEC))(before, jnp.asarray(packed_LI))
    others = np.arange(B) != LOAD.row
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[others], old[others])
    assert after.page_table_BP[3, :3].tolist() == [9, 119, 0]
    got = {name: np.asarray(leaf)[3] for name, leaf in vars(after.sampling).items()}
    assert got["seed_B2"].tolist() == [0xFFFFFFFF, 0x80000001]
    assert got["choice_B"] == 4
    assert (got["temperature_B"], got["top_k_B"], got["top_p_B"]) == (0.25, 7, 0.5)
    assert (got["min_p_B"], got["presence_B"], got["frequency_B"]) == (0.125, -1.5, 0.75)
    assert (got["repetition_B"], got["min_tokens_B"]) == (1.25, 6)
    assert got["bias_ids_BE"].tolist() == [5, 130, V, V, V]
    assert got["bias_values_BE"].tolist() == [-100.0, 3.5, 0, 0, 0]
    assert got["ban_ids_BM"].tolist()[:3] == [2, 130, V]


def test_counts_are_twice_the_output_and_one_for_the_prompt() -> None:
    (triples_3I,) = state.build_counts([LOAD], SPEC)
    counts_BV = state.add_counts(jnp.zeros((B, V), jnp.int32), jnp.asarray(triples_3I))
    assert {int(n): int(counts_BV[3, n]) for n in np.flatnonzero(counts_BV[3])} == {
        5: 1,
        9: 5,
        7: 2,
    }
    assert int(counts_BV.sum()) == 8


def test_more_counts_than_one_run_takes_are_looped() -> None:
    prompt = tuple(range(MODEL.vocab_size))
    loads = [dataclasses.replace(LOAD, row=row, prompt=prompt, output=()) for row in range(B)]
    runs = list(state.build_counts(loads, SPEC))
    assert len(runs) == 2
    triples_3I = np.concatenate(runs, axis=1)
    assert (triples_3I[0] < B).sum() == B * MODEL.vocab_size
    assert triples_3I.min() >= 0


def test_a_request_without_penalties_brings_no_counts() -> None:
    assert list(state.build_counts([dataclasses.replace(LOAD, prompt=(), output=())], SPEC)) == []


def test_padding_loads_point_past_the_end() -> None:
    (packed_LI,) = state.build_row_loads([LOAD], SPEC)
    assert packed_LI[0, 0] == 3
    assert (packed_LI[1:, 0] == B).all()
    assert (packed_LI[1:, 1:] == 0).all()


def test_a_row_past_the_end_samples_neutrally() -> None:
    rows = state.init_state(SPEC).sampling
    dirty = jax.tree.map(lambda leaf: jnp.full_like(leaf, 77), rows)
    got = state.gather_sampling(dirty, jnp.array([B, 0], jnp.int32), padded_vocab=V)
    for name, leaf in vars(got).items():
        neutral = V if "_ids_" in name else float(name in ("top_p_B", "repetition_B"))
        padding, real = np.asarray(leaf)
        assert (padding == neutral).all(), name
        assert (real == 77).all(), name


@pytest.mark.parametrize(
    ("sampling", "output_index", "want"),
    [
        (SamplingParams(temperature=0.0), 0, "greedy"),
        (SamplingParams(temperature=1e-5, top_k=3, top_p=0.5), 0, "greedy"),
        (SamplingParams(), 0, "plain"),
        (SamplingParams(top_k=1), 0, "full"),
        (SamplingParams(top_p=0.99), 0, "full"),
        (SamplingParams(min_p=0.01), 0, "full"),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), 0, "full"),
        (SamplingParams(temperature=0.0, repetition_penalty=0.9), 0, "full"),
        (SamplingParams(temperature=0.0, logit_bias={1: 1.0}), 0, "full"),
        (SamplingParams(temperature=0.0, prompt_logprobs=0), 0, "greedy"),
        (SamplingParams(temperature=0.0, min_tokens=3), 2, "full"),
        (SamplingParams(temperature=0.0, min_tokens=3), 3, "greedy"),
    ],
)
def test_the_sampler_does_no_more_than_a_row_needs(
    sampling: SamplingParams, output_index: int, want: str
) -> None:
    def find(*, is_masked: bool = False, has_logprobs: bool = False) -> str:
        return state.find_variant(
            sampling, output_index, is_masked=is_masked, has_logprobs=has_logprobs
        )

    assert find() == want
    assert find(is_masked=True) == find(has_logprobs=True) == "full"
