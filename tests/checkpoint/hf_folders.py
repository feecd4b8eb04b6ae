"""Writes the models of tests/model/golden/hf_families.py as folders, and computes their logits."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.header import NumpyParams
from jaxserve.checkpoint.hf_config import read_model_config
from jaxserve.checkpoint.layout import hf_sources, stored_shapes
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.model.config import ModelConfig
from tests.model.golden import hf_families
from tests.model.golden.hf_families import NUM_TOKENS, TOKEN_IDS, Case
from tests.model.paged import PagedModel, run_in_chunks
from tests.text.vocabularies import byte_backend

GOLDEN = Path(hf_families.__file__).parent
# Chunks of the prompt and single tokens, in no order that the model may know.
CHUNKS = (12, 7, 5, *[1] * 16, 12, 1, 1, 6)
assert sum(CHUNKS) == NUM_TOKENS


@functools.cache
def golden_logits(name: str) -> np.ndarray:
    with np.load(GOLDEN / "hf_families.npz") as stored:
        logits: np.ndarray = stored[name]
    return logits


@functools.cache
def saved_settings() -> dict[str, dict[str, Any]]:
    """config.json of each case, as transformers saves it."""
    saved: dict[str, dict[str, Any]] = json.loads((GOLDEN / "hf_families.json").read_text())
    return saved


def case_tensors(case: Case, settings: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """The stored tensors of a case, by name."""
    settings = case.config if settings is None else settings
    config = read_model_config(settings, num_tensors=1000, where="config.json")
    shapes = stored_shapes(hf_sources(config), config)
    return {name: case.tensor(name, shape) for name, shape in shapes.items()}


def write_folder(
    folder: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray], *, num_shards: int = 1
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    byte_backend().save(str(folder / "tokenizer.json"))
    names = list(tensors)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def paged_logits(
    params: NumpyParams, config: ModelConfig, case: Case, *, attention: Impl
) -> np.ndarray:
    """The logits that are stored of a case, from our paged forward."""
    pages = list(range(3, 3 + -(-NUM_TOKENS // 4)))
    logits = run_in_chunks(
        PagedModel(params, config, kernels=Kernels(attention=attention)),
        TOKEN_IDS,
        chunks=CHUNKS,
        pages=pages,
        prompt_len=case.prompt_len,
    )
    return logits[:, :: case.columns]
