"""What a decoder is made of: sizes, positions, norms, biases. Host only, hashable, no jax."""

import dataclasses
from typing import Literal

# Logits and embedding rows are padded to this many: whole vectors and whole top-k chunks.
VOCAB_MULTIPLE = 64
# EOS ids that a model may add to a request's stop ids.
MAX_EOS_IDS = 16


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RopeConfig:
    """How a position turns q and k.

    Attributes:
      theta: base of the angles' geometric series.
      kind: "default" is plain RoPE, angles theta^(-2i/H) per position.
    """

    theta: float = 10000.0
    kind: Literal["default"] = "default"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Static in every program: equal configs share programs.

    Attributes:
      architecture: the checkpoint's own word, such as "llama"; the code never branches on it.
      vocab_size: ids the model knows; arrays are padded to `padded_vocab_size`.
      head_dim: size of a head; num_heads * head_dim need not be hidden_size.
      max_position: positions the model was trained for.
      norm_eps: added to the mean square in every norm.
      tied_head: the output head is the embedding.
      attention_bias: q, k, v and the attention's output have biases.
      mlp_bias: gate, up and down have biases.
      attention_scale: factor on q·k; None is head_dim ** -0.5.
      attention_soft_cap: scores become cap * tanh(score / cap); None is off.
      final_soft_cap: the same for logits.
      window: a query sees this many keys, itself the last; None is all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    activation: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    window: int | None = None

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def scale(self) -> float:
        """The factor on q·k that holds."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
