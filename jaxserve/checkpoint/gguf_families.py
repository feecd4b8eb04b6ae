"""The architectures of GGUF files that are supported, and what their files leave unsaid.

A file names its architecture and gives sizes; windows, caps, scales and norms that all models of an
architecture share stand in llama.cpp's code only: src/models/*.cpp, load_arch_hparams.
"""

import dataclasses
from typing import Literal

from jaxserve.model.config import Activation


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class GgufFamily:
    """One architecture.

    Attributes:
      window: layers with `attention.sliding_window`: none (the key is refused), all, or all but
        each n-th by `attention.sliding_window_pattern`.
      default_window, default_pattern: where the keys are absent; 0 is no window.
      local_theta: RoPE base of the layers with a window where `rope.freq_base_swa` is absent, which
        scaling does not touch; "global" is the base of the others; None: RoPE is the same.
      has_divisors: RoPE may be scaled by tensors of divisors.
      is_rotary_partial: `rope.dimension_count` may be smaller than a head.
      experts: no layer has them, or every layer of a file with `expert_count`, or of every file.
      is_scaled: embedding rows are multiplied by sqrt(D).
      layers_scaled_by_width: number of layers of the one size whose queries are scaled by
        (D // N) ** -0.5 instead of head_dim ** -0.5.
      attention_soft_cap, final_soft_cap: where their keys are absent; 0 is off, None: the key is
        refused.
    """

    qk_norm: Literal["head"] | None = None
    post_norms: bool = False
    activation: Activation = "silu"
    window: Literal["none", "all", "periodic"] = "none"
    default_window: int = 0
    default_pattern: int = 1
    local_theta: float | Literal["global"] | None = None
    has_divisors: bool = False
    is_rotary_partial: bool = False
    experts: Literal["no", "maybe", "always"] = "no"
    is_scaled: bool = False
    layers_scaled_by_width: int | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None


FAMILIES = {
    # Llama, Mistral and Mixtral. llama.cpp's converter does not write Mistral's window, and
    # llama.cpp does not read it here; where a file has it, it is meant.
    "llama": GgufFamily(window="all", has_divisors=True, experts="maybe"),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(qk_norm="head"),
    "qwen3moe": GgufFamily(qk_norm="head", experts="always"),
    "gemma2": GgufFamily(
        post_norms=True,
        activation="gelu_tanh",
        window="periodic",
        default_window=4096,
        default_pattern=2,
        local_theta="global",
        is_scaled=True,
        layers_scaled_by_width=46,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
    ),
    "gemma3": GgufFamily(
        qk_norm="head",
        post_norms=True,
        activation="gelu_tanh",
        window="periodic",
        default_pattern=6,
        local_theta=10000.0,
        is_scaled=True,
        layers_scaled_by_width=62,
        final_soft_cap=0.0,
    ),
    # llama.cpp has Phi-3's window switched off (its pull request 13676); the models have it.
    "phi3": GgufFamily(window="all", has_divisors=True, is_rotary_partial=True),
}
