"""Reads a SentencePiece model file (`tokenizer.model`): its tokens and the settings that matter.

The file is one protobuf message, `ModelProto` of sentencepiece's src/sentencepiece_model.proto;
its wire format is read here, so that the runtime needs neither the library nor generated code.
"""

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.text.vocabulary import TokenType, Vocabulary, build_vocabulary

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
BPE = 2


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class SentencePieceModel:
    """What a file says. An id is None where the vocabulary has no such token."""

    vocabulary: Vocabulary
    bos_id: int | None
    eos_id: int | None
    adds_space_prefix: bool
    removes_extra_spaces: bool


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Returns the model, if it is BPE without a normalization of its own.

    Raises:
      CheckpointError: the file is damaged, or of a kind that is not supported.
    """
    try:
        data = path.read_bytes()
        fields = list(_read_fields(data))
        pieces = [_read_piece(value) for number, value in fields if number == 1]
        trainer = _read_settings(fields, 2)
        normalizer = _read_settings(fields, 3)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    if not pieces:
        raise CheckpointError(f"{path} is not a SentencePiece model: it holds no tokens")
    kind = trainer.get(3, 1)
    if kind != BPE:
        name = MODEL_TYPES.get(kind, kind) if isinstance(kind, int) else kind
        raise CheckpointError(
            f"{path} is a SentencePiece model of the kind {name!r}; supported is BPE"
        )
    if normalizer.get(2) or not normalizer.get(5, 1) or trainer.get(24, 0):
        raise CheckpointError(
            f"{path} changes its text before encoding it (a character map, unescaped spaces, or "
            "spaces after words), which is not supported"
        )
    tokens, scores, types = zip(*pieces, strict=True)
    return SentencePieceModel(
        vocabulary=build_vocabulary(tokens, types=types, scores=scores),
        bos_id=_read_id(trainer.get(41, 1), len(tokens)),
        eos_id=_read_id(trainer.get(42, 2), len(tokens)),
        adds_space_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
    )


def _read_piece(data: int | bytes) -> tuple[str, float, int]:
    fields = dict(_read_fields(_as_bytes(data)))
    score = struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))[0]
    kind = fields.get(3, int(TokenType.NORMAL))
    if not isinstance(kind, int):
        raise ValueError("a token's type is not a number")
    return _as_bytes(fields.get(1, b"")).decode(), score, kind


def _read_settings(fields: list[tuple[int, int | bytes]], number: int) -> dict[int, int | bytes]:
    """Returns an inner message's fields; the last of several counts."""
    merged: dict[int, int | bytes] = {}
    for field, value in fields:
        if field == number:
            merged.update(_read_fields(_as_bytes(value)))
    return merged


def _read_id(value: int | bytes, num_tokens: int) -> int | None:
    """Returns an id; a vocabulary without the token says -1."""
    return value if isinstance(value, int) and value < num_tokens else None


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field; fixed-size ones as their bytes."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        sizes = {FIXED64: 8, FIXED32: 4}
        if wire_type == BYTES:
            size, position = _read_varint(data, position)
        elif wire_type in sizes:
            size = sizes[wire_type]
        else:
            raise ValueError(f"a field has the wire type {wire_type}")
        if position + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield number, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number has more than ten bytes")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a field that should be text is a number")
