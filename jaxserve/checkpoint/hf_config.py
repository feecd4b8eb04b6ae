"""What a Hugging Face config.json of the Llama type says."""

from collections.abc import Mapping

from jaxserve.checkpoint.layout import check_config, check_num_layers
from jaxserve.errors import CheckpointError
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig

SUPPORTED_ARCHITECTURES = {"LlamaForCausalLM": "llama"}
# Settings of other families, with the values that change nothing. Any other value is refused.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "hidden_act": (None, "silu"),
    "logits_scaling": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (None, 0, 1),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
}


def read_model_config(
    settings: Mapping[str, object], *, num_tensors: int, where: str
) -> ModelConfig:
    """Returns the decoder's configuration; `tied_head` is the flag, the tensors may overrule it.

    Args:
      where: the file's name, for messages.

    Raises:
      CheckpointError: a setting is missing, of the wrong type, or not supported.
    """
    fields = _Fields(settings, where)
    architecture = _read_architecture(settings, where)
    refused = [
        f"{name}={settings[name]!r}"
        for name, neutral in NEUTRAL_VALUES.items()
        if settings.get(name) not in neutral
    ]
    layer_types = settings.get("layer_types") or []
    kinds = set(map(str, layer_types if isinstance(layer_types, list) else [layer_types]))
    if kinds - {"full_attention"}:
        refused.append(f"layer_types={sorted(kinds)}")
    if refused:
        raise CheckpointError(
            f"{where} needs what is not supported: {', '.join(refused)}; "
            "it is refused because ignoring it would give wrong text"
        )
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layer = LayerConfig(rope=RopeConfig(theta=_read_rope_theta(settings, where)))
    num_layers = check_num_layers(fields.integer("num_hidden_layers"), num_tensors, where)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        mlp_size=fields.integer("intermediate_size"),
        max_position=fields.integer("max_position_embeddings", 2048),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=(layer,) * num_layers,
        tied_head=fields.flag("tie_word_embeddings"),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    check_config(config, where)
    return config


def _read_architecture(settings: Mapping[str, object], where: str) -> str:
    named = settings.get("architectures")
    if isinstance(named, list):
        for name in named:
            if isinstance(name, str) and name in SUPPORTED_ARCHITECTURES:
                return SUPPORTED_ARCHITECTURES[name]
    elif settings.get("model_type") in SUPPORTED_ARCHITECTURES.values():
        return str(settings["model_type"])
    raise CheckpointError(
        f"{where} is of the architecture {named or settings.get('model_type')!r}, which is not "
        f"supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _read_rope_theta(settings: Mapping[str, object], where: str) -> float:
    """Returns the base of RoPE's angles; any scaling is refused by name.

    Old files have `rope_theta` and `rope_scaling`, new ones `rope_parameters` with both in it.
    """
    thetas = {"rope_theta": settings.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        group = settings.get(name)
        if group is None:
            continue
        if not isinstance(group, dict):
            raise CheckpointError(f"{where}: {name} is {group!r}, but must be an object")
        kind = group.get("rope_type", group.get("type", "default"))
        others = sorted(group.keys() - {"rope_type", "type", "rope_theta"})
        neutral = group.get("factor", 1.0) == 1.0 and group.get("partial_rotary_factor", 1.0) == 1.0
        if kind != "default" or set(others) - {"factor", "partial_rotary_factor"} or not neutral:
            raise CheckpointError(
                f"{where}: {name} is {group!r}; RoPE scaling is not supported, only the type "
                "default; it is refused because ignoring it would give wrong text"
            )
        thetas[f"{name}.rope_theta"] = group.get("rope_theta")
    given = {name: theta for name, theta in thetas.items() if theta is not None}
    if any(
        isinstance(theta, bool) or not isinstance(theta, int | float) for theta in given.values()
    ):
        raise CheckpointError(f"{where}: {given} must be numbers")
    values = {float(str(theta)) for theta in given.values()}
    if len(values) > 1:
        raise CheckpointError(f"{where} contradicts itself: {given}; keep one of them")
    return values.pop() if values else 10000.0


class _Fields:
    """Typed reads of config.json."""

    def __init__(self, settings: Mapping[str, object], where: str) -> None:
        self._settings, self._where = settings, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._wrong(name, value, "a whole number")

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._wrong(name, value, "a number")

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if isinstance(value, bool):
            return value
        raise self._wrong(name, value, "true or false")

    def _get(self, name: str, default: object) -> object:
        value = self._settings.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._where} lacks {name}")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {name} is {value!r}, but must be {wanted}")
