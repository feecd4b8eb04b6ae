"""What a GGUF file's metadata says about the decoder."""

import numpy as np

from jaxserve.checkpoint.gguf_file import GgufFile
from jaxserve.checkpoint.layout import check_config, check_num_layers
from jaxserve.errors import CheckpointError
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig

SUPPORTED_ARCHITECTURES = ("llama",)
# Keys of the architecture that say nothing this engine would have to act on.
IDLE_KEYS = frozenset({"tensor_data_layout", "vocab_size"})
# Keys that must have these values, because anything else is computed differently.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.finetuned": (False,),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
}


def read_model_config(file: GgufFile) -> ModelConfig:
    """Returns the decoder's configuration.

    Raises:
      CheckpointError: the architecture or one of its settings is not supported, or a key is
        missing or of the wrong type.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} is of the architecture {architecture!r}, which is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    keys = _Keys(file, f"{architecture}.")
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.integer(name, head_dim)) != head_dim:
            raise CheckpointError(
                f"{file.path}: {architecture}.{name} is {size}, but heads have {head_dim}; "
                "models where they differ are not supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding and embedding.shape else keys.integer("vocab_size")
    layer = LayerConfig(rope=RopeConfig(theta=keys.number("rope.freq_base", 10000.0)))
    where = str(file.path)
    num_layers = check_num_layers(keys.integer("block_count"), len(file.tensors), where)
    config = ModelConfig(
        architecture=str(architecture),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=keys.integer("feed_forward_length"),
        max_position=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        layers=(layer,) * num_layers,
        tied_head="output.weight" not in file.tensors,
        qkv_bias=any(name.endswith("attn_q.bias") for name in file.tensors),
        o_bias=any(name.endswith("attn_output.bias") for name in file.tensors),
        mlp_bias=any(name.endswith("ffn_gate.bias") for name in file.tensors),
    )
    _refuse_unsupported(file, keys, vocab_size)
    check_config(config, where)
    return config


def _refuse_unsupported(file: GgufFile, keys: "_Keys", vocab_size: int) -> None:
    """Refuse every setting that would change the numbers and is not followed here."""
    refused = []
    for name in keys.unread():
        value = keys.value(name)
        if name not in NEUTRAL_VALUES or value not in NEUTRAL_VALUES[name]:
            refused.append(f"{keys.prefix}{name}={value}")
    if "rope_freqs.weight" in file.tensors:
        refused.append("the tensor rope_freqs.weight (RoPE scaling of Llama 3)")
    if refused:
        raise CheckpointError(
            f"{file.path} needs what is not supported: {', '.join(refused)}; "
            "it is refused because ignoring it would give wrong text"
        )
    stated = file.metadata.get(f"{keys.prefix}vocab_size", vocab_size)
    if stated != vocab_size:
        raise CheckpointError(
            f"{file.path}: {keys.prefix}vocab_size is {stated}, but token_embd.weight has "
            f"{vocab_size} rows; the file is damaged"
        )


class _Keys:
    """The architecture's own keys, and which of them were read."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file, self.prefix = file, prefix
        self._read: set[str] = set(IDLE_KEYS)

    def value(self, name: str) -> object:
        return self._file.metadata.get(self.prefix + name)

    def unread(self) -> list[str]:
        mine = (key for key in self._file.metadata if key.startswith(self.prefix))
        return sorted({key.removeprefix(self.prefix) for key in mine} - self._read)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._wrong(name, value, "a whole number, the same for all layers")

    def number(self, name: str, default: float | None = None) -> float:
        """Returns the shortest decimal of this float32: 1e-05, as the model's makers wrote it."""
        value = self._get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(str(np.float32(value)))
        raise self._wrong(name, value, "a number")

    def _get(self, name: str, default: object) -> object:
        self._read.add(name)
        value = self.value(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._file.path} lacks the key {self.prefix}{name}")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path}: {self.prefix}{name} is {value}, but must be {wanted}"
        )
