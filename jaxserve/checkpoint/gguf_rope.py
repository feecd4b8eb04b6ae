"""What a GGUF file says of RoPE: keys, and tensors of divisors that stand beside the weights."""

import dataclasses
import math

import numpy as np

from jaxserve.checkpoint.gguf_families import GgufFamily
from jaxserve.checkpoint.gguf_file import GgufFile, TensorEntry
from jaxserve.checkpoint.gguf_keys import GgufKeys
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig, RopeConfig

F32_TYPE = 0
# A divisor for each pair: Llama 3's, for every length; and LongRoPE's.
DIVISORS, SHORT_DIVISORS, LONG_DIVISORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
DIVISOR_TENSORS = (DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
SCALING_KINDS = ("none", "linear", "yarn", "longrope")


def read_rope(
    keys: GgufKeys, family: GgufFamily, *, rotary_dim: int, head_dim: int, max_position: int
) -> RopeConfig:
    """Returns the RoPE of layers without a window.

    Raises:
      CheckpointError: a key or a tensor of divisors is not supported, or damaged.
    """
    rope = RopeConfig(
        theta=_positive(keys, "rope.freq_base", 10000.0),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    kind, factor = _read_scaling(keys)
    original = keys.integer("rope.scaling.original_context_length", max_position)
    if original < 1:
        raise keys.wrong("rope.scaling.original_context_length", original, "at least 1")
    attention_factor = _positive(keys, "rope.scaling.attn_factor", 1.0)
    divisors = [name for name in DIVISOR_TENSORS if name in keys.file.tensors]
    if family.has_divisors and (divisors or kind == "longrope"):
        if kind in ("linear", "yarn") and factor != 1.0:
            raise CheckpointError(
                f"{keys.where} scales RoPE by the kind {kind} and by {', '.join(divisors)}; both "
                "at once are not supported"
            )
        short, long = _read_both_divisors(keys, divisors, num_pairs=rotary_dim // 2)
        return dataclasses.replace(
            rope,
            kind="longrope",
            original_max_position=original,
            attention_factor=attention_factor,
            short_factors=short,
            long_factors=long,
        )
    if kind == "yarn":
        return _add_yarn(
            rope, keys, factor=factor, original=original, attention_factor=attention_factor
        )
    if attention_factor != 1.0:
        raise keys.wrong("rope.scaling.attn_factor", attention_factor, f"1.0 with the kind {kind}")
    return rope if factor == 1.0 else dataclasses.replace(rope, kind="linear", factor=factor)


def _read_scaling(keys: GgufKeys) -> tuple[str, float]:
    """Returns the kind of scaling and its factor."""
    # Absent means linear, as in files older than the key.
    kind = keys.value("rope.scaling.type") or "linear"
    if kind not in SCALING_KINDS:
        raise keys.wrong("rope.scaling.type", kind, f"one of {', '.join(SCALING_KINDS)}")
    keys.value("rope.scaling.finetuned")  # says where the factor comes from, no more
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if not 0 <= factor < math.inf:
        raise keys.wrong("rope.scaling.factor", factor, "positive and finite")
    return str(kind), 1.0 if kind == "none" or factor == 0 else factor


def _add_yarn(
    rope: RopeConfig, keys: GgufKeys, *, factor: float, original: int, attention_factor: float
) -> RopeConfig:
    """Returns RoPE with YaRN.

    llama.cpp does not read what a file says of the ramp and of the factor on cos and sin; the
    model's makers meant it, and HF transformers follows it.
    """
    default = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return dataclasses.replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=_positive(keys, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_positive(keys, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor
        * _positive(keys, "rope.scaling.yarn_attn_factor", default),
    )


def _positive(keys: GgufKeys, name: str, default: float) -> float:
    number = keys.number(name, default)
    if 0 < number < math.inf:
        return number
    raise keys.wrong(name, number, "positive and finite")


def _read_both_divisors(
    keys: GgufKeys, found: list[str], *, num_pairs: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the divisors for lengths up to the original one, and beyond it.

    Llama 3's are those of its rule, worked out when the file was made, and hold for all lengths.
    They are taken as they are: the rule's own numbers are not in the file.
    """
    names = (DIVISORS, DIVISORS) if found == [DIVISORS] else (SHORT_DIVISORS, LONG_DIVISORS)
    if set(found) != set(names):
        raise CheckpointError(
            f"{keys.where} scales RoPE by {', '.join(found) or 'longrope without tensors'}, but "
            f"needs {DIVISORS}, or {SHORT_DIVISORS} and {LONG_DIVISORS}; get the file again"
        )
    short, long = (_read_divisors(keys, keys.file.tensors[name], num_pairs) for name in names)
    return short, long


def _read_divisors(keys: GgufKeys, entry: TensorEntry, num_pairs: int) -> tuple[float, ...]:
    buffer = keys.file.buffer
    where = f"{keys.where}: the tensor {entry.name}"
    if entry.type_id != F32_TYPE or entry.shape != (num_pairs,):
        raise CheckpointError(
            f"{where} has the shape {list(entry.shape)} and the type {entry.type_id}, but must "
            f"hold {num_pairs} numbers of type F32, one for each pair of dimensions"
        )
    if entry.offset + 4 * num_pairs > len(buffer):
        raise CheckpointError(f"{where} is cut off; get the file again")
    divisors = np.frombuffer(buffer, "<f4", num_pairs, entry.offset)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CheckpointError(f"{where} must hold positive numbers; the file is damaged")
    return tuple(divisors.tolist())


def divisor_shapes(file: GgufFile, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of divisors that were read into `config`."""
    num_divisors = max(len(layer.rope.short_factors) for layer in config.layers if layer.rope)
    return {
        name: (num_divisors,) for name in DIVISOR_TENSORS if num_divisors and name in file.tensors
    }
