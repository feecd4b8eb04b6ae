"""Every stored type decodes as the gguf library does, whole, by rows and in pieces (CASES C57)."""

import mmap
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxserve.checkpoint import gguf_tensor
from jaxserve.checkpoint.gguf_file import TensorEntry, open_gguf
from jaxserve.checkpoint.gguf_tensor import (
    STORED_TYPES,
    ReadBytes,
    decode,
    num_stored_bytes,
    read_tensor,
    type_name,
)

NUM_ROWS = 7
PADDING = b"12345"  # tensors may lie at any byte of what is read here


def random_tensor(type_id: int, *, seed: int = 0) -> tuple[bytes, TensorEntry, np.ndarray]:
    """Random bytes of an odd number of rows of three blocks, and what the library decodes."""
    _, block_size, block_bytes = STORED_TYPES[type_id]
    row_len = 3 * max(block_size, 32)
    num_bytes = row_len // block_size * block_bytes
    rng = np.random.default_rng([type_id, seed])
    stored = rng.integers(0, 256, size=(NUM_ROWS, num_bytes), dtype=np.uint8)
    entry = TensorEntry(name="t", type_id=type_id, shape=(NUM_ROWS, row_len), offset=len(PADDING))
    with np.errstate(all="ignore"):  # random scales may be inf or nan
        wanted = gguf.quants.dequantize(stored, Kind(type_id)).reshape(entry.shape)
    return PADDING + stored.tobytes(), entry, wanted


def read_from(buffer: bytes | mmap.mmap) -> ReadBytes:
    return lambda offset, num_bytes: np.frombuffer(buffer, np.uint8, num_bytes, offset)


def same_bits(ours: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bit for bit, but for what a NaN carries."""
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(wanted))
    is_number = ~np.isnan(wanted)
    bits = {2: np.uint16, 4: np.uint32}[ours.dtype.itemsize]
    np.testing.assert_array_equal(ours[is_number].view(bits), wanted[is_number].view(bits))


@pytest.mark.parametrize("type_id", STORED_TYPES)
@pytest.mark.parametrize("piece", [None, 256, 512])
def test_random_bytes_decode_as_the_reference_does(
    type_id: int, piece: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if piece is not None:  # so small that a tensor is several pieces, the last one cut
        monkeypatch.setattr(gguf_tensor, "PIECE_ELEMENTS", piece)
    buffer, entry, wanted = random_tensor(type_id)
    assert num_stored_bytes(entry) == len(buffer) - len(PADDING)
    with np.errstate(all="ignore"):
        same_bits(read_tensor(read_from(buffer), entry), wanted)


@pytest.mark.parametrize("type_id", STORED_TYPES)
def test_the_table_of_types_is_the_librarys(type_id: int) -> None:
    name, block_size, block_bytes = STORED_TYPES[type_id]
    assert Kind(type_id).name == name == type_name(type_id)
    assert gguf.GGML_QUANT_SIZES[Kind(type_id)] == (block_size, block_bytes)


@pytest.mark.parametrize("type_id", STORED_TYPES)
def test_rows_of_a_tensor_are_read_alone(type_id: int) -> None:
    buffer, entry, wanted = random_tensor(type_id)
    for rows in ((0, 3), (3, 4), (2, 7)):
        assert num_stored_bytes(entry, rows) * 7 == num_stored_bytes(entry) * (rows[1] - rows[0])
        with np.errstate(all="ignore"):
            same_bits(read_tensor(read_from(buffer), entry, rows=rows), wanted[rows[0] : rows[1]])


@pytest.mark.parametrize(("kind", "smallest_normal"), [(Kind.F16, 2**-14), (Kind.BF16, 2**-126)])
def test_every_half_number_decodes_exactly(kind: Kind, smallest_normal: float) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)  # subnormals, zeros of both signs, infinities
    entry = TensorEntry(name="t", type_id=kind, shape=(1 << 8, 1 << 8), offset=0)
    dtype = np.float16 if kind is Kind.F16 else np.dtype(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        wanted = every.view(dtype).astype(np.float32).reshape(entry.shape)
    assert np.count_nonzero((wanted != 0) & (np.abs(wanted) < smallest_normal)) > 200
    same_bits(read_tensor(read_from(every.tobytes()), entry), wanted)


def test_memory_stays_near_the_results_size() -> None:
    stored = np.zeros((1 << 23) // 256 * 210, np.uint8)
    tracemalloc.start()
    values = decode(stored, Kind.Q6_K)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.size == 1 << 23
    assert peak < 1.2 * values.nbytes


@pytest.mark.parametrize("alignment", [None, 64])
def test_offsets_follow_the_alignment(tmp_path: Path, alignment: int | None) -> None:
    path, wanted = tmp_path / "m.gguf", {}
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for type_id in STORED_TYPES:
        buffer, _, values = random_tensor(type_id)
        stored = np.frombuffer(buffer, np.uint8, offset=len(PADDING)).reshape(NUM_ROWS, -1)
        writer.add_tensor(
            type_name(type_id), stored, raw_shape=stored.shape, raw_dtype=Kind(type_id)
        )
        wanted[type_name(type_id)] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    for name, values in wanted.items():
        assert file.tensors[name].shape == values.shape, name
        assert file.tensors[name].offset % (alignment or 32) == 0
        with np.errstate(all="ignore"):
            same_bits(read_tensor(read_from(file.buffer), file.tensors[name]), values)
