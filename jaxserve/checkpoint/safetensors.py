"""Loads a Hugging Face folder: config.json and safetensors files."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.checks import check_tensors, check_vocab
from jaxserve.checkpoint.header import (
    ModelHeader,
    NumpyParams,
    Progress,
    WeightDtype,
    read_eos_ids,
    read_sampling_defaults,
)
from jaxserve.checkpoint.hf_config import read_model_config
from jaxserve.checkpoint.layout import StoredPart, hf_sources, stored_shapes
from jaxserve.checkpoint.load import StoredFile, load_all
from jaxserve.checkpoint.names import HF_EMBEDDING, HF_HEAD
from jaxserve.checkpoint.safetensors_file import (
    STORED_DTYPES,
    FileTable,
    StoredTensor,
    read_file_table,
)
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ModelConfig
from jaxserve.text.hf_folder import load_tokenizer, read_json_object

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAME_LEN = 200  # bytes; systems refuse to look at a name of more than 255 bytes
COMPARED_BYTES = 1 << 22
# Old checkpoints store the RoPE table, which follows from rope_theta.
DERIVED_TENSORS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class HfFolderSource:
    """One model folder. Its configuration and tensor table are read once and kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load_header(self) -> ModelHeader:
        """Returns the model without weights.

        EOS is the union of generation_config.json, config.json, the tokenizer's eos_token, and the
        end-of-turn token the chat template writes.

        Raises:
          CheckpointError: a file is missing, damaged, or of a kind that is not supported.
        """
        generation = read_json_object(self.path / "generation_config.json")
        where = str(self.path / "generation_config.json")
        named = read_eos_ids(generation.get("eos_token_id"), where)
        named |= read_eos_ids(self._settings.get("eos_token_id"), str(self.path / "config.json"))
        tokenizer = load_tokenizer(self.path, eos_ids=named)
        config = self._config
        eos_ids = check_vocab(config, tokenizer, str(self.path))
        counts = collections.Counter(tensor.dtype for tensor in self._tensors.values())
        return ModelHeader(
            name=self.path.resolve().name,
            architecture=config.architecture,
            config=config,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            defaults=read_sampling_defaults(generation, where),
            quantization=counts.most_common(1)[0][0],
            weight_files=tuple(sorted({tensor.file for tensor in self._tensors.values()})),
        )

    def load_params(
        self,
        dtype: WeightDtype,
        progress: Progress | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> NumpyParams:
        """Returns the weights in `dtype`, read a few rows at a time."""
        config, tensors = self._config, self._tensors
        sources = hf_sources(config)
        with contextlib.ExitStack() as stack:
            files = {
                file: stack.enter_context(contextlib.closing(StoredFile(file)))
                for file in {
                    tensors[part.name].file for parts in sources.values() for part in parts
                }
            }

            def read(path: str, part: StoredPart, rows: tuple[int, int]) -> np.ndarray:
                tensor = tensors[part.name]
                return read_rows(files[tensor.file], tensor, rows)

            return load_all(
                config,
                dtype,
                sources=sources,
                read=read,
                num_bytes=lambda part: num_part_bytes(tensors[part.name], part),
                progress=progress,
                only=only,
            )

    @functools.cached_property
    def _settings(self) -> dict[str, object]:
        return read_json_object(self.path / "config.json")

    @functools.cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return {
            name: tensor
            for name, tensor in _read_table(self.path).items()
            if not DERIVED_TENSORS.fullmatch(name)
        }

    @functools.cached_property
    def _config(self) -> ModelConfig:
        where = str(self.path / "config.json")
        config = read_model_config(self._settings, num_tensors=len(self._tensors), where=where)
        config = dataclasses.replace(config, tied_head=self._decide_tied(config))
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        if config.tied_head:
            found.pop(HF_HEAD, None)  # it equals the embedding
        wanted = stored_shapes(hf_sources(config), config)
        dtypes = sorted(
            f"{name} is {tensor.dtype}, supported are {', '.join(STORED_DTYPES)}"
            for name, tensor in self._tensors.items()
            if tensor.dtype not in STORED_DTYPES
        )
        hints = []
        if HF_HEAD not in found and not config.tied_head:
            hints.append(
                f"config.json says that {HF_HEAD} is not the embedding, set tie_word_embeddings to "
                "true if it is"
            )
        check_tensors(found, wanted, where=str(self.path), other_problems=dtypes + hints)
        return config

    def _decide_tied(self, config: ModelConfig) -> bool:
        """Returns whether the head is the embedding: the tensors decide, then the flag.

        A head that is there and differs is used whatever the flag says; one that equals the
        embedding is not loaded twice if the flag says tied. Without a head the flag must say tied.
        """
        head, embedding = self._tensors.get(HF_HEAD), self._tensors.get(HF_EMBEDDING)
        if head is None or embedding is None or not config.tied_head:
            return config.tied_head
        same_form = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
        if same_form and _are_equal(head, embedding):
            return True
        logger.warning(
            "%s: config.json says that the head is the embedding, but %s differs; it is used",
            self.path,
            HF_HEAD,
        )
        return False


def num_part_bytes(tensor: StoredTensor, part: StoredPart) -> int:
    """Returns the bytes of a part, which may be some rows of its tensor."""
    if part.rows is None:
        return tensor.num_bytes
    return tensor.num_bytes // tensor.shape[0] * (part.rows[1] - part.rows[0])


def read_rows(file: StoredFile, tensor: StoredTensor, rows: tuple[int, int]) -> np.ndarray:
    """Returns rows [first, end) of a tensor as they are stored."""
    first, end = rows
    dtype = STORED_DTYPES[tensor.dtype]
    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    read = file.read(tensor.offset + first * row_bytes, (end - first) * row_bytes)
    rows_read: np.ndarray = read.view(dtype).reshape(end - first, *tensor.shape[1:])
    return rows_read


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors hold the same bytes."""
    with (
        contextlib.closing(StoredFile(one.file)) as one_file,
        contextlib.closing(StoredFile(other.file)) as other_file,
    ):
        for first in range(0, one.num_bytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.num_bytes - first)
            pieces = (
                one_file.read(one.offset + first, size),
                other_file.read(other.offset + first, size),
            )
            if not np.array_equal(*pieces):
                return False
    return True


def _read_table(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor the folder's index lists, or its only file holds.

    The index rules, both ways: a file it does not name is not looked at, and each file it names
    must hold exactly the tensors it lists for it.

    Raises:
      CheckpointError: files or tensors are missing, left over, or in two files.
    """
    if not (folder / INDEX_FILE).is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise CheckpointError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; give a folder with "
                "safetensors weights (other formats are not supported)"
            )
        return _checked({SINGLE_FILE: read_file_table(folder / SINGLE_FILE)}, [], folder)
    listed = _read_index(folder)
    by_file: dict[str, set[str]] = {}
    for name, file in listed.items():
        by_file.setdefault(file, set()).add(name)
    absent = sorted(file for file in by_file if not (folder / file).is_file())
    problems = [f"{file} is missing, with {', '.join(sorted(by_file[file]))}" for file in absent]
    tables = {file: read_file_table(folder / file) for file in sorted(by_file.keys() - set(absent))}
    for file, table in tables.items():
        held = table.tensors.keys()
        problems += [f"{name} is not in {file}" for name in sorted(by_file[file] - held)]
        for name in sorted(held - by_file[file]):
            other = listed.get(name)
            fault = f"in {file} and {other}" if other else f"in {file}, but not listed"
            problems.append(f"{name} is {fault}")
    return _checked(tables, problems, folder)


def _checked(
    tables: dict[str, FileTable], problems: list[str], folder: Path
) -> dict[str, StoredTensor]:
    """Returns the tensors of all files; refuses them if anything is wrong with one."""
    problems = problems + [problem for table in tables.values() for problem in table.problems]
    if problems:
        raise CheckpointError(
            f"the weights of {folder} are not whole: {'; '.join(problems)}; get the folder again"
        )
    return {name: tensor for table in tables.values() for name, tensor in table.tensors.items()}


def _read_index(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor; file names must stay inside the folder."""
    weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; get the file again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or len(file.encode()) > MAX_NAME_LEN
        ):
            raise CheckpointError(
                f"{folder / INDEX_FILE}: the file of {name} is {file!r:.80}, but must be a plain "
                "name"
            )
    return weight_map
