"""What is known of a model before its weights are read."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig
from jaxserve.text.tokenizer import Tokenizer

# What a request may ask for (engine/limits.py): a default outside would fail every request.
DEFAULTS_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "top_k": (0, 1 << 31),
}
# Called with bytes of weights done and bytes in all.
Progress = Callable[[int, int], None]
# Nested dicts by the parts of a parameter's path; a leaf is a numpy array.
NumpyParams = dict[str, Any]
# np.float32 or ml_dtypes.bfloat16, or an instance of either's dtype.
WeightDtype = type[Any] | np.dtype[Any] | str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class SamplingDefaults:
    """What the model's makers suggest where a request says nothing; None is no suggestion."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def as_params(self) -> dict[str, float | int]:
        """Returns the suggestions by `SamplingParams` field name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelHeader:
    """A model without its weights.

    Attributes:
      name: what it is served as, if nothing else is said.
      eos_ids: the union of all sources, as far as they are ids of the model.
      quantization: how the file stores most of its weight bytes, such as "Q4_1" or "BF16".
      weight_files: where the weights are.
      known_digest: the digest, where it need not be computed.
    """

    name: str
    architecture: str
    config: ModelConfig
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    defaults: SamplingDefaults
    quantization: str
    weight_files: tuple[Path, ...]
    known_digest: str | None = None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the weights: unless it is known, reads all files, which takes a while."""
        if self.known_digest is not None:
            return self.known_digest
        whole = hashlib.sha256()
        for path in self.weight_files:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256 over the digest and all that says how the weights are run: two folders may share
        their weights alone."""
        facts = (self.config, self.tokenizer.digest, sorted(self.eos_ids), self.defaults)
        return hashlib.sha256(f"{self.digest}\0{facts!r}".encode()).hexdigest()


class ModelSource(Protocol):
    """A place that holds one model: a GGUF file, a Hugging Face folder, or a bundle of ours."""

    @property
    def path(self) -> Path: ...

    def load_header(self) -> ModelHeader:
        """Read everything but the weights.

        Raises:
          CheckpointError: something is missing, damaged or not supported.
        """
        ...

    def load_params(
        self,
        dtype: WeightDtype,
        progress: Progress | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> NumpyParams:
        """Read the weights as `abstract_params(config, dtype)` describes them, nested.

        Args:
          only: paths of the parameters that are wanted; None is all.

        Raises:
          CheckpointError: as for `load_header`.
        """
        ...


def read_sampling_defaults(settings: Mapping[str, object], where: str) -> SamplingDefaults:
    """Returns what a generation_config.json suggests; `do_sample` false is temperature 0.

    Raises:
      CheckpointError: a value is not a number, or is out of range.
    """
    found: dict[str, Any] = {}
    for name, (low, high) in DEFAULTS_RANGES.items():
        value = settings.get(name)
        if value is None:
            continue
        kinds = int if name == "top_k" else int | float
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not low <= float(str(value)) <= high:
            wanted = "a whole number" if name == "top_k" else "a number"
            raise CheckpointError(
                f"{where}: {name} is {value!r}, but must be {wanted} from {low:g} to {high:g}; "
                "correct or remove it"
            )
        found[name] = value if name == "top_k" else float(str(value))
    if settings.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingDefaults(**found)


def read_eos_ids(value: object, where: str) -> set[int]:
    """Returns the ids of an `eos_token_id`: one, a list of them, or none.

    Raises:
      CheckpointError: it is something else.
    """
    if value is None:
        return set()
    listed = value if isinstance(value, list) else [value]
    ids = {id for id in listed if isinstance(id, int) and not isinstance(id, bool) and id >= 0}
    if len(ids) != len(set(map(str, listed))):
        raise CheckpointError(f"{where}: eos_token_id is {value!r}, but must be ids; correct it")
    return ids
