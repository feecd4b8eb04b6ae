"""GGUF files: the same arrays as the Hugging Face folder, or a refusal by name (CASES C55-C57)."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.traverse_util
import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxserve.checkpoint.gguf import GgufSource, unpermute
from jaxserve.checkpoint.gguf_file import open_gguf
from jaxserve.checkpoint.gguf_rope import DIVISOR_TENSORS
from jaxserve.checkpoint.gguf_tensor import STORED_TYPES
from jaxserve.checkpoint.header import NumpyParams
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from jaxserve.model.params import abstract_params
from tests.checkpoint.gguf_writer import quantize
from tests.checkpoint.writers import (
    T1,
    GgufRecipe,
    Weights,
    make_weights,
    permute,
    write_gguf,
    write_hf,
)


def flat(params: NumpyParams) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")  # type: ignore[no-any-return]


def rounded(weights: Weights, kind: Kind, *, num_heads: int, num_kv_heads: int) -> Weights:
    """The weights as quantized rows give them back, in their own order of rows."""
    result = {}
    for name, stored in weights.items():
        heads = num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0
        rows = permute(stored, heads) if heads else stored
        if stored.ndim > 1:
            rows = gguf.quants.dequantize(quantize(rows, kind), kind)
        if heads:
            half = stored.shape[0] // heads // 2
            rows = rows.reshape(heads, half, 2, *stored.shape[1:]).swapaxes(1, 2)
        result[name] = rows.reshape(stored.shape)
    return result


# Rows of whole blocks of every type.
BLOCKS = dataclasses.replace(T1, hidden_size=256, num_heads=16, num_kv_heads=16, mlp_size=512)


@pytest.mark.parametrize("kind", [Kind(type_id) for type_id in STORED_TYPES])
def test_every_type_loads_as_the_hugging_face_folder_of_the_same_values(
    tmp_path: Path, kind: Kind
) -> None:
    is_k = gguf.GGML_QUANT_SIZES[kind][0] == 256
    config = BLOCKS if is_k else T1
    weights = make_weights(config)
    file = write_gguf(tmp_path / "m.gguf", config, weights, GgufRecipe(kind=kind))
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    folder = write_hf(tmp_path / "m", config, rounded(weights, kind, **heads))
    ours = flat(GgufSource(file).load_params(np.float32))
    wanted = flat(HfFolderSource(folder).load_params(np.float32))
    assert ours.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (32, 4), (4, 1), (4, 4)])
def test_q_and_k_rows_come_back_in_order_for_every_grouping(
    tmp_path: Path, heads: tuple[int, int]
) -> None:
    config = dataclasses.replace(
        T1,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        layers=T1.layers[:1],
        qkv_bias=True,
        o_bias=True,
    )
    weights = make_weights(config)
    file = write_gguf(tmp_path / "m.gguf", config, weights)
    source = GgufSource(file)
    ours = flat(source.load_params(np.float32))
    assert source.load_header().config == config
    for leaf, name in (("q_DNH", "q_proj.weight"), ("k_DKH", "k_proj.weight")):
        stored = weights[f"model.layers.0.self_attn.{name}"]
        wanted = stored.reshape(-1, config.head_dim, config.hidden_size).transpose(2, 0, 1)
        np.testing.assert_array_equal(ours[f"layers/0/{leaf}"], wanted)
    for leaf, name in (("q_bias_NH", "q_proj.bias"), ("k_bias_KH", "k_proj.bias")):
        stored = weights[f"model.layers.0.self_attn.{name}"]
        np.testing.assert_array_equal(ours[f"layers/0/{leaf}"], stored.reshape(-1, config.head_dim))


def test_heads_alone_have_their_rows_put_in_order() -> None:
    config = dataclasses.replace(T1, head_dim=4)
    rows = np.arange(8, dtype=np.float32)[:, None]
    stored = permute(rows, 2)
    assert stored[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    for path in ("layers/0/q_DNH", "layers/1/k_bias_KH"):
        np.testing.assert_array_equal(unpermute(stored, path, config), rows)
        np.testing.assert_array_equal(unpermute(stored[4:], path, config), rows[4:])
    for other in (dataclasses.replace(config, architecture="qwen2"), config):
        path = "layers/0/v_DKH" if other is config else "layers/0/q_DNH"
        np.testing.assert_array_equal(unpermute(stored, path, other), stored)


def test_params_have_the_shapes_and_dtypes_of_the_model(tmp_path: Path) -> None:
    weights = make_weights(T1)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", T1, weights))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        params = flat(source.load_params(dtype))
        specs = abstract_params(T1, dtype)
        assert params.keys() == specs.keys()
        for path, spec in specs.items():
            assert (params[path].shape, params[path].dtype) == (spec.shape, spec.dtype), path
            assert params[path].flags.c_contiguous
            assert params[path].flags.writeable
    embedding = flat(source.load_params(np.float32))["embedding_VD"]
    assert embedding.shape[0] == 320
    assert not embedding[271:].any()
    np.testing.assert_array_equal(embedding[:271], weights["model.embed_tokens.weight"])


def test_a_header_is_complete_without_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", T1, make_weights(T1), GgufRecipe(kind=Kind.Q8_0))
    header = GgufSource(file).load_header()
    assert (header.name, header.architecture, header.quantization) == ("tiny", "llama", "Q8_0")
    assert header.config == T1
    assert header.eos_ids == header.tokenizer.eos_ids == frozenset({1, 3})
    assert (header.tokenizer.bos_id, header.tokenizer.add_bos) == (0, True)
    assert len(header.digest) == 64


def test_progress_rises_to_all_bytes(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", T1, make_weights(T1)))
    seen: list[tuple[int, int]] = []
    source.load_params(np.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(array.nbytes for array in make_weights(T1).values())


def test_without_an_output_tensor_the_head_is_the_embedding(tmp_path: Path) -> None:
    recipe = GgufRecipe(leave_out=["output.weight"])
    source = GgufSource(write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), recipe))
    assert source.load_header().config.tied_head
    assert "head_VD" not in source.load_params(np.float32)


def test_a_custom_alignment_is_followed(tmp_path: Path) -> None:
    weights = make_weights(T1)
    file = write_gguf(tmp_path / "m.gguf", T1, weights, GgufRecipe(alignment=64))
    assert open_gguf(file).metadata["general.alignment"] == 64
    params = flat(GgufSource(file).load_params(np.float32))
    np.testing.assert_array_equal(params["final_norm_D"], weights["model.norm.weight"])


REFUSED: dict[str, tuple[GgufRecipe, str]] = {
    "architecture": (
        GgufRecipe(architecture="mamba"),
        "architecture 'mamba'.*supported are llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3",
    ),
    "one of several parts": (
        GgufRecipe(other_keys={"split.count": 3}),
        "is one of 3 parts.*llama-gguf-split --merge",
    ),
    "rope kind": (GgufRecipe(keys={"rope.scaling.type": "ntk"}), "type is ntk.*linear, yarn, long"),
    "rope factor": (GgufRecipe(keys={"rope.scaling.factor": -2.0}), "factor is -2.0.*positive"),
    "rope factor on cos": (GgufRecipe(keys={"rope.scaling.attn_factor": 2.0}), "attn_factor is 2"),
    "yarn ramp": (
        GgufRecipe(keys={"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}),
        "yarn_ext_factor=0.5",
    ),
    "yarn beta": (
        GgufRecipe(keys={"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_slow": 0.0}),
        "yarn_beta_slow is 0.0, but must be positive",
    ),
    "yarn base": (
        GgufRecipe(keys={"rope.scaling.type": "yarn", "rope.freq_base": 1.0}),
        "rope_theta is 1.0, but must be above 1",
    ),
    "original length": (
        GgufRecipe(keys={"rope.scaling.original_context_length": 0}),
        "original_context_length is 0",
    ),
    "longrope without divisors": (
        GgufRecipe(keys={"rope.scaling.type": "longrope"}),
        "needs rope_freqs.weight, or rope_factors_short.weight and rope_factors_long.weight",
    ),
    "half of the divisors": (
        GgufRecipe(extra={"rope_factors_long.weight": np.ones(8, np.float32)}),
        "by rope_factors_long.weight, but needs",
    ),
    "all divisors": (
        GgufRecipe(extra={n: np.ones(8, np.float32) for n in DIVISOR_TENSORS}),
        "by rope_freqs.weight, rope_factors_short.weight, rope_factors_long.weight, but needs",
    ),
    "divisors and a factor": (
        GgufRecipe(
            keys={"rope.scaling.factor": 2.0},
            extra={"rope_freqs.weight": np.ones(8, np.float32)},
        ),
        "by the kind linear and by rope_freqs.weight",
    ),
    "too few divisors": (
        GgufRecipe(extra={"rope_freqs.weight": np.ones(7, np.float32)}),
        r"rope_freqs.weight has the shape \[7\].*must hold 8 numbers",
    ),
    "divisors of another type": (
        GgufRecipe(extra={"rope_freqs.weight": np.ones(8, np.float16)}),
        "rope_freqs.weight has the shape .* the type 1",
    ),
    "a divisor of zero": (
        GgufRecipe(extra={"rope_freqs.weight": np.zeros(8, np.float32)}),
        "rope_freqs.weight must hold positive numbers",
    ),
    "more active experts than there are": (
        GgufRecipe(keys={"expert_count": 2, "expert_used_count": 3}),
        "expert_used_count is 3, but must be from 1 to 2",
    ),
    "experts that are not there": (
        GgufRecipe(keys={"expert_count": 8, "expert_used_count": 2}),
        r"missing: .*blk\.1\.ffn_down_exps\.weight.*unexpected: blk\.0\.ffn_gate\.weight",
    ),
    "shared experts": (GgufRecipe(keys={"expert_shared_count": 1}), "expert_shared_count=1"),
    "router": (GgufRecipe(keys={"expert_gating_func": 2}), "expert_gating_func=2"),
    "window": (GgufRecipe(keys={"attention.sliding_window": 2.5}), "sliding_window is 2.5"),
    "caps": (GgufRecipe(keys={"attn_logit_softcapping": 50.0}), "attn_logit_softcapping=50.0"),
    "unknown key": (GgufRecipe(keys={"logit_scale": 0.5}), "logit_scale=0.5"),
    "partial rotary": (GgufRecipe(keys={"rope.dimension_count": 8}), "dimension_count is 8"),
    "other value size": (GgufRecipe(keys={"attention.value_length": 8}), "value_length is 8"),
    "heads per layer": (
        GgufRecipe(keys={"attention.head_count_kv": [2, 4]}),
        "same for all layers",
    ),
    "missing key": (GgufRecipe(keys={"block_count": None}), "lacks the key llama.block_count"),
    "uneven heads": (GgufRecipe(keys={"attention.head_count_kv": 3}), "cannot share 3"),
    "wrong vocabulary": (GgufRecipe(keys={"vocab_size": 300}), "vocab_size is 300"),
    "unexpected": (
        GgufRecipe(extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}),
        r"unexpected: blk\.0\.attn_q_norm\.weight",
    ),
    "missing": (
        GgufRecipe(leave_out=["blk.0.attn_q.weight", "blk.1.ffn_up.weight"]),
        r"missing: blk\.0\.attn_q\.weight, blk\.1\.ffn_up\.weight",
    ),
    "wrong shape": (
        GgufRecipe(
            leave_out=["output_norm.weight"], extra={"output_norm.weight": np.ones(63, np.float32)}
        ),
        r"output_norm\.weight is \[63\] instead of \[64\]",
    ),
    "other type": (
        GgufRecipe(extra={"extra.weight": np.ones(4, np.float64)}),
        r"F64 \(extra\.weight\).*BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0",
    ),
    "tokenizer model": (
        GgufRecipe(tokenizer={"model": "bert"}),
        r"tokenizer.ggml.model is 'bert' \(WordPiece\), .* supported are gpt2 .*, llama",
    ),
    "pre-tokenizer": (GgufRecipe(tokenizer={"pre": "viking"}), "'viking', which is not supported"),
    "no tokens": (GgufRecipe(tokenizer={"tokens": None}), "tokenizer.ggml.tokens is missing"),
    "eos out of range": (GgufRecipe(tokenizer={"eos_token_id": 9999}), "eos_token_id is 9999"),
    "too many layers": (GgufRecipe(keys={"block_count": (1 << 32) - 1}), "says 4294967295 layers"),
    "not a number": (
        GgufRecipe(keys={"attention.layer_norm_rms_epsilon": float("nan")}),
        "norm_eps is nan, but must be positive and finite",
    ),
    "a list of experts": (GgufRecipe(keys={"expert_count": [0, 0]}), r"expert_count is \[0, 0\]"),
    "a list of sizes": (GgufRecipe(keys={"vocab_size": [1, 2]}), r"vocab_size is \[1, 2\]"),
    "tokens that are no text": (GgufRecipe(tokenizer={"tokens": [1, 2]}), "ggml.tokens is missing"),
    "merges that are no text": (GgufRecipe(tokenizer={"merges": [1]}), "ggml.merges is missing"),
    "odd token types": (GgufRecipe(tokenizer={"token_type": [1.5]}), "a list of whole numbers"),
    "odd bos flag": (GgufRecipe(tokenizer={"add_bos_token": "no"}), "must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    recipe, message = REFUSED[name]
    source = GgufSource(write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), recipe))
    with pytest.raises(CheckpointError, match=message):
        source.load_header()


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", T1, make_weights(T1)).read_bytes()
    header_len = whole.index(b"output.weight") + 100
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for position in rng.integers(header_len, size=rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        source = GgufSource(tmp_path / "damaged.gguf")
        try:
            source.load_header()
            source.load_params(np.float32)
        except CheckpointError:
            refusals += 1
    assert 50 < refusals < 200


def test_one_error_names_every_tensor_at_fault(tmp_path: Path) -> None:
    recipe = GgufRecipe(
        leave_out=["blk.0.attn_q.weight"], extra={"stray.weight": np.ones(4, np.float32)}
    )
    file = write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), recipe)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 64)
    with pytest.raises(CheckpointError) as caught:
        GgufSource(file).load_header()
    for part in ("missing: blk.0.attn_q.weight", "unexpected: stray.weight", "cut off"):
        assert part in str(caught.value)


def test_neutral_settings_are_taken(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rope.scaling.type": "none", "expert_count": 0}
    file = write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), GgufRecipe(keys=keys))
    assert GgufSource(file).load_header().config.layers == T1.layers


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_the_files_bos_flag_is_followed(tmp_path: Path, add_bos: bool | None) -> None:
    recipe = GgufRecipe(tokenizer={"add_bos_token": add_bos})
    file = write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), recipe)
    assert GgufSource(file).load_header().tokenizer.add_bos is bool(add_bos)


def test_eos_is_the_union_of_all_keys(tmp_path: Path) -> None:
    recipe = GgufRecipe(tokenizer={"eot_token_id": 5, "eom_token_id": 6})
    file = write_gguf(tmp_path / "m.gguf", T1, make_weights(T1), recipe)
    assert GgufSource(file).load_header().eos_ids == {1, 3, 5, 6}


def test_a_template_for_tools_is_read_beside_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    monkeypatch.setattr("tests.checkpoint.writers.CHAT_TEMPLATE", named)
    file = write_gguf(tmp_path / "tools.gguf", T1, make_weights(T1))
    tokenizer = GgufSource(file).load_header().tokenizer
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("a", "b")
