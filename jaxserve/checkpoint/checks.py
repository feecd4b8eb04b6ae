"""What must hold of a checkpoint in any format before its weights are read."""

import logging
import math
from collections.abc import Iterable, Mapping

from jaxserve.errors import CheckpointError
from jaxserve.model.config import MAX_EOS_IDS, ModelConfig, RopeConfig
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_SIZE = (1 << 31) - 1  # sizes and positions are int32 on the device
MAX_THETA = 1e30  # the powers of RoPE's base are float32


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    other_problems: Iterable[str] = (),
) -> None:
    """Compare tensor names and shapes, both ways.

    Raises:
      CheckpointError: one message that names every tensor at fault.
    """
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", shapes),
        )
        if names
    ]
    problems += other_problems
    if problems:
        raise CheckpointError(
            f"the tensors of {where} do not make up this model. {'; '.join(problems)}. "
            "Get the files again; if they are whole, this kind of model is not supported"
        )


def check_vocab(config: ModelConfig, tokenizer: Tokenizer, where: str) -> frozenset[int]:
    """Returns the EOS ids that the model can write; warns of ids it has no embedding for.

    Raises:
      CheckpointError: more EOS ids than a request has room for.
    """
    if tokenizer.vocab_size > config.vocab_size:
        logger.warning(
            "the tokenizer of %s knows %d ids, but the model only %d; prompts with others fail",
            where,
            tokenizer.vocab_size,
            config.vocab_size,
        )
    eos_ids = frozenset(id for id in tokenizer.eos_ids if id < config.vocab_size)
    if beyond := sorted(tokenizer.eos_ids - eos_ids):
        logger.warning(
            "eos_token_id of %s names %s, but the model's ids end at %d; it is ignored",
            where,
            beyond[:5],
            config.vocab_size - 1,
        )
    if len(eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{where}: eos_token_id names {len(eos_ids)} ids, but at most {MAX_EOS_IDS} are "
            "supported; correct it in config.json or generation_config.json"
        )
    return eos_ids


def check_num_layers(num_layers: int, num_tensors: int, where: str) -> int:
    """Returns `num_layers`; refuses more than there are tensors, before they are spelled out.

    Raises:
      CheckpointError: names both numbers.
    """
    if num_layers > num_tensors:
        raise CheckpointError(
            f"{where} says {num_layers} layers, but there are only {num_tensors} tensors; "
            "get the files again"
        )
    return num_layers


def check_config(config: ModelConfig, where: str) -> None:
    """Refuse sizes and numbers that no decoder can have.

    Raises:
      CheckpointError: names the size.
    """
    for name, size in _sizes(config):
        if not 1 <= size <= MAX_SIZE:
            raise CheckpointError(
                f"{where}: {name} is {size}, but must be at least 1 and at most {MAX_SIZE}"
            )
    for name, number in _numbers(config):
        if number is not None and not 0 < number < math.inf:  # NaN is not either
            raise CheckpointError(f"{where}: {name} is {number}, but must be positive and finite")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} "
            "key/value heads evenly"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {config.head_dim}, but RoPE needs an even one")
    for rope in dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None):
        _check_rope(rope, config.head_dim, where)
    experts = config.experts
    if experts is None and any(layer.mlp == "experts" for layer in config.layers):
        raise CheckpointError(f"{where}: layers have experts, but there are none")
    if experts is not None and not 2 <= experts.num_experts >= experts.num_active:
        raise CheckpointError(
            f"{where}: {experts.num_active} of {experts.num_experts} experts are used for a token, "
            "but there must be at least 2, and no more used than there are"
        )


def _check_rope(rope: RopeConfig, head_dim: int, where: str) -> None:
    """Refuse numbers whose angles would be none: a division by zero, the logarithm of zero."""
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if not 1 < rope.theta <= MAX_THETA:
        raise CheckpointError(
            f"{where}: rope_theta is {rope.theta}, but must be above 1 and at most {MAX_THETA:g}"
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(
            f"{where}: RoPE turns {rotary_dim} dimensions of a head, but must turn an even number "
            f"up to {head_dim}"
        )
    if rope.kind in ("default", "linear"):
        return
    if rope.original_max_position is None or not 1 <= rope.original_max_position <= MAX_SIZE:
        raise CheckpointError(
            f"{where}: RoPE's original length is {rope.original_max_position}, but must be at "
            f"least 1 and at most {MAX_SIZE}"
        )
    factors, num_pairs = (rope.short_factors, rope.long_factors), rotary_dim // 2
    is_right, wanted = {
        "dynamic": (rotary_dim > 2, "turn more than one pair of dimensions"),
        "llama3": (
            0 < rope.low_freq_factor < rope.high_freq_factor < math.inf,
            "have 0 < low_freq_factor < high_freq_factor",
        ),
        "yarn": (
            0 < rope.beta_slow < math.inf and 0 < rope.beta_fast < math.inf,
            "have a beta_slow and a beta_fast above 0",
        ),
        "longrope": (
            all(len(row) == num_pairs and 0 < min(row) <= max(row) < math.inf for row in factors),
            f"have {num_pairs} positive short and long factors",
        ),
    }[rope.kind]
    if not is_right:
        raise CheckpointError(f"{where}: RoPE of the type {rope.kind} must {wanted}")


def _sizes(config: ModelConfig) -> list[tuple[str, int]]:
    sizes = [
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("num_layers", config.num_layers),
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.num_kv_heads),
        ("head_dim", config.head_dim),
        ("mlp_size", config.mlp_size),
        ("max_position", config.max_position),
    ]
    windows = dict.fromkeys(layer.window for layer in config.layers)
    sizes += [("sliding_window", window) for window in windows if window is not None]
    if config.experts is not None:
        sizes += [
            ("num_experts", config.experts.num_experts),
            ("experts of a token", config.experts.num_active),
            ("mlp_size of an expert", config.experts.mlp_size),
        ]
    return sizes


def _numbers(config: ModelConfig) -> list[tuple[str, float | None]]:
    ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
    return [
        ("norm_eps", config.norm_eps),
        ("embedding_scale", config.embedding_scale),
        ("attention_scale", config.attention_scale),
        ("attention soft-cap", config.attention_soft_cap),
        ("final soft-cap", config.final_soft_cap),
        *(("RoPE's factor", rope.factor) for rope in ropes),
        *(("RoPE's attention_factor", rope.attention_factor) for rope in ropes),
    ]
