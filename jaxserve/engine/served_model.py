"""What the engine and its callers know of the model that is served."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ServedModel:
    """Facts of the served model; resolved at start-up, never changed.

    Attributes:
      max_model_tokens: longest prompt + output.
      vocab_size: ids the model can give, without padding.
      eos_ids: union over all sources.
      sampling_defaults: the model's own, by `SamplingParams` field name.
      capacity_tokens: tokens the KV pool holds; 0 where that is not known.
      weights_digest: of the weights, and of how they are run; "" where nothing is kept longer than
        they are loaded.
      positions: how positions enter the keys: a digest.
      changing_ropes: (kind, original length) of each rope that changes with a prompt's length.
      kv_dtype: of the KV pool.
      kv_scales: how its numbers are scaled; "" where they are not.
    """

    name: str
    max_model_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None = None
    path: str = ""
    architecture: str = ""
    dtype: str = ""
    quantization: str = ""
    has_chat_template: bool = False
    sampling_defaults: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    capacity_tokens: int = 0
    weights_digest: str = ""
    positions: str = ""
    changing_ropes: tuple[tuple[str, int], ...] = ()
    kv_dtype: str = ""
    kv_scales: str = ""
