"""The stored types of GGUF tensors, and how their bytes become floats."""

from collections.abc import Callable

import numpy as np

from jaxserve.checkpoint.gguf_file import GgufFile, TensorEntry
from jaxserve.errors import CheckpointError

# Returns bytes of a file: their offset and how many.
ReadBytes = Callable[[int, int], np.ndarray]

# By ggml_type: name, elements of a block, bytes of a block.
STORED_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# What else a reader may be asked for, so that it can be refused by name.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip
# Elements decoded at a time: whole blocks of every type, and the library's temporary arrays, some
# ten times the result, stay in the processor's cache. Larger pieces take up to four times as long.
PIECE_ELEMENTS = 1 << 18


def type_name(type_id: int) -> str:
    """Returns the name of a ggml_type."""
    if type_id in STORED_TYPES:
        return STORED_TYPES[type_id][0]
    return OTHER_TYPES.get(type_id, f"type {type_id}")


def num_stored_bytes(entry: TensorEntry, rows: tuple[int, int] | None = None) -> int:
    """Returns the bytes of a tensor in the file, or of its rows [first, end)."""
    _, block_size, block_bytes = STORED_TYPES[entry.type_id]
    num_elements = entry.num_elements
    if rows is not None:
        num_elements = num_elements // entry.shape[0] * (rows[1] - rows[0])
    return num_elements // block_size * block_bytes


def check_stored_types(file: GgufFile) -> None:
    """Refuse quantizations that are not supported, all by name.

    Raises:
      CheckpointError: names them and an example of each.
    """
    unknown = {
        type_name(entry.type_id): entry.name
        for entry in file.tensors.values()
        if entry.type_id not in STORED_TYPES
    }
    if unknown:
        found = ", ".join(f"{kind} ({name})" for kind, name in sorted(unknown.items()))
        supported = ", ".join(sorted(name for name, _, _ in STORED_TYPES.values()))
        raise CheckpointError(
            f"{file.path} stores tensors as {found}, which is not supported; supported are "
            f"{supported}; take another quantization of the model"
        )


def find_storage_problems(file: GgufFile) -> list[str]:
    """Returns what is wrong with the table itself: double names or places, bytes not there."""
    problems = [f"twice in the file: {', '.join(file.duplicates)}"] if file.duplicates else []
    cut = []
    before, end = "", file.data_start
    for entry in sorted(file.tensors.values(), key=lambda entry: entry.offset):
        wanted = -(-end // file.alignment) * file.alignment
        if entry.offset != wanted:
            kind = "overlaps" if entry.offset < wanted else "leaves a gap after"
            problems.append(f"{entry.name} {kind} {before or 'the header'}")
        before, end = entry.name, entry.offset + num_stored_bytes(entry)
        _, block_size, _ = STORED_TYPES[entry.type_id]
        if entry.shape and entry.shape[-1] % block_size:
            problems.append(f"{entry.name} has rows of {entry.shape[-1]}, not whole blocks")
        if end > len(file.buffer):
            cut.append(entry.name)
    if cut:
        problems.append(f"cut off, the file has only {len(file.buffer)} bytes: {', '.join(cut)}")
    return problems


def read_tensor(
    read: ReadBytes, entry: TensorEntry, *, rows: tuple[int, int] | None = None
) -> np.ndarray:
    """Returns a tensor's values in float32, [out, in] as stored.

    Args:
      rows: [first, end) of the first dimension; None is all.
    """
    first, end = rows or (0, entry.shape[0])
    row_bytes = num_stored_bytes(entry, (0, 1))
    stored = read(entry.offset + first * row_bytes, (end - first) * row_bytes)
    return decode(stored, entry.type_id).reshape(end - first, *entry.shape[1:])


def decode(stored: np.ndarray, type_id: int) -> np.ndarray:
    """Returns the values of whole blocks, flat, in float32; a view where they are stored so."""
    from gguf import GGMLQuantizationType  # a third of a second that a header need not pay
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(type_id)
    if kind is GGMLQuantizationType.F32:
        return stored.view(np.float32)
    _, block_size, block_bytes = STORED_TYPES[type_id]
    piece_bytes = PIECE_ELEMENTS // block_size * block_bytes
    values = np.empty(len(stored) // block_bytes * block_size, np.float32)
    for index, start in enumerate(range(0, len(values), PIECE_ELEMENTS)):
        piece = stored[index * piece_bytes : (index + 1) * piece_bytes]
        into = values[start : start + PIECE_ELEMENTS]
        if kind is GGMLQuantizationType.Q8_0:
            _decode_q8_0(piece, into)
        else:
            into[:] = dequantize(piece[None, :], kind)[0]
    return values


def _decode_q8_0(stored: np.ndarray, values: np.ndarray) -> None:
    """Does what the library does, in one pass instead of four: a file loads in two thirds of the
    time. A block is a float16 scale and 32 signed bytes."""
    blocks = stored.reshape(-1, 34)
    scales = blocks[:, :2].view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale
        np.multiply(blocks[:, 2:].view(np.int8), scales, out=values.reshape(-1, 32))
