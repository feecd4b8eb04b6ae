"""Loads a GGUF file: configuration and tokenizer from its metadata, weights to floats."""

import collections
import contextlib
import functools
from collections.abc import Collection
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.checks import check_tensors, check_vocab
from jaxserve.checkpoint.gguf_config import read_model_config
from jaxserve.checkpoint.gguf_file import GgufFile, open_gguf
from jaxserve.checkpoint.gguf_rope import divisor_shapes
from jaxserve.checkpoint.gguf_tensor import (
    check_stored_types,
    find_storage_problems,
    num_stored_bytes,
    read_tensor,
    type_name,
)
from jaxserve.checkpoint.gguf_tokenizer import read_tokenizer
from jaxserve.checkpoint.header import (
    ModelHeader,
    NumpyParams,
    Progress,
    SamplingDefaults,
    WeightDtype,
)
from jaxserve.checkpoint.layout import StoredPart, gguf_sources, stored_shapes
from jaxserve.checkpoint.load import StoredFile, load_all
from jaxserve.model.config import ModelConfig

# Families whose q and k rows llama.cpp reorders.
PERMUTED_ARCHITECTURES = frozenset({"llama"})
PERMUTED_PARAMS = frozenset({"q_DNH", "k_DKH", "q_bias_NH", "k_bias_KH"})


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

    def load_params(
        self,
        dtype: WeightDtype,
        progress: Progress | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> NumpyParams:
        """Returns the weights, decoded in float32 and then rounded to `dtype`."""
        config, file = self._config, self._file
        sources = gguf_sources(config)

        with contextlib.closing(StoredFile(self.path)) as stored:

            def read(path: str, part: StoredPart, rows: tuple[int, int]) -> np.ndarray:
                values = read_tensor(stored.read, file.tensors[part.name], rows=rows)
                return unpermute(values, path, config)

            return load_all(
                config,
                dtype,
                sources=sources,
                read=read,
                num_bytes=lambda part: num_stored_bytes(file.tensors[part.name], part.rows),
                progress=progress,
                only=only,
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
            stored_shapes(gguf_sources(config), config) | divisor_shapes(self._file, config),
            where=str(self.path),
            other_problems=find_storage_problems(self._file),
        )
        return config


def unpermute(stored: np.ndarray, path: str, config: ModelConfig) -> np.ndarray:
    """Returns rows of whole heads in Hugging Face's order.

    For llama, llama.cpp's converter stores the rows of a head of q or k with its two halves
    interleaved, since its RoPE turns neighbours: 0 1 2 3 becomes 0 2 1 3 for a head of four.
    `LlamaModel.permute` in convert_hf_to_gguf.py. Other families are stored as they are.
    """
    leaf = path.rpartition("/")[2]
    if config.architecture not in PERMUTED_ARCHITECTURES or leaf not in PERMUTED_PARAMS:
        return stored
    split = stored.reshape(-1, config.head_dim // 2, 2, *stored.shape[1:])
    return split.swapaxes(1, 2).reshape(stored.shape)
