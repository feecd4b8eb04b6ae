"""What each format calls the tensors of a decoder, by our parameters' names."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class HfNames:
    """How a family names its tensors in Hugging Face files.

    Attributes:
      norms: of a layer's norms, by parameter.
      router: of a layer of experts.
      expert: of gate, up and down of one; `{}` is its index.
      is_fused: q, k and v are one tensor's rows, and so are gate and up.
      norm_add: norms are stored as what is to be added to this.
    """

    norms: Mapping[str, str]
    router: str = "mlp.gate.weight"
    expert: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
        "mlp.experts.{}.down_proj.weight",
    )
    is_fused: bool = False
    norm_add: float = 0.0


PRE_NORMS = {
    "attn_norm_D": "input_layernorm.weight",
    "mlp_norm_D": "post_attention_layernorm.weight",
}
POST_NORMS = {
    "attn_post_norm_D": "post_attention_layernorm.weight",
    "mlp_post_norm_D": "post_feedforward_layernorm.weight",
}
GEMMA_NAMES = HfNames(
    norms={
        "attn_norm_D": "input_layernorm.weight",
        "mlp_norm_D": "pre_feedforward_layernorm.weight",
        **POST_NORMS,
    },
    norm_add=1.0,
)
LLAMA_NAMES = HfNames(norms=PRE_NORMS)
# By `ModelConfig.architecture`.
HF_NAMES = {
    "llama": LLAMA_NAMES,
    "mistral": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "smollm3": LLAMA_NAMES,
    "qwen3_moe": LLAMA_NAMES,
    "gemma2": GEMMA_NAMES,
    "gemma3": GEMMA_NAMES,
    "olmo2": HfNames(norms=POST_NORMS),
    "phi3": HfNames(norms=PRE_NORMS, is_fused=True),
    "mixtral": HfNames(
        norms=PRE_NORMS,
        router="block_sparse_moe.gate.weight",
        expert=(
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
            "block_sparse_moe.experts.{}.w2.weight",
        ),
    ),
}
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
HF_MODEL = {
    "embedding_VD": HF_EMBEDDING,
    "final_norm_D": "model.norm.weight",
    "head_VD": HF_HEAD,
}
HF_LAYER = {
    "q_DNH": "self_attn.q_proj.weight",
    "k_DKH": "self_attn.k_proj.weight",
    "v_DKH": "self_attn.v_proj.weight",
    "o_NHD": "self_attn.o_proj.weight",
    "q_bias_NH": "self_attn.q_proj.bias",
    "k_bias_KH": "self_attn.k_proj.bias",
    "v_bias_KH": "self_attn.v_proj.bias",
    "o_bias_D": "self_attn.o_proj.bias",
    "q_norm_H": "self_attn.q_norm.weight",
    "k_norm_H": "self_attn.k_norm.weight",
    "q_norm_NH": "self_attn.q_norm.weight",
    "k_norm_KH": "self_attn.k_norm.weight",
    "gate_DF": "mlp.gate_proj.weight",
    "up_DF": "mlp.up_proj.weight",
    "down_FD": "mlp.down_proj.weight",
    "gate_bias_F": "mlp.gate_proj.bias",
    "up_bias_F": "mlp.up_proj.bias",
    "down_bias_D": "mlp.down_proj.bias",
}
GGUF_MODEL = {
    "embedding_VD": "token_embd.weight",
    "final_norm_D": "output_norm.weight",
    "head_VD": "output.weight",
}
GGUF_LAYER = {
    "q_DNH": "attn_q.weight",
    "k_DKH": "attn_k.weight",
    "v_DKH": "attn_v.weight",
    "o_NHD": "attn_output.weight",
    "q_bias_NH": "attn_q.bias",
    "k_bias_KH": "attn_k.bias",
    "v_bias_KH": "attn_v.bias",
    "o_bias_D": "attn_output.bias",
    "q_norm_H": "attn_q_norm.weight",
    "k_norm_H": "attn_k_norm.weight",
    "q_norm_NH": "attn_q_norm.weight",
    "k_norm_KH": "attn_k_norm.weight",
    "attn_norm_D": "attn_norm.weight",
    "attn_post_norm_D": "post_attention_norm.weight",
    "mlp_norm_D": "ffn_norm.weight",
    "mlp_post_norm_D": "post_ffw_norm.weight",
    "gate_DF": "ffn_gate.weight",
    "up_DF": "ffn_up.weight",
    "down_FD": "ffn_down.weight",
    "gate_bias_F": "ffn_gate.bias",
    "up_bias_F": "ffn_up.bias",
    "down_bias_D": "ffn_down.bias",
    "router_DE": "ffn_gate_inp.weight",
    "gate_EDF": "ffn_gate_exps.weight",
    "up_EDF": "ffn_up_exps.weight",
    "down_EFD": "ffn_down_exps.weight",
}
# Architectures whose GGUF files store q, k and v as one tensor, and gate and up as another.
FUSED_GGUF = frozenset({"phi3"})
