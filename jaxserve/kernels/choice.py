"""Which implementation computes what."""

import dataclasses

from jaxserve.kernels.dot import MatmulImpl
from jaxserve.kernels.paged_attention import Impl


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Kernels:
    """Chosen once at start-up (`runner/kernel_choice.py`).

    Attributes:
      matmul: of products with weights; see `kernels.dot.project`.
      split_len: of attention; see `paged_attention`.
    """

    attention: Impl = "xla"
    matmul: MatmulImpl = "xla"
    split_len: int | None = None
