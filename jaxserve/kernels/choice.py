"""Which implementation computes what."""

import dataclasses

from jaxserve.kernels.dot import MatmulImpl
from jaxserve.kernels.paged_attention import Impl


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Kernels:
    """Chosen once at start-up (`runner/kernel_choice.py`).

    Attributes:
      matmul: of few rows with weights; see `kernels.dot.project`.
    """

    attention: Impl = "xla"
    matmul: MatmulImpl = "xla"
