"""Damaged folders of families with fused tensors and with experts, and heads (C50, C55)."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from tests.checkpoint.hf_folders import case_tensors, golden_logits, write_folder
from tests.model.golden.hf_families import CASES, TOKEN_IDS
from tests.oracle import oracle_logits

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# A tensor of each kind that a family has and a Llama has not.
TENSORS = {
    "phi3": ["model.layers.1.self_attn.qkv_proj.weight", "model.layers.2.mlp.gate_up_proj.weight"],
    "mixtral": [
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
    ],
    "qwen3_moe": ["model.layers.2.mlp.experts.4.up_proj.weight"],
    "gemma3": ["model.layers.3.pre_feedforward_layernorm.weight"],
    "olmo2": ["model.layers.0.self_attn.q_norm.weight"],
}
PLACES = [(family, name) for family, names in TENSORS.items() for name in names]


def write(folder: Path, family: str, *, num_shards: int = 3) -> Path:
    case = CASES[family]
    return write_folder(folder, case.config, case_tensors(case), num_shards=num_shards)


def shard_of(folder: Path, name: str) -> Path:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / str(weight_map[name])


def rewrite(
    folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
) -> None:
    """Change the tensors of the file that holds one."""
    path = shard_of(folder, name)
    save_file(change(load_file(path)), path)


def delete_the_shard(folder: Path, name: str) -> str:
    shard_of(folder, name).unlink()
    return name


def cut_the_shard(folder: Path, name: str) -> str:
    path = shard_of(folder, name)
    path.write_bytes(path.read_bytes()[:-8])
    return path.name


def rename(folder: Path, name: str) -> str:
    rewrite(folder, name, lambda held: held | {name + "x": held.pop(name)})
    return f"{name}x is in"


def leave_out(folder: Path, name: str) -> str:
    rewrite(folder, name, lambda held: {key: held[key] for key in held.keys() - {name}})
    return f"{name} is not in"


def leave_out_everywhere(folder: Path, name: str) -> str:
    leave_out(folder, name)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    return f"missing: {name}"


def store_twice(folder: Path, name: str) -> str:
    other = next(
        path for path in folder.glob("model-*.safetensors") if path != shard_of(folder, name)
    )
    save_file(load_file(other) | {name: load_file(shard_of(folder, name))[name]}, other)
    return f"{name} is in {other.name} and {shard_of(folder, name).name}"


def list_an_absent_one(folder: Path, name: str) -> str:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.x"] = shard_of(folder, name).name
    (folder / INDEX).write_text(json.dumps(index))
    return "model.layers.9.x is not in"


def turn(folder: Path, name: str) -> str:
    rewrite(folder, name, lambda held: held | {name: np.ascontiguousarray(held[name].T)})
    shape = list(load_file(shard_of(folder, name))[name].shape)
    return f"{name} is {shape} instead of {shape[::-1]}"


def cut_a_row(folder: Path, name: str) -> str:
    rewrite(folder, name, lambda held: held | {name: held[name][:-1].copy()})
    return f"{name} is ["


def store_as_integers(folder: Path, name: str) -> str:
    rewrite(folder, name, lambda held: held | {name: held[name].astype(np.int16)})
    return f"{name} is I16, supported are"


DAMAGES = (
    delete_the_shard,
    cut_the_shard,
    rename,
    leave_out,
    leave_out_everywhere,
    store_twice,
    list_an_absent_one,
    turn,
    cut_a_row,
    store_as_integers,
)


@pytest.mark.parametrize(
    ("family", "name", "damage"),
    [
        (family, name, damage)
        for family, name in PLACES
        for damage in DAMAGES
        if damage is not turn or "norm" not in name  # a vector has one shape
    ],
)
def test_damage_is_an_error_that_names_the_tensor_before_weights_are_read(
    tmp_path: Path, family: str, name: str, damage: Callable[[Path, str], str]
) -> None:
    folder = write(tmp_path / "m", family)
    told = damage(folder, name)
    with pytest.raises(CheckpointError) as caught:
        HfFolderSource(folder).load_header()
    assert told in str(caught.value)


@pytest.mark.parametrize("family", TENSORS)
def test_a_stray_file_beside_the_index_is_not_looked_at(tmp_path: Path, family: str) -> None:
    folder = write(tmp_path / "m", family)
    zeros = {name: np.zeros_like(array) for name, array in case_tensors(CASES[family]).items()}
    save_file(zeros, folder / "model.safetensors")
    params = HfFolderSource(folder).load_params(np.float32)
    assert np.abs(oracle(folder, params) - golden_logits(family)).max() < 1e-4


def test_a_tensor_of_another_family_is_unexpected(tmp_path: Path) -> None:
    case = CASES["olmo2"]
    extra = {"model.layers.0.input_layernorm.weight": np.ones(48, np.float32)}
    folder = write_folder(tmp_path / "m", case.config, case_tensors(case) | extra)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.input_layernorm"):
        HfFolderSource(folder).load_header()


def oracle(folder: Path, params: dict[str, object]) -> np.ndarray:
    config = HfFolderSource(folder).load_header().config
    return oracle_logits(params, TOKEN_IDS, config, prompt_len=len(TOKEN_IDS))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_the_head_gives_the_logits_of_the_tensors_that_are_there(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    flag: bool | None,
    head: str,
) -> None:
    case = CASES[family]
    settings = {key: value for key, value in case.config.items() if key != "tie_word_embeddings"}
    is_tied = family == "gemma2" if flag is None else flag  # the family's default
    settings |= {} if flag is None else {"tie_word_embeddings": flag}
    tensors = {name: array for name, array in case_tensors(case).items() if name != HEAD}
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    if head == "different":
        tensors[HEAD] = case.tensor(HEAD, tensors[EMBEDDING].shape)
    source = HfFolderSource(write_folder(tmp_path / "m", settings, tensors))
    if head == "absent" and not is_tied:
        with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
            source.load_header()
        return
    params, config = source.load_params(np.float32), source.load_header().config
    got = oracle_logits(params, TOKEN_IDS, config, prompt_len=len(TOKEN_IDS))
    if (head == "different") is not (HEAD in case_tensors(case)):
        assert np.abs(got - golden_logits(family)).max() > 1e-1
    else:
        assert np.abs(got - golden_logits(family)).max() < 1e-4
    if not config.tied_head:
        np.testing.assert_array_equal(params["head_VD"][: config.vocab_size], tensors[HEAD])
    warned = "the head is the embedding, but lm_head.weight differs" in caplog.text
    assert warned is (is_tied and head == "different")
