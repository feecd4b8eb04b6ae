"""What a Hugging Face config.json says of RoPE.

Old files have `rope_theta` and `rope_scaling`, new ones `rope_parameters` with both in it, which
Gemma 3 gives once for each kind of layer.
"""

import math
from collections.abc import Mapping

from jaxserve.checkpoint.hf_families import HfFamily
from jaxserve.checkpoint.hf_settings import HfSettings, is_number
from jaxserve.errors import CheckpointError
from jaxserve.model.config import RopeConfig, RopeKind

FULL, SLIDING = "full_attention", "sliding_attention"
# By kind, what it may say besides its type, base and `partial_rotary_factor`.
KIND_KEYS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # says where a factor comes from; nothing is computed with it
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
}


def read_ropes(settings: HfSettings, family: HfFamily, *, head_dim: int) -> dict[str, RopeConfig]:
    """Returns the RoPE of layers without and with a window, by HF's words for them.

    Raises:
      CheckpointError: a type or a value is not supported, or two settings contradict each other.
    """
    scaling, parameters = settings.group("rope_scaling"), settings.group("rope_parameters")
    reader = _RopeReader(settings, family, head_dim)
    if family.local_theta_key is not None:
        odd = sorted(parameters.keys() - {FULL, SLIDING})
        if odd:
            raise CheckpointError(
                f"{settings.where}: rope_parameters has {', '.join(odd)}, but in this family it "
                f"must be an object for each of {FULL} and {SLIDING}"
            )
        full = {**_inner(parameters, FULL, settings), **scaling}
        sliding = _inner(parameters, SLIDING, settings)
        return {
            FULL: reader.read(full, "rope_theta"),
            SLIDING: reader.read(sliding, family.local_theta_key),
        }
    rope = reader.read(scaling or parameters, "rope_theta")
    if scaling and parameters and reader.read(parameters, "rope_theta") != rope:
        raise CheckpointError(
            f"{settings.where} contradicts itself: rope_scaling is {scaling}, but rope_parameters "
            f"is {parameters}; keep one of them"
        )
    return {FULL: rope, SLIDING: rope}


def _inner(parameters: Mapping[str, object], name: str, settings: HfSettings) -> dict[str, object]:
    value = parameters.get(name)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise settings.wrong(f"rope_parameters.{name}", value, "an object")


