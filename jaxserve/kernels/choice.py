"""Which implementation computes what."""

import dataclasses
from typing import Literal

from jaxserve.kernels.dot import MatmulImpl
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts

# How the sampler finds what its filters keep, and the best ids of a row: by few candidates, with
# branches, for a CPU; in a fixed number of passes over all rows, for a GPU. The tokens are the
# same.
SamplingImpl = Literal["candidates", "passes"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Kernels:
    """Chosen once at start-up (`runner/kernel_choice.py`).

    Attributes:
      matmul: of products with weights; see `kernels.dot.project`.
      sampling: of filters and log-probabilities; see `model/sampling.py`.
      split_len, cuts: of attention; see `paged_attention`.
    """

    attention: Impl = "xla"
    matmul: MatmulImpl = "xla"
    sampling: SamplingImpl = "candidates"
    split_len: int | None = None
    cuts: Cuts = BY_FORMULA
