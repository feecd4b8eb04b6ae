"""What a decoder is made of: sizes, positions, norms, biases. Host only, hashable, no jax."""

import dataclasses
from typing import Literal

# Logits and embedding rows are padded to this many: whole vectors and whole top-k chunks.
VOCAB_MULTIPLE = 64
# EOS ids that a model may add to a request's stop ids.
MAX_EOS_IDS = 16
# The least log-probability that is reported: of an id that the model rules out (-inf) and of all
# below this. It is what OpenAI's API writes for such ids, finite in JSON, and sums keep a meaning.
LOWEST_LOGPROB = -9999.0

Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RopeConfig:
    """How a position turns q and k. What a kind does not use stays at its default.

    Attributes:
      theta: base of the angles' geometric series.
      kind: "default" is plain RoPE, angles theta^(-2i/H) per position.
      rotary_dim: how many of a head's first dimensions are turned; None is all.
      factor: how many times longer than `original_max_position` a sequence may be.
      original_max_position: positions before scaling; None where the kind has no use for it.
      low_freq_factor, high_freq_factor: llama3: wavelengths between original / high and
        original / low are blended.
      beta_fast, beta_slow: yarn: turns over the original length that bound the blend.
      truncate: yarn: the bounds of the blend are whole dimensions.
      attention_factor: yarn and longrope: cos and sin are multiplied by it.
      short_factors, long_factors: longrope: divisors of the frequencies, one a pair, up to the
        original length and beyond it.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    rotary_dim: int | None = None
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
      rope: None: the layer does not know positions.
      window: a query sees this many keys, itself the last; None is all.
      mlp: "experts" is a mixture, as `ModelConfig.experts` says.
    """

    rope: RopeConfig | None
    window: int | None = None
    mlp: Literal["dense", "experts"] = "dense"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
      num_active: experts of a token: those with the largest router probability.
      mlp_size: F of one expert.
      normalize: the probabilities of a token's experts are divided by their sum.
    """

    num_experts: int
    num_active: int
    mlp_size: int
    normalize: bool


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Static in every program: equal configs share programs.

    Attributes:
      architecture: the checkpoint's own word, such as "llama"; the code never branches on it.
      vocab_size: ids the model knows; arrays are padded to `padded_vocab_size`.
      head_dim: size of a head; num_heads * head_dim need not be hidden_size.
      mlp_size: F of a dense MLP.
      max_position: positions the model was trained for, with its scaling.
      norm_eps: added to the mean square in every norm.
      layers: one entry a layer.
      tied_head: the output head is the embedding.
      activation: of the gate; "gelu_tanh" is the approximation, "gelu" the exact one.
      qkv_bias: q, k and v have biases.
      o_bias: the attention's output has a bias.
      mlp_bias: gate, up and down have biases.
      qk_norm: q and k are normed before RoPE: "head" each head alone with one weight for all,
        "all" all heads of a token together.
      pre_norms: attention and MLP read the normed residual stream.
      post_norms: what attention and MLP give is normed before it is added.
      embedding_scale: factor on embedding rows, rounded to the weights' dtype.
      attention_scale: factor on q·k; None is head_dim ** -0.5.
      attention_soft_cap: scores become cap * tanh(score / cap); None is off.
      final_soft_cap: the same for logits.
      experts: of the layers whose `mlp` is "experts".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    tied_head: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    experts: ExpertsConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def scale(self) -> float:
        """The factor on q·k that holds."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
