"""What the sampler must be able to do for the sequences in the state rows."""

from collections.abc import Sequence

from jaxserve.model.sampling import Variant
from jaxserve.plan import RowLoad
from jaxserve.runner.batch import SampledRow
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

    def find(self, sampled: Sequence[SampledRow]) -> Variant:
        """Returns the least variant that serves every row to sample."""
        if any(row.is_masked or row.num_top is not None for row in sampled):
            return "full"
        min_tokens, variants = self._min_tokens, self._variants
        if any(row.output_index < min_tokens[row.row] for row in sampled):
            return "full"
        wanted = {variants[row.row] for row in sampled}
        return max(wanted, key=VARIANTS.index, default="greedy")
