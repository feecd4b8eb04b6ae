"""Hugging Face folders: shards, the head, and refusals (CASES C50, C55)."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.traverse_util
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.header import NumpyParams, SamplingDefaults
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from tests.checkpoint.writers import T1, Weights, make_weights, write_hf, write_index

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights(T1)


def flat(params: NumpyParams) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")  # type: ignore[no-any-return]


def test_one_file_and_three_shards_load_the_same(tmp_path: Path, weights: Weights) -> None:
    single = HfFolderSource(write_hf(tmp_path / "a", T1, weights))
    sharded = HfFolderSource(write_hf(tmp_path / "b", T1, weights, num_shards=3))
    assert single.load_header().config == sharded.load_header().config == T1
    ours, theirs = flat(single.load_params(np.float32)), flat(sharded.load_params(np.float32))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)
    assert len(sharded.load_header().weight_files) == 3


def test_each_array_goes_to_its_place(tmp_path: Path, weights: Weights) -> None:
    params = HfFolderSource(write_hf(tmp_path / "m", T1, weights)).load_params(np.float32)
    layer, prefix = params["layers"]["1"], "model.layers.1."
    D, H = T1.hidden_size, T1.head_dim
    for leaf, name in (("q_DNH", "q"), ("k_DKH", "k"), ("v_DKH", "v")):
        stored = weights[f"{prefix}self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(layer[leaf].reshape(D, -1), stored.T)
        assert layer[leaf].shape[2] == H
    stored = weights[f"{prefix}self_attn.o_proj.weight"]
    np.testing.assert_array_equal(layer["o_NHD"].reshape(-1, D), stored.T)
    for leaf, name in (("gate_DF", "gate"), ("up_DF", "up"), ("down_FD", "down")):
        np.testing.assert_array_equal(layer[leaf], weights[f"{prefix}mlp.{name}_proj.weight"].T)
    np.testing.assert_array_equal(params["head_VD"][: T1.vocab_size], weights[HEAD])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("asked", [np.float32, ml_dtypes.bfloat16])
def test_every_stored_dtype_comes_in_the_dtype_asked_for(
    tmp_path: Path, weights: Weights, stored: type, asked: type
) -> None:
    cast: Weights = {name: array.astype(stored) for name, array in weights.items()}
    cast["model.norm.weight"][0] = 6e-8 if stored is np.float16 else 1e-40  # subnormal
    source = HfFolderSource(write_hf(tmp_path / "m", T1, cast))
    params = source.load_params(asked)
    assert source.load_header().quantization == {"float32": "F32", "float16": "F16"}.get(
        np.dtype(stored).name, "BF16"
    )
    wanted: np.ndarray = cast[EMBEDDING].astype(np.float32).astype(asked)
    np.testing.assert_array_equal(params["embedding_VD"][: T1.vocab_size], wanted)
    np.testing.assert_array_equal(
        params["final_norm_D"], cast["model.norm.weight"].astype(np.float32)
    )


def test_biases_are_loaded(tmp_path: Path) -> None:
    config = dataclasses.replace(
        T1, qkv_bias=True, o_bias=True, mlp_bias=True, layers=T1.layers[:1]
    )
    biased = make_weights(config)
    params = HfFolderSource(write_hf(tmp_path / "m", config, biased)).load_params(np.float32)
    layer = params["layers"]["0"]
    for leaf, name in (
        ("q_bias_NH", "self_attn.q_proj"),
        ("o_bias_D", "self_attn.o_proj"),
        ("up_bias_F", "mlp.up_proj"),
    ):
        np.testing.assert_array_equal(layer[leaf].ravel(), biased[f"model.layers.0.{name}.bias"])


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_the_head_is_decided_by_the_tensors_and_then_the_flag(
    tmp_path: Path, weights: Weights, flag: bool, head: str
) -> None:
    stored = dict(weights)
    if head == "absent":
        del stored[HEAD]
    if head == "equal":
        stored[HEAD] = stored[EMBEDDING].copy()
    source = HfFolderSource(
        write_hf(tmp_path / "m", T1, stored, settings={"tie_word_embeddings": flag})
    )
    if head == "absent" and not flag:
        with pytest.raises(
            CheckpointError, match=r"missing: lm_head\.weight; .* set tie_word_embeddings"
        ):
            source.load_header()
        return
    is_tied = flag and head != "different"
    assert source.load_header().config.tied_head is is_tied
    params = source.load_params(np.float32)
    assert ("head_VD" in params) is not is_tied
    if not is_tied:
        np.testing.assert_array_equal(params["head_VD"][: T1.vocab_size], stored[HEAD])


def delete_a_shard(folder: Path, _: Weights) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_a_shard(folder: Path, _: Weights) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def rename_a_tensor(folder: Path, weights: Weights) -> None:
    names = list(weights)[0::3]
    renamed = {("model.norm.weigth" if i == 0 else n): weights[n] for i, n in enumerate(names)}
    save_file(renamed, folder / "model-00001-of-00003.safetensors")


def store_a_tensor_twice(folder: Path, weights: Weights) -> None:
    held = {name: weights[name] for name in [*list(weights)[1::3], EMBEDDING]}
    save_file(held, folder / "model-00002-of-00003.safetensors")


def list_an_absent_tensor(folder: Path, _: Weights) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    write_index(folder, weight_map | {"model.extra.weight": "model-00001-of-00003.safetensors"})


def leave_a_tensor_unlisted(folder: Path, _: Weights) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    write_index(folder, {name: file for name, file in weight_map.items() if name != EMBEDDING})


def point_outside(folder: Path, _: Weights) -> None:
    write_index(folder, {EMBEDDING: "../model.safetensors"})


def empty_the_index(folder: Path, _: Weights) -> None:
    write_index(folder, {})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete_a_shard, r"model-00002-of-00003\.safetensors is missing, with .*q_proj\.weight"),
        (cut_a_shard, r"model-00003-of-00003\.safetensors is cut off .* in or before .*\.weight"),
        (rename_a_tensor, r"embed_tokens\.weight is not in.*norm\.weigth is in .* not listed"),
        (store_a_tensor_twice, r"embed_tokens\.weight is in model-00002.* and model-00001"),
        (list_an_absent_tensor, r"model\.extra\.weight is not in model-00001"),
        (leave_a_tensor_unlisted, r"embed_tokens\.weight is in model-00001.*, but not listed"),
        (point_outside, r"'\.\./model\.safetensors', but must be a plain name"),
        (empty_the_index, "has no weight_map"),
    ],
)
def test_shards_that_do_not_agree_with_the_index_are_refused(
    tmp_path: Path, weights: Weights, damage: Callable[[Path, Weights], None], message: str
) -> None:
    folder = write_hf(tmp_path / "m", T1, weights, num_shards=3)
    damage(folder, weights)
    with pytest.raises(CheckpointError, match=message):
        HfFolderSource(folder).load_header()


def test_a_stray_file_beside_the_index_is_not_looked_at(tmp_path: Path, weights: Weights) -> None:
    folder = write_hf(tmp_path / "m", T1, weights, num_shards=3)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    save_file(zeros, folder / "model.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    params = HfFolderSource(folder).load_params(np.float32)
    np.testing.assert_array_equal(params["final_norm_D"], weights["model.norm.weight"])


def test_one_error_names_every_tensor_at_fault(tmp_path: Path, weights: Weights) -> None:
    stored = dict(weights)
    gate = "model.layers.0.mlp.gate_proj.weight"
    del stored["model.layers.1.input_layernorm.weight"]
    stored[gate] = np.ascontiguousarray(stored[gate].T)
    stored["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    stored["model.norm.weight"] = stored["model.norm.weight"].astype(np.int8)
    with pytest.raises(CheckpointError) as caught:
        HfFolderSource(write_hf(tmp_path / "m", T1, stored)).load_header()
    for part in (
        "missing: model.layers.1.input_layernorm.weight",
        "unexpected: model.layers.0.self_attn.q_norm.weight",
        f"{gate} is [64, 96] instead of [96, 64]",
        "model.norm.weight is I8, supported are F32, F16, BF16",
    ):
        assert part in str(caught.value)


def test_old_rope_tables_are_left_out(tmp_path: Path, weights: Weights) -> None:
    stored = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert HfFolderSource(write_hf(tmp_path / "m", T1, stored)).load_header().config == T1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"config\.json .*'GPT2LMHeadModel'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": list(range(17))}, "names 17 ids, but at most 16"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but there are only 21 tensors"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, weights: Weights, settings: dict[str, Any], message: str
) -> None:
    folder = write_hf(tmp_path / "m", T1, weights, settings=settings)
    with pytest.raises(CheckpointError, match=message):
        HfFolderSource(folder).load_header()


def test_head_dim_and_kv_heads_have_defaults(tmp_path: Path) -> None:
    config = dataclasses.replace(T1, head_dim=8, num_kv_heads=8)
    settings = {"head_dim": None, "num_key_value_heads": None}
    folder = write_hf(tmp_path / "m", config, make_weights(config), settings=settings)
    assert HfFolderSource(folder).load_header().config == config


def test_eos_is_the_union_of_all_sources(tmp_path: Path, weights: Weights) -> None:
    folder = write_hf(tmp_path / "m", T1, weights, settings={"eos_token_id": [5, 6]})
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    header = HfFolderSource(folder).load_header()
    assert header.eos_ids == header.tokenizer.eos_ids == {1, 3, 5, 6, 7}
    (folder / "chat_template.jinja").unlink()
    assert HfFolderSource(folder).load_header().eos_ids == {1, 5, 6, 7}


def test_sampling_defaults_are_read(tmp_path: Path, weights: Weights) -> None:
    folder = write_hf(tmp_path / "m", T1, weights)
    assert HfFolderSource(folder).load_header().defaults == SamplingDefaults()
    path = folder / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20}')
    defaults = HfFolderSource(folder).load_header().defaults
    assert defaults.as_params() == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    path.write_text('{"do_sample": false, "temperature": 0.6}')
    assert HfFolderSource(folder).load_header().defaults.temperature == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", 1.5),
        ("min_p", True),
        ("repetition_penalty", 0.0),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_at_the_start(
    tmp_path: Path, weights: Weights, name: str, value: object
) -> None:
    folder = write_hf(tmp_path / "m", T1, weights)
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=f"{name} is {value!r}, but must be a"):
        HfFolderSource(folder).load_header()


def test_eos_ids_that_the_model_cannot_write_are_left_out(
    tmp_path: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"eos_token_id": [1, T1.vocab_size, 1 << 40]}  # the last is beyond any array
    folder = write_hf(tmp_path / "m", T1, weights, settings=settings)
    assert HfFolderSource(folder).load_header().eos_ids == {1}
    assert "names [271, 1099511627776], but the model's ids end at 270" in caplog.text


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", DEEP, "cannot read .*recursion"),
        ("generation_config.json", '{"a": ' * 100_000, "cannot read .*recursion"),
        ("tokenizer_config.json", r'{"bos_token": "\uD800"}', "cannot read .*surrogates"),
        ("tokenizer_config.json", r'{"chat_template": ["x"]}', "chat_template must be a text"),
        ("tokenizer_config.json", r'{"chat_template": [{}]}', "chat_template must be a text"),
        ("tokenizer_config.json", r'{"chat_template": 5}', "chat_template must be a text"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "must give each id an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "each id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}', "must give each id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": "a"}}', "must give each id"),
        ("model.safetensors.index.json", DEEP, "cannot read .*recursion"),
        ("model.safetensors.index.json", f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}', "plain"),
    ],
)
def test_a_file_of_the_wrong_form_is_named(
    tmp_path: Path, weights: Weights, file: str, content: str, message: str
) -> None:
    folder = write_hf(tmp_path / "m", T1, weights)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        HfFolderSource(folder).load_header()


def test_a_list_of_templates_gives_its_default(tmp_path: Path, weights: Weights) -> None:
    folder = write_hf(tmp_path / "m", T1, weights)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for templates, wanted in ((named, "d"), (named[:1], None), ([], None)):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert HfFolderSource(folder).load_header().tokenizer.chat_template == wanted


def test_missing_and_damaged_files_are_named(tmp_path: Path, weights: Weights) -> None:
    whole = write_hf(tmp_path / "whole", T1, weights)
    for file, content, message in (
        ("tokenizer.json", None, r"cannot read the tokenizer .*tokenizer\.json"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
        ("config.json", "{", r"cannot read .*config\.json"),
        ("config.json", "[]", "must be a JSON object"),
        ("model.safetensors", None, r"neither model\.safetensors nor"),
        ("model.safetensors", "", r"model\.safetensors has 0 bytes"),
    ):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            HfFolderSource(folder).load_header()


def test_the_digest_follows_the_weights(tmp_path: Path, weights: Weights) -> None:
    first = HfFolderSource(write_hf(tmp_path / "a", T1, weights)).load_header().digest
    assert HfFolderSource(write_hf(tmp_path / "b", T1, weights)).load_header().digest == first
    other = HfFolderSource(write_hf(tmp_path / "c", T1, make_weights(T1, seed=1))).load_header()
    assert other.digest != first
