"""What the sampler must be able to do for the sequences in the state rows."""

import numpy as np

from jaxserve.model.sampling import Variant
from jaxserve.plan import RowLoad
from jaxserve.runner.batch import SampledRows
from jaxserve.runner.buckets import VARIANTS
from jaxserve.runner.state import find_variant


class RowVariants:
    """Each row's variant, worked out when it is loaded: a step has only to look at it."""

    def __init__(self, num_rows: int) -> None:
        self._variants_B = np.zeros(num_rows, np.int32)  # places in VARIANTS
        self._min_tokens_B = np.zeros(num_rows, np.int32)

    def load(self, load: RowLoad) -> None:
        """A row is filled."""
        sampling = load.sampling
        variant = find_variant(sampling, sampling.min_tokens, is_masked=False, has_logprobs=False)
        self._min_tokens_B[load.row] = sampling.min_tokens
        self._variants_B[load.row] = VARIANTS.index(variant)

    def find(self, sampled: SampledRows) -> Variant:
        """Returns the least variant that serves every row to sample."""
        rows_S = sampled.rows_S
        if sampled.is_masked_S.any() or sampled.num_top.count(None) < len(rows_S):
            return "full"
        if np.any(sampled.output_indices_S < self._min_tokens_B[rows_S]):
            return "full"
        return VARIANTS[int(self._variants_B[rows_S].max(initial=0))]
