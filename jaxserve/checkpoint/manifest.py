"""The manifest of a bundle: everything about a model but its weights and tokenizer, in JSON.

It is written last and signs itself, so a bundle that has one is whole as far as it goes, and no
entry of it can change unnoticed.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Literal

import pydantic

from jaxserve.checkpoint.header import SamplingDefaults
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig

MANIFEST_FILE = "manifest.json"
UNFINISHED_SUFFIX = ".converting"  # of a bundle that is being written
FORMAT_VERSION = 1
# Files up to this size are checked by SHA-256; larger ones hold arrays, which have their own sums.
SMALL_FILE_BYTES = 1 << 20
DIGEST_KEY = "manifest_digest"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TensorRecord:
    """One parameter.

    Attributes:
      part: the Orbax checkpoint that holds it, relative to the bundle.
      crc32, sha256: of its bytes; the first is checked at each load, the second after a conversion.
    """

    part: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int
    sha256: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class FileRecord:
    """One file of the bundle; `sha256` is None for a large one."""

    num_bytes: int
    sha256: str | None


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class SourceRecord:
    """What the bundle was made of, and by what."""

    files: tuple[str, ...]
    digest: str
    quantization: str
    converter: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Manifest:
    """A bundle's manifest.

    Attributes:
      dtype: of the weights; norms are float32.
      tensors: by the parameter's path.
      files: every file but the manifest, by its path in the bundle.
      weights_digest: of all tensors: equal weights in equal form have the same.
      eos_ids: the tokenizer's, which need not all be ids of the model.
    """

    format_version: int
    name: str
    dtype: Literal["float32", "bfloat16"]
    model: ModelConfig
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    weights_digest: str
    tokenizer_digest: str
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    source: SourceRecord


def digest_tensors(tensors: dict[str, TensorRecord]) -> str:
    """Returns the SHA-256 over what each parameter is, wherever it is stored."""
    lines = [[path, t.dtype, list(t.shape), t.sha256] for path, t in sorted(tensors.items())]
    return _digest(lines)


def dump_manifest(manifest: Manifest) -> str:
    """Returns the manifest's text, signed."""
    fields = sign(_adapter().dump_python(manifest, mode="json"))
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def sign(fields: dict[str, object]) -> dict[str, object]:
    """Returns a manifest's fields with the digest of them."""
    return fields | {DIGEST_KEY: _digest(fields)}


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a bundle.

    Raises:
      CheckpointError: it is damaged, was changed, or is of another version.
    """
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; convert the model again") from error
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{path}: format_version is {version!r}, but this jaxserve reads {FORMAT_VERSION}; "
            "convert the model again, or use the jaxserve that made the bundle"
        )
    if fields.pop(DIGEST_KEY, None) != _digest(fields):
        raise CheckpointError(
            f"{path} was changed or damaged after it was written: it does not have the digest it "
            "names; convert the model again"
        )
    try:
        manifest = _adapter().validate_json(json.dumps(fields), strict=True)
    except pydantic.ValidationError as error:
        faults = [f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors()]
        raise CheckpointError(f"{path}: {'; '.join(faults)}; convert the model again") from error
    if places := _find_differences(fields, _adapter().dump_python(manifest, mode="json")):
        raise CheckpointError(
            f"{path}: missing or unknown: {', '.join(places)}; convert the model again"
        )
    return manifest


def _adapter() -> pydantic.TypeAdapter[Manifest]:
    return pydantic.TypeAdapter(Manifest)


def _digest(fields: object) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _find_differences(found: object, wanted: object, where: str = "") -> list[str]:
    """Returns the keys that one of two JSON values has and the other has not."""
    places: list[str] = []
    match found, wanted:
        case dict(), dict():
            places += [f"{where}{key}" for key in sorted(found.keys() ^ wanted.keys())]
            for key in found.keys() & wanted.keys():
                places += _find_differences(found[key], wanted[key], f"{where}{key}.")
        case list(), list():
            for index, pair in enumerate(zip(found, wanted, strict=True)):
                places += _find_differences(*pair, f"{where}{index}.")
    return places
