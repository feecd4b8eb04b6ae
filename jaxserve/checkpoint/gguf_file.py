"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

The `gguf` library's reader makes several objects for every string and takes two seconds for a
vocabulary of 49,152 tokens; this one takes a twentieth of that and checks every length against the
file, which may be cut off. Weights are decoded by the library. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path

import numpy as np

from jaxserve.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY = 8, 9
# struct code and numpy dtype of the scalar value types, by id.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
Value = bool | int | float | str | list[str] | list[bool] | list[int] | list[float]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the table.

    Attributes:
      type_id: `ggml_type`.
      shape: row-major, so the file's order reversed.
      offset: of its first byte in the file.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(slots=True, kw_only=True)
class GgufFile:
    """A file's header, and its bytes as a map.

    Attributes:
      duplicates: names that the table holds twice.
      data_start: where the first tensor lies; each next one at the first multiple of `alignment`.
    """

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorEntry]
    duplicates: list[str]
    data_start: int
    alignment: int
    buffer: mmap.mmap


def open_gguf(path: Path) -> GgufFile:
    """Returns the header of a GGUF file.

    Raises:
      CheckpointError: the file cannot be read, is not GGUF, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(
            f"cannot read {path} as a GGUF file: {error}; give a whole .gguf file"
        ) from error
    cursor = _Cursor(buffer, path)
    if buffer[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {buffer[:4]!r}")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path} is GGUF version {version}; supported are little-endian versions 2 and 3; "
            "convert it again with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path} holds the key {key} twice; the file is damaged")
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [cursor.tensor_entry() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}, but must be a power of 2")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    duplicates = []
    for entry in entries:
        if entry.name in tensors:
            duplicates.append(entry.name)
        tensors[entry.name] = dataclasses.replace(entry, offset=start + entry.offset)
    return GgufFile(
        path=path,
        metadata=metadata,
        tensors=tensors,
        duplicates=duplicates,
        data_start=start,
        alignment=alignment,
        buffer=buffer,
    )


class _Cursor:
    """Walks over the header; every read is checked against the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer, self._path, self._size = buffer, path, len(buffer)
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._size:
            raise CheckpointError(
                f"{self._path} is cut off or damaged: its header goes on to byte {end}, but the "
                f"file has {self._size}; get it again"
            )
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value  # type: ignore[no-any-return]  # the callers' codes are all integers

    def string(self) -> str:
        text = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path} holds a text that is not UTF-8: {text[:40]!r}; the file is damaged"
            ) from error

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _array(self) -> Value:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            return [self.string() for _ in range(length)]
        dtype = np.dtype(self._code(kind)).newbyteorder("<")
        # a list, not an array: comparing it with a wanted value must say yes or no
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise CheckpointError(
                f"{self._path} holds a value of the unknown type {kind}; the file is damaged"
            )
        return SCALARS[kind]

    def tensor_entry(self) -> TensorEntry:
        name = self.string()
        num_dims = self.scalar("I")
        if num_dims > MAX_DIMS:
            raise CheckpointError(
                f"{self._path}: the tensor {name} has {num_dims} dimensions, more than {MAX_DIMS}"
            )
        dims = [self.scalar("Q") for _ in range(num_dims)]
        type_id, offset = self.scalar("I"), self.scalar("Q")
        return TensorEntry(name=name, type_id=type_id, shape=tuple(reversed(dims)), offset=offset)
