"""Everything about a runner that changes its compiled programs, in one hashable record."""

import dataclasses
from typing import Literal

from jaxserve.kernels.choice import Kernels
from jaxserve.model.config import ModelConfig

DtypeName = Literal["float32", "bfloat16"]

_DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RunnerSpec:
    """The sizes and kinds that all programs of a runner share. Equal specs share programs.

    Attributes:
      max_seqs: state rows.
      pages_per_seq: width of the page table: pages of the longest sequence.
      num_pages: pages of the pool, the padding page 0 among them.
      max_step_tokens: rows of the hidden-state buffer.
      max_logprobs: alternatives that come back with a token's log-probability.
      max_ban_ids: ids that a request may hold off (stop ids and EOS) while it has few outputs.
      kernels: the implementations, already chosen.
      batch_invariant: whether a token's numbers may depend on nothing but its sequence; the
        buckets are then one, and each token is an attention row of its own.
      command_buffers: whether XLA replays a program as CUDA graphs; only where there is a GPU.
    """

    model: ModelConfig
    dtype: DtypeName
    kv_dtype: DtypeName
    page_size: int
    pages_per_seq: int
    num_pages: int
    max_seqs: int
    max_step_tokens: int
    chunk_tile: int
    max_chunks: int
    max_logit_bias: int
    max_ban_ids: int
    max_logprobs: int
    kernels: Kernels
    batch_invariant: bool
    command_buffers: bool

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer's pool, ``kv_C2KRH``."""
        model = self.model
        return (self.num_pages, 2, model.num_kv_heads, self.page_size, model.head_dim)

    @property
    def page_bytes(self) -> int:
        return bytes_of_page(self.model, page_size=self.page_size, kv_dtype=self.kv_dtype)


def bytes_of_page(model: ModelConfig, *, page_size: int, kv_dtype: DtypeName) -> int:
    """Returns the bytes of one page over all layers."""
    numbers = 2 * model.num_kv_heads * page_size * model.head_dim
    return model.num_layers * numbers * _DTYPE_BYTES[kv_dtype]
