"""Reads the header of a safetensors file: where each tensor lies, and what is wrong with it.

The format is eight bytes of length, that many of JSON, and the tensors without gaps:
https://github.com/huggingface/safetensors#format. The library's own reader maps the file, which
leaves it all in the process's memory, and names no tensor of a file that is cut off.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError

STORED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      dtype: as the file names it; those of STORED_DTYPES can be read.
      offset: of its first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class FileTable:
    """A file's tensors by name, and what is wrong with them, each by name."""

    tensors: dict[str, StoredTensor]
    problems: list[str]


def read_file_table(path: Path) -> FileTable:
    """Returns the tensors of a file; nothing of them is read.

    Raises:
      CheckpointError: the file cannot be read, or is not safetensors at all.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            start = file.read(LENGTH.size)
            header_bytes = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else None
            if header_bytes is None or header_bytes > min(
                MAX_HEADER_BYTES, file_bytes - LENGTH.size
            ):
                raise CheckpointError(
                    f"{path} has {file_bytes} bytes, which is less than its header says; it is cut "
                    "off or damaged, get it again"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; get it again") from error
    entries, problems = _read_header(text, path)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        tensor = _read_entry(entry, path, LENGTH.size + header_bytes)
        if tensor is None:
            problems.append(f"{name} has no sound entry in the header of {path.name}")
        else:
            tensors[name] = tensor
    if len(tensors) == len(entries):
        problems += _check_places(tensors, path, LENGTH.size + header_bytes, file_bytes)
    return FileTable(tensors=tensors, problems=problems)


def _read_header(text: bytes, path: Path) -> tuple[dict[str, object], list[str]]:
    """Returns the header's entries, and the names it holds twice as problems."""
    twice: list[str] = []

    def build(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return built

    try:
        entries = json.loads(text, object_pairs_hook=build)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read the header of {path}: {error}; the file is damaged, get it again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"the header of {path} is no JSON object; get the file again")
    entries.pop("__metadata__", None)
    return entries, [f"{name} is twice in {path.name}" for name in twice]


def _read_entry(entry: object, path: Path, data_offset: int) -> StoredTensor | None:
    """Returns a tensor's place; None where the entry makes no sense."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(end)]}:
            if not all(isinstance(size, int) and 0 <= size < 1 << 48 for size in shape):
                return None
            known = STORED_DTYPES.get(dtype)
            wanted = known.itemsize * math.prod(shape) if known else end - first
            if first < 0 or end < first or end - first != wanted:
                return None
            return StoredTensor(
                file=path,
                shape=tuple(shape),
                dtype=dtype,
                offset=data_offset + first,
                num_bytes=end - first,
            )
    return None


def _check_places(
    tensors: dict[str, StoredTensor], path: Path, data_offset: int, file_bytes: int
) -> list[str]:
    """Returns what is wrong where tensors do not fill the file, one behind the other."""
    problems, end, before = [], data_offset, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            kind = "overlaps" if tensor.offset < end else "leaves a gap after"
            problems.append(f"{name} {kind} {before or 'the header'} in {path.name}")
        end, before = tensor.offset + tensor.num_bytes, name
    cut = [
        name for name, tensor in tensors.items() if tensor.offset + tensor.num_bytes > file_bytes
    ]
    if cut:
        problems.append(
            f"{path.name} is cut off at byte {file_bytes}, in or before {', '.join(cut)}"
        )
    elif end < file_bytes and not problems:
        problems.append(f"{path.name} has {file_bytes - end} bytes behind its last tensor")
    return problems
