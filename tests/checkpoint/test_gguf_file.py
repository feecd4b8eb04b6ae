"""The header reader agrees with the gguf library, and survives any damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.checkpoint.gguf_file import open_gguf
from jaxserve.errors import CheckpointError
from tests.checkpoint.writers import T1, make_weights, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", T1, make_weights(T1))


def test_the_header_is_what_the_library_reads(file: Path) -> None:
    ours, theirs = open_gguf(file), gguf.GGUFReader(file)
    keys = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == keys.keys()
    for name, field in keys.items():
        value = ours.metadata[name]
        assert value == field.contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.offset == tensor.data_offset
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.type_id == tensor.tensor_type


def test_a_header_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    header_bytes = min(entry.offset for entry in open_gguf(file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(64), *range(64, header_bytes - 64, 97)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut off|cannot read|not a GGUF"):
            open_gguf(cut)


def test_random_damage_gives_a_clear_error_or_a_header(file: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = np.frombuffer(file.read_bytes(), np.uint8)[:4096]
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(300):
        damaged = whole.copy()
        damaged[rng.integers(0, whole.size, size=8)] = rng.integers(0, 256, size=8)
        broken.write_bytes(damaged.tobytes())
        try:
            open_gguf(broken)
        except CheckpointError:
            refused += 1
    assert refused > 250


def replace(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert whole.count(old) >= 1
    assert len(old) == len(new)
    return whole.replace(old, new, 1)


def test_wrong_magic_version_and_double_keys_are_refused(file: Path, tmp_path: Path) -> None:
    whole, broken = file.read_bytes(), tmp_path / "broken.gguf"
    for content, message in (
        (b"GGML" + whole[4:], "not a GGUF file: it begins with b'GGML'"),
        (whole[:4] + b"\x01\0\0\0" + whole[8:], "version 1; supported"),
        (whole[:4] + b"\0\0\0\x03" + whole[8:], "little-endian"),
        (replace(whole, b"llama.vocab_size", b"llama.rope_theta"), ""),
        (
            replace(whole, b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"),
            r"eos_token_id twice",
        ),
    ):
        broken.write_bytes(content)
        if not message:
            assert "llama.rope_theta" in open_gguf(broken).metadata
            continue
        with pytest.raises(CheckpointError, match=message):
            open_gguf(broken)


def test_a_tensor_that_is_there_twice_is_named(file: Path, tmp_path: Path) -> None:
    from jaxserve.checkpoint.gguf import GgufSource

    broken = tmp_path / "twice.gguf"
    whole = file.read_bytes()
    head, _, tail = whole.rpartition(b"blk.1.attn_v.weight")
    broken.write_bytes(head + b"blk.1.attn_k.weight" + tail)
    with pytest.raises(
        CheckpointError, match=r"twice in the file: blk\.1\.attn_k\.weight"
    ) as caught:
        GgufSource(broken).load_header()
    assert "missing: blk.1.attn_v.weight" in str(caught.value)
