"""Everything about a runner that changes its compiled programs, in one hashable record."""

import dataclasses
from typing import Final, Literal

from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.pool import LARGEST, QuantizedDtypeName
from jaxserve.model.config import ModelConfig

DtypeName = Literal["float32", "bfloat16"]
KvDtypeName = Literal[DtypeName, QuantizedDtypeName]

_DTYPE_BYTES: Final[dict[KvDtypeName, int]] = {
    "float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1
}  # fmt: skip
_SCALE_BYTES: Final = 4


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
    kv_dtype: KvDtypeName
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
    def kv_scales(self) -> str:
        """How the pool's numbers are scaled, for a cache's identity; "" where they are not."""
        return "a float32 of each token and head" if self.kv_dtype in LARGEST else ""

    @property
    def page_bytes(self) -> int:
        return bytes_of_page(self.model, page_size=self.page_size, kv_dtype=self.kv_dtype)


def bytes_of_page(model: ModelConfig, *, page_size: int, kv_dtype: KvDtypeName) -> int:
    """Returns the bytes of one page over all layers, its scales among them."""
    head_bytes = model.head_dim * _DTYPE_BYTES[kv_dtype]
    if kv_dtype in LARGEST:
        head_bytes += _SCALE_BYTES
    return model.num_layers * 2 * model.num_kv_heads * page_size * head_bytes
