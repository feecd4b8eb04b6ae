"""The served tokenizer as a zip of files, for a gateway that tokenizes itself."""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from typing import Final

from smg_grpc_proto.generated import common_pb2

from jaxserve.engine.served_model import ServedModel
from jaxserve.text.tokenizer import Tokenizer

CHUNK_BYTES: Final = 64 << 10


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TokenizerBundle:
    """A whole archive and its SHA-256."""

    archive: bytes
    sha256: str

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yields the archive in pieces; the last has the digest."""
        num_bytes = len(self.archive)
        for first in range(0, num_bytes, CHUNK_BYTES):
            is_last = first + CHUNK_BYTES >= num_bytes
            yield common_pb2.GetTokenizerChunk(
                data=self.archive[first : first + CHUNK_BYTES],
                sha256=self.sha256 if is_last else "",
            )


def build_bundle(tokenizer: Tokenizer, model: ServedModel) -> TokenizerBundle:
    """Returns the tokenizer that is served, with its chat template, wherever it was read from."""
    files = tokenizer.as_files() | {
        "config.json": _dump(_describe(model)),
        "generation_config.json": _dump({**_ids(model), **model.sampling_defaults}),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in sorted(files.items()):
            # without a date of its own: the same tokenizer has the same digest anywhere
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return TokenizerBundle(archive=content, sha256=hashlib.sha256(content).hexdigest())


def _describe(model: ServedModel) -> dict[str, object]:
    facts: dict[str, object] = {
        "max_position_embeddings": model.max_model_tokens,
        "vocab_size": model.vocab_size,
        **_ids(model),
    }
    if model.architecture:
        facts["model_type"] = model.architecture
    return facts


def _ids(model: ServedModel) -> dict[str, object]:
    ids: dict[str, object] = {"eos_token_id": sorted(model.eos_ids)}
    if model.bos_id is not None:
        ids["bos_token_id"] = model.bos_id
    return ids


def _dump(value: dict[str, object]) -> str:
    return json.dumps(value, indent=1, sort_keys=True)
