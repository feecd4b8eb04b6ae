"""Loads a GGUF file: configuration and tokenizer from its metadata, weights to floats."""

import collections
import functools
import mmap
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.gguf_config import read_model_config
from jaxserve.checkpoint.gguf_file import GgufFile, TensorEntry, open_gguf
from jaxserve.checkpoint.gguf_tokenizer import read_tokenizer
from jaxserve.checkpoint.header import (
    ModelHeader,
    NumpyParams,
    Progress,
    SamplingDefaults,
    WeightDtype,
)
from jaxserve.checkpoint.layout import (
    check_tensors,
    check_vocab,
    gguf_sources,
    join_parts,
    stored_shapes,
)
from jaxserve.checkpoint.load import load_all
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig

# By ggml_type: name, elements of a block, bytes of a block.
STORED_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
MIN_BLOCKS = 512
# What else a reader may be asked for, so that it can be refused by name.
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# Parameters whose rows llama.cpp reorders, with the field that counts their heads.
PERMUTED_HEADS = {
    "q_DNH": "num_heads",
    "k_DKH": "num_kv_heads",
    "q_bias_NH": "num_heads",
    "k_bias_KH": "num_kv_heads",
}


class GgufSource:
    """One GGUF file. The header is parsed once and kept."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._name = name or path.stem

    def load_header(self) -> ModelHeader:
        """Returns the model without weights.

        Raises:
          CheckpointError: the file is damaged, or is a kind of model that is not supported.
        """
        config = self._config
        tokenizer = read_tokenizer(self._file)
        eos_ids = check_vocab(config, tokenizer, str(self.path))
        counts: collections.Counter[str] = collections.Counter()
        for entry in self._file.tensors.values():
            counts[type_name(entry.type_id)] += num_stored_bytes(entry)
        return ModelHeader(
            name=self._name,
            architecture=config.architecture,
            config=config,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            defaults=SamplingDefaults(),
            quantization=counts.most_common(1)[0][0],
            weight_files=(self.path,),
        )

    def load_params(self, dtype: WeightDtype, progress: Progress | None = None) -> NumpyParams:
        """Returns the weights, dequantized in float32 and then brought to `dtype`."""
        config, file = self._config, self._file
        sources = gguf_sources(config)

        def read(path: str) -> np.ndarray:
            stored = join_parts(
                sources[path], lambda name: read_tensor(file.buffer, file.tensors[name])
            )
            heads = PERMUTED_HEADS.get(path.rpartition("/")[2])
            return unpermute(stored, getattr(config, heads)) if heads else stored

        return load_all(
            config,
            dtype,
            read=read,
            num_bytes=lambda path: sum(
                num_stored_bytes(file.tensors[part.name]) for part in sources[path]
            ),
            progress=progress,
        )

    @functools.cached_property
    def _file(self) -> GgufFile:
        return open_gguf(self.path)

    @functools.cached_property
    def _config(self) -> ModelConfig:
        config = read_model_config(self._file)
        check_stored_types(self._file)
        check_tensors(
            {name: entry.shape for name, entry in self._file.tensors.items()},
            stored_shapes(gguf_sources(config), config),
            where=str(self.path),
            other_problems=_storage_problems(self._file),
        )
        return config


def type_name(type_id: int) -> str:
    """Returns the name of a ggml_type."""
    if type_id in STORED_TYPES:
        return STORED_TYPES[type_id][0]
    return OTHER_TYPES.get(type_id, f"type {type_id}")


def num_stored_bytes(entry: TensorEntry) -> int:
    """Returns the bytes of a tensor in the file."""
    _, block_size, block_bytes = STORED_TYPES[entry.type_id]
    return entry.num_elements // block_size * block_bytes


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


def _storage_problems(file: GgufFile) -> list[str]:
    """Returns what is wrong with the table itself: double names, broken rows, bytes not there."""
    problems = [f"twice in the file: {', '.join(file.duplicates)}"] if file.duplicates else []
    cut = []
    for entry in file.tensors.values():
        _, block_size, _ = STORED_TYPES[entry.type_id]
        if entry.shape and entry.shape[-1] % block_size:
            problems.append(f"{entry.name} has rows of {entry.shape[-1]}, not whole blocks")
        if entry.offset + num_stored_bytes(entry) > len(file.buffer):
            cut.append(entry.name)
    if cut:
        problems.append(f"cut off, the file has only {len(file.buffer)} bytes: {', '.join(cut)}")
    return problems


def read_tensor(buffer: mmap.mmap | bytes, entry: TensorEntry) -> np.ndarray:
    """Returns a tensor's values in float32, [out, in] as stored."""
    from gguf import GGMLQuantizationType  # a third of a second that a header need not pay
    from gguf.quants import dequantize

    stored = np.frombuffer(buffer, np.uint8, num_stored_bytes(entry), entry.offset)
    kind = GGMLQuantizationType(entry.type_id)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return dequantize(stored, kind).reshape(entry.shape)
    return dequantize(stored.reshape(_num_pieces(entry), -1), kind).reshape(entry.shape)


def _num_pieces(entry: TensorEntry) -> int:
    """Returns into how many equal pieces of whole blocks a tensor is cut for the library.

    It decodes 16 rows at a time, which for short rows is all overhead: rows of about MIN_BLOCKS
    blocks, whatever the tensor's own rows are, take a third less time. Blocks do not depend on
    each other, so the values are the same.
    """
    _, block_size, _ = STORED_TYPES[entry.type_id]
    num_blocks, pieces = entry.num_elements // block_size, 1
    while num_blocks % (2 * pieces) == 0 and num_blocks // (2 * pieces) >= MIN_BLOCKS:
        pieces *= 2
    return pieces


def unpermute(stored: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns q or k rows in Hugging Face's order.

    llama.cpp's converter stores a head's rows with its two halves interleaved, since its RoPE turns
    neighbours: 0 1 2 3 becomes 0 2 1 3 for a head of four. `LlamaModel.permute` in
    convert_hf_to_gguf.py; k has its own, smaller number of heads.
    """
    half = stored.shape[0] // num_heads // 2
    split = stored.reshape(num_heads, half, 2, *stored.shape[1:])
    return split.swapaxes(1, 2).reshape(stored.shape)
