"""What the sampler must be able to do for the sequences in the state rows."""

import operator

from jaxserve.model.sampling import Variant
from jaxserve.plan import RowLoad
from jaxserve.runner.batch import SampledRows
from jaxserve.runner.buckets import VARIANTS
from jaxserve.runner.state import find_variant


class RowVariants:
    """Each row's variant, worked out when it is loaded: a step has only to look at it."""

    def __init__(self, num_rows: int) -> None:
        self._variants: list[Variant] = ["greedy"] * num_rows
        self._min_tokens = [0] * num_rows

    def load(self, load: RowLoad) -> None:
        """A row is filled."""
        sampling = load.sampling
        self._min_tokens[load.row] = sampling.min_tokens
        self._variants[load.row] = find_variant(
            sampling, sampling.min_tokens, is_masked=False, has_logprobs=False
        )

    def find(self, sampled: SampledRows) -> Variant:
        """Returns the least variant that serves every row to sample."""
        rows = sampled.rows
        if any(sampled.is_masked) or sampled.num_top.count(None) < len(rows):
            return "full"
        min_tokens, variants = self._min_tokens, self._variants
        least = [min_tokens[row] for row in rows]
        if any(least) and any(map(operator.lt, sampled.output_index, least)):
            return "full"
        wanted = {variants[row] for row in rows}
        return max(wanted, key=VARIANTS.index, default="greedy")
