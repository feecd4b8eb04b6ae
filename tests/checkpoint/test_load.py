"""Filling parameters block by block: every number in its place, and no more memory than that."""

import dataclasses
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoint import load
from jaxserve.checkpoint.gguf import GgufSource
from jaxserve.checkpoint.header import ModelSource
from jaxserve.checkpoint.load import StoredFile, flatten
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from jaxserve.model.aligned import ALIGNMENT_BYTES, empty_aligned
from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig
from jaxserve.model.params import num_param_bytes
from tests.checkpoint.writers import T1, make_weights, rope_of, write_gguf, write_hf

MIXTRAL = dataclasses.replace(
    T1,
    architecture="mixtral",
    layers=(LayerConfig(rope=rope_of(T1), mlp="experts"),) * 2,
    experts=ExpertsConfig(num_experts=4, num_active=2, mlp_size=40, normalize=True),
)
MIXTRAL_SETTINGS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def sources(folder: Path, config: ModelConfig = T1) -> list[ModelSource]:
    weights = make_weights(config)
    return [
        HfFolderSource(write_hf(folder / "hf", config, weights)),
        GgufSource(write_gguf(folder / "model.gguf", config, weights)),
    ]


@pytest.mark.parametrize("block", [1, 3 * 64, 40 * 64])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_size_of_a_block_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, dtype: type
) -> None:
    for source in sources(tmp_path):
        whole = flatten(source.load_params(dtype))
        monkeypatch.setattr(load, "BLOCK_ELEMENTS", block)
        monkeypatch.setattr(load, "MIN_BLOCK_ROWS", 1)
        parts = flatten(source.load_params(dtype))
        monkeypatch.undo()
        assert whole.keys() == parts.keys()
        for path, array in whole.items():
            np.testing.assert_array_equal(parts[path], array, err_msg=path)


def test_a_stored_weight_is_transposed_and_its_heads_split(tmp_path: Path) -> None:
    weights = make_weights(T1)
    params = HfFolderSource(write_hf(tmp_path / "hf", T1, weights)).load_params(np.float32)
    q_ND = weights["model.layers.1.self_attn.q_proj.weight"]
    o_DN = weights["model.layers.1.self_attn.o_proj.weight"]
    layer = params["layers"]["1"]
    np.testing.assert_array_equal(layer["q_DNH"], q_ND.reshape(8, 16, 64).transpose(2, 0, 1))
    np.testing.assert_array_equal(layer["o_NHD"], o_DN.reshape(64, 8, 16).transpose(1, 2, 0))
    np.testing.assert_array_equal(params["embedding_VD"][T1.vocab_size :], 0.0)


def test_experts_are_stacked(tmp_path: Path) -> None:
    weights = make_weights(MIXTRAL)
    folder = write_hf(tmp_path / "hf", MIXTRAL, weights, settings=MIXTRAL_SETTINGS)
    down_EFD = HfFolderSource(folder).load_params(np.float32)["layers"]["1"]["down_EFD"]
    for e in range(4):
        stored = weights[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"]
        np.testing.assert_array_equal(down_EFD[e], stored.T)


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    wanted = ["layers/1/q_DNH", "final_norm_D"]
    for source in sources(tmp_path):
        some, whole = (source.load_params(np.float32, only=only) for only in (wanted, None))
        assert flatten(some).keys() == set(wanted)
        np.testing.assert_array_equal(some["final_norm_D"], whole["final_norm_D"])


def test_a_load_holds_little_beside_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(T1, vocab_size=20_000, mlp_size=4000)
    monkeypatch.setattr(load, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(load, "MIN_BLOCK_ROWS", 16)
    for source in sources(tmp_path, config):
        source.load_header()
        source.load_params(np.float32, only=["final_norm_D"])  # imports
        tracemalloc.start()
        params = source.load_params(np.float32)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(params["layers"]) == 2
        assert peak < 1.1 * num_param_bytes(config, np.float32)


def test_parameters_are_aligned_for_the_device(tmp_path: Path) -> None:
    for source in sources(tmp_path):
        for path, array in flatten(source.load_params(np.float32)).items():
            assert array.ctypes.data % ALIGNMENT_BYTES == 0, path
    assert {empty_aligned((n,), np.dtype(np.uint8)).ctypes.data % 64 for n in range(1, 99)} == {0}


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    stored = StoredFile(path)
    assert len(stored.read(90, 10)) == 10
    with pytest.raises(CheckpointError, match=r"file ends before byte 101"):
        stored.read(90, 11)
    stored.close()