class _RopeReader:
    """Reads one object of RoPE settings."""

    def __init__(self, settings: HfSettings, family: HfFamily, head_dim: int) -> None:
        self._settings, self._family, self._head_dim = settings, family, head_dim
        self._group: Mapping[str, object] = {}

    def read(self, group: Mapping[str, object], theta_key: str) -> RopeConfig:
        self._group = group
        kind = self._kind()
        theta, rotary_dim = self._theta(theta_key), self._rotary_dim()
        match kind:
            case "default":
                return RopeConfig(theta=theta, rotary_dim=rotary_dim)
            case "linear":
                return RopeConfig(
                    theta=theta, rotary_dim=rotary_dim, kind=kind, factor=self._factor()
                )
            case "dynamic":
                return RopeConfig(
                    theta=theta,
                    rotary_dim=rotary_dim,
                    kind=kind,
                    factor=self._factor(),
                    original_max_position=self._settings.integer("max_position_embeddings"),
                )
            case "llama3":
                return RopeConfig(
                    theta=theta,
                    rotary_dim=rotary_dim,
                    kind=kind,
                    factor=self._factor(),
                    original_max_position=self._original(),
                    low_freq_factor=self._number("low_freq_factor"),
                    high_freq_factor=self._number("high_freq_factor"),
                )
            case "yarn":
                return self._read_yarn(theta, rotary_dim)
            case "longrope":
                return self._read_longrope(theta, rotary_dim)

    def _read_yarn(self, theta: float, rotary_dim: int | None) -> RopeConfig:
        factor, original = self._factor_or_ratio(), self._original()
        mscale, all_dim = self._number("mscale", 0.0), self._number("mscale_all_dim", 0.0)
        attention_factor = self._group.get("attention_factor")
        if attention_factor is not None:
            attention_factor = self._number("attention_factor")
        elif mscale > 0 and all_dim > 0:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
        elif mscale < 0 or all_dim < 0:
            raise self._settings.wrong("mscale of RoPE", min(mscale, all_dim), "at least 0")
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
        truncate = self._group.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._settings.wrong("truncate of RoPE", truncate, "true or false")
        return RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=self._number("beta_fast", 32.0) or 32.0,
            beta_slow=self._number("beta_slow", 1.0) or 1.0,
            truncate=truncate,
            attention_factor=attention_factor,
        )

    def _read_longrope(self, theta: float, rotary_dim: int | None) -> RopeConfig:
        factor, original = self._factor_or_ratio(), self._original()
        if self._group.get("attention_factor") is not None:
            attention_factor = self._number("attention_factor")
        elif factor <= 1.0:
            attention_factor = 1.0
        else:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        num_pairs = (self._head_dim if rotary_dim is None else rotary_dim) // 2
        return RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            kind="longrope",
            factor=factor,
            original_max_position=original,
            attention_factor=attention_factor,
            short_factors=self._divisors("short_factor", num_pairs),
            long_factors=self._divisors("long_factor", num_pairs),
        )

    def _kind(self) -> RopeKind:
        word = self._group.get("rope_type") or self._group.get("type") or "default"
        supported = {str(kind): kind for kind in KIND_KEYS}
        supported |= dict.fromkeys(self._family.longrope_words, "longrope")
        kind = supported.get(word) if isinstance(word, str) else None
        if kind is None:
            raise CheckpointError(
                f"{self._settings.where}: the RoPE type {word!r:.80} is not supported; supported "
                f"are {', '.join(supported)}"
            )
        unknown = {
            name: value
            for name, value in self._group.items()
            if name not in KIND_KEYS[kind]
            and name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")
            and value is not None
        }
        if unknown:
            raise CheckpointError(
                f"{self._settings.where}: RoPE of the type {kind} has {unknown!r:.200}, which is "
                "not supported; it is refused because ignoring it would give wrong text"
            )
        return kind

    def _theta(self, key: str) -> float:
        """Returns the base; it may stand in the object and beside it, but must be one number."""
        inner, outer = self._group.get("rope_theta"), self._settings.given.get(key)
        for value in (inner, outer):
            if value is not None and not is_number(value):
                raise self._settings.wrong("rope_theta", value, "a number")
        if inner is not None and outer is not None and inner != outer:
            raise CheckpointError(
                f"{self._settings.where} contradicts itself: {key} is {outer}, but RoPE's own "
                f"rope_theta is {inner}; keep one of them"
            )
        return float(str(inner)) if inner is not None else self._settings.number(key)

    def _rotary_dim(self) -> int | None:
        """Returns how many dimensions of a head are turned; None is all."""
        name = "partial_rotary_factor"
        share = self._group.get(name, self._settings.given.get(name))
        if share is None or share == 1.0:
            return None
        if not self._family.is_rope_partial:
            raise CheckpointError(
                f"{self._settings.where}: {name} is {share!r:.80}, which is not supported for "
                f"{self._family.name}; it is refused because ignoring it would give wrong text"
            )
        if not is_number(share) or not 0 < float(str(share)) < 1:
            raise self._settings.wrong(name, share, "a number in (0, 1]")
        rotary_dim = int(self._head_dim * float(str(share)))
        if rotary_dim < 2 or rotary_dim % 2:
            raise self._settings.wrong(
                name, share, f"such that an even number of {self._head_dim} dimensions is turned"
            )
        return None if rotary_dim == self._head_dim else rotary_dim

    def _factor(self) -> float:
        factor = self._number("factor")
        if not 0 < factor < math.inf:
            raise self._settings.wrong("factor of RoPE", factor, "positive and finite")
        return factor

    def _factor_or_ratio(self) -> float:
        if self._group.get("factor") is not None:
            return self._factor()
        return self._settings.integer("max_position_embeddings") / self._original()

    def _original(self) -> int:
        """Returns the length before scaling: beside RoPE's object first, then in it."""
        name = "original_max_position_embeddings"
        outer = self._settings.optional_integer(name)
        value: object = outer if outer is not None else self._group.get(name)
        if value is None:
            value = self._settings.integer("max_position_embeddings")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._settings.wrong(name, value, "a whole number from 1")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._group.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._settings.where}: RoPE's settings lack {name}")
        if not is_number(value) or not math.isfinite(float(str(value))):
            raise self._settings.wrong(f"{name} of RoPE", value, "a finite number")
        return float(str(value))

    def _divisors(self, name: str, num_pairs: int) -> tuple[float, ...]:
        value = self._group.get(name)
        if not isinstance(value, list) or not all(
            is_number(entry) and 0 < float(str(entry)) < math.inf for entry in value
        ):
            raise self._settings.wrong(f"{name} of RoPE", value, "a list of positive numbers")
        if len(value) != num_pairs:
            raise CheckpointError(
                f"{self._settings.where}: {name} of RoPE has {len(value)} numbers, but must have "
                f"{num_pairs}, one for each pair of dimensions"
            )
        return tuple(float(entry) for entry in value)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Peng et al. 2023, YaRN, eq. 22, with DeepSeek's `mscale` on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
