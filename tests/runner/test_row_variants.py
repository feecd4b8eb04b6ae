"""What a step's sampler must be able to do: what the most demanding of its rows needs."""

import random

import numpy as np
import pytest

from jaxserve.plan import RowLoad
from jaxserve.request import SamplingParams
from jaxserve.runner.batch import SampledRows
from jaxserve.runner.buckets import VARIANTS
from jaxserve.runner.row_variants import RowVariants
from jaxserve.runner.state import find_variant

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, min_tokens=3),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, min_tokens=2),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
)


def load(row: int, sampling: SamplingParams) -> RowLoad:
    return RowLoad(
        sequence_id=row, row=row, pages=(), sampling=sampling, seed=0, choice=0, stop_ids=()
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_step_does_what_its_most_demanding_row_needs(seed: int) -> None:
    rng = random.Random(seed)
    variants = RowVariants(8)
    held = [rng.choice(KINDS) for _ in range(8)]
    for row, sampling in enumerate(held):
        variants.load(load(row, rng.choice(KINDS)))  # another's before
        variants.load(load(row, sampling))
    for _ in range(30):
        rows = rng.sample(range(8), rng.randint(1, 3))
        output_indices = [rng.randint(0, 4) for _ in rows]
        is_masked = [rng.random() < 0.1 for _ in rows]
        num_top = [rng.choice([None] * 9 + [0]) for _ in rows]
        sampled = SampledRows(
            sequence_ids=rows,
            rows_S=np.array(rows, np.int32),
            hidden_indices_S=np.arange(len(rows), dtype=np.int32),
            output_indices_S=np.array(output_indices, np.int32),
            num_top=num_top,
            is_masked_S=np.array(is_masked),
        )
        needs = [
            find_variant(held[row], index, is_masked=masked, has_logprobs=top is not None)
            for row, index, masked, top in zip(
                rows, output_indices, is_masked, num_top, strict=True
            )
        ]
        assert variants.find(sampled) == max(needs, key=VARIANTS.index)
