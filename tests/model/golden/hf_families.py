"""One small model of each family and of each kind of RoPE: config.json and weights, nothing else.

For `make_golden.py` (torch) and for the tests (jax) alike. Weights are a pure function of their
names in the file, so a tensor under a wrong name, or in a wrong place, gives other logits. Sizes
are such that nothing is what it could be derived from; what a family's file may leave out is left
out of one.
"""

import dataclasses
import zlib
from typing import Any

import numpy as np

NUM_TOKENS = 60
TOKEN_IDS = tuple(int(i) for i in np.random.RandomState(5).randint(0, 131, NUM_TOKENS))

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 112,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model.

    Attributes:
      prompt_len: tokens read at once; the others follow one by one.
      stddev: of weights and biases; less than 0.3 where the errors of float32 would come near what
        is tolerated.
      embedding_stddev: of the embedding, where larger logits are wanted.
      columns: every how many logits of a token are stored.
    """

    architecture: str
    settings: dict[str, Any]
    prompt_len: int = NUM_TOKENS
    stddev: float = 0.3
    embedding_stddev: float | None = None
    columns: int = 1

    @property
    def config(self) -> dict[str, Any]:
        """config.json; `...` leaves a size out."""
        whole = {"architectures": [self.architecture], **SIZES, **self.settings}
        return {key: value for key, value in whole.items() if value is not ...}

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns N(0, 0.3), or N(1, 0.3) for a norm's factor, or N(0, 0.3) for w of Gemma's 1 + w.

        RandomState, whose streams numpy keeps for ever.
        """
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        mean = 1.0 if "norm" in name and not self.architecture.startswith("Gemma") else 0.0
        stddev = 0.3 if "norm" in name else self.stddev
        if "embed_tokens" in name and self.embedding_stddev is not None:
            stddev = self.embedding_stddev
        value: np.ndarray = (mean + stddev * normal).astype(np.float32)
        return value


FOUR_LAYERS = {"num_hidden_layers": 4}
GEMMA: dict[str, Any] = {
    **FOUR_LAYERS,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 3.0,
    "sliding_window": 6,
    "attention_bias": True,
}
FAMILIES: dict[str, Case] = {
    "llama": Case(
        architecture="LlamaForCausalLM",
        settings={
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_theta": 500000.0,
        },
    ),
    "mistral": Case(
        architecture="MistralForCausalLM",
        settings={"model_type": "mistral", "sliding_window": 7, "hidden_act": "gelu"},
    ),
    "qwen2": Case(
        architecture="Qwen2ForCausalLM",
        settings={
            "model_type": "qwen2",
            **FOUR_LAYERS,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "rope_theta": 1000.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Case(
        architecture="Qwen3ForCausalLM",
        settings={
            "model_type": "qwen3",
            **FOUR_LAYERS,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma2": Case(
        architecture="Gemma2ForCausalLM",
        settings={"model_type": "gemma2", "attn_logit_softcapping": 2.0, **GEMMA},
        embedding_stddev=0.8,
    ),
    "gemma3": Case(
        architecture="Gemma3ForCausalLM",
        settings={
            "model_type": "gemma3_text",
            **GEMMA,
            "sliding_window_pattern": 3,
            "rope_theta": 2000.0,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        embedding_stddev=0.8,
    ),
    "phi3": Case(
        architecture="Phi3ForCausalLM",
        settings={"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 7},
    ),
    "smollm3": Case(
        architecture="SmolLM3ForCausalLM",
        settings={
            "model_type": "smollm3",
            **FOUR_LAYERS,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "olmo2": Case(
        architecture="Olmo2ForCausalLM",
        settings={"model_type": "olmo2", "attention_bias": True},
    ),
    "mixtral": Case(
        architecture="MixtralForCausalLM",
        settings={"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3},
        stddev=0.2,
    ),
    "qwen3_moe": Case(
        architecture="Qwen3MoeForCausalLM",
        settings={
            "model_type": "qwen3_moe",
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
}


def llama_rope(
    scaling: dict[str, Any], *, prompt_len: int = NUM_TOKENS, **settings: object
) -> Case:
    """A Llama whose original length is 16."""
    return Case(
        architecture="LlamaForCausalLM",
        settings={
            "model_type": "llama",
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "rope_theta": 1000.0,
            "rope_scaling": scaling,
            **settings,
        },
        prompt_len=prompt_len,
        columns=4,
    )


ORIGINAL = {"original_max_position_embeddings": 16}
SHORT_FACTORS = [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.2, 2.5]
LONG_FACTORS = [1.2, 1.7, 2.5, 3.1, 4.0, 5.5, 7.0, 9.0]
ROPES: dict[str, Case] = {
    "linear": llama_rope({"type": "linear", "factor": 4.0}),
    "dynamic": llama_rope(
        {"type": "dynamic", "factor": 4.0}, max_position_embeddings=16, prompt_len=24
    ),
    "llama3": llama_rope(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **ORIGINAL,
        }
    ),
    "yarn": llama_rope(
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 0.1, **ORIGINAL}
    ),
    "yarn_mscale": llama_rope(
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 2.0,
            "beta_slow": 0.1,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
            **ORIGINAL,
        }
    ),
    # 10 tokens at once are short; from the 17th on the long factors hold.
    "longrope": llama_rope(
        {
            "rope_type": "longrope",
            "short_factor": SHORT_FACTORS,
            "long_factor": LONG_FACTORS,
            **ORIGINAL,
        },
        prompt_len=10,
    ),
    # Here transformers wants as many factors as hidden_size / heads has pairs.
    "phi3_longrope": Case(
        architecture="Phi3ForCausalLM",
        settings={
            "model_type": "phi3",
            "hidden_size": 128,
            "head_dim": ...,
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "su",
                "short_factor": SHORT_FACTORS[:6],
                "long_factor": LONG_FACTORS[:6],
                **ORIGINAL,
            },
            **ORIGINAL,
        },
        stddev=0.15,
        columns=4,
    ),
}
CASES = FAMILIES | ROPES
