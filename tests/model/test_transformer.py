"""The paged forward against an oracle without a cache, and against HF transformers."""

import dataclasses
import functools
import pathlib
import re

import flax.traverse_util
import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params, abstract_params, init_params, num_param_bytes
from jaxserve.model.transformer import logits
from tests.model import paged
from tests.model.golden import weights
from tests.model.paged import T1, PagedModel, Piece, build_batch, run_in_chunks
from tests.oracle import oracle_logits

# float32: largest |logit| difference from the float64 oracle over the largest |logit|: seven digits
# through three layers. bfloat16: the same of root mean squares (single logits scatter widely):
# activations are rounded to 8 bits at each product; measured 1.3e-2 to 2.4e-2 over four seeds.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}

BIASED = dataclasses.replace(T1, tied_head=True, qkv_bias=True, o_bias=True, mlp_bias=True)
CONFIGS = {"T1": T1, "tied and biased": BIASED}
PAGES = (31, 5, 17, 2, 9, 30, 12, 7, 3, 22)  # the last page of the pool first


@functools.cache
def make_params(config: ModelConfig, dtype: str = "float32") -> Params:
    return init_params(config, jax.random.key(1), dtype)


def make_ids(num: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, T1.vocab_size, num)]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_chunks_and_decode_give_the_oracles_logits(config: ModelConfig) -> None:
    params, token_ids = make_params(config), make_ids(37)
    wanted = oracle_logits(params, token_ids, config)
    for chunks in ([12, 12, 12, 1], [5, 3, 9, 1, 1, 2, 12, 4], [1] * 37, [2, 11, 1, 12, 1, 10]):
        model = PagedModel(params, config)
        got = run_in_chunks(model, token_ids, chunks=chunks, pages=PAGES)
        assert relative_error(got, wanted) < TOLERANCE["float32"]
        assert np.abs(got - wanted).max() < 1e-4


@pytest.mark.parametrize("name", weights.MODELS)
def test_logits_equal_those_of_hf_transformers(name: str) -> None:
    golden = np.load(pathlib.Path(weights.__file__).parent / "logits.npz")
    options = weights.MODELS[name]
    config = dataclasses.replace(
        T1,
        layers=(LayerConfig(rope=RopeConfig(theta=options["rope_theta"])),) * 3,
        tied_head=options["tie_word_embeddings"],
        qkv_bias=options.get("attention_bias", False),
        o_bias=options.get("attention_bias", False),
        mlp_bias=options.get("mlp_bias", False),
    )
    model = PagedModel(params_of_hf_names(config), config)
    got = run_in_chunks(model, weights.TOKEN_IDS, chunks=[12, 1, 6], pages=PAGES)
    assert np.abs(got - golden[f"{name}/logits"]).max() < 1e-4
    wanted = oracle_logits(model.params, weights.TOKEN_IDS, config)
    assert np.abs(wanted - golden[f"{name}/logits"]).max() < 1e-4


def params_of_hf_names(config: ModelConfig) -> Params:
    """Our parameters from the tensors under HF's names: [out, in] there, [in, out] here."""
    flat = {}
    for path, spec in abstract_params(config, np.float32).items():
        name, turned = hf_name_and_shape(path, spec.shape)
        if path.endswith("_VD"):
            turned = (config.vocab_size, config.hidden_size)
        tensor = weights.random_tensor(name, turned)
        if path.endswith("_VD"):
            tensor = np.pad(tensor, ((0, spec.shape[0] - config.vocab_size), (0, 0)))
        elif tensor.ndim == 2:
            tensor = tensor.T
        flat[path] = jnp.asarray(tensor.reshape(spec.shape))
    nested: Params = flax.traverse_util.unflatten_dict(flat, sep="/")
    return nested


HF_PARTS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"{part}_bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")},
}


def hf_name_and_shape(path: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    top = {
        "embedding_VD": "model.embed_tokens.weight",
        "head_VD": "lm_head.weight",
        "final_norm_D": "model.norm.weight",
    }
    if path in top:
        return top[path], shape
    _, index, leaf = path.split("/")
    part = leaf.rpartition("_")[0]
    num_out = 1 if part == "o" else len(shape) - 1
    is_matrix = not part.endswith(("bias", "norm"))
    sizes = (int(np.prod(shape[-num_out:])), int(np.prod(shape[:-num_out])))
    if part == "o":  # [N, H, D]
        sizes = (shape[-1], shape[0] * shape[1])
    turned = sizes if is_matrix else (int(np.prod(shape)),)
    return f"model.layers.{index}.{HF_PARTS[part]}", turned


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_bfloat16_stays_near_the_oracle(kv_dtype: str) -> None:
    params, token_ids = make_params(T1, "bfloat16"), make_ids(37)
    wanted = oracle_logits(params, token_ids, T1)
    model = PagedModel(params, T1, kv_dtype=kv_dtype)
    got = run_in_chunks(model, token_ids, chunks=[12, 1, 5, 12, 1, 6], pages=PAGES)
    assert got.dtype == np.float32
    error = np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean())
    assert error < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("attention", ["reference", "triton_interpret"])
def test_other_attentions_give_the_same_logits(attention: Impl) -> None:
    params, token_ids = make_params(T1), make_ids(20)
    model = PagedModel(params, T1, kernels=Kernels(attention=attention))
    got = run_in_chunks(model, token_ids, chunks=[11, 1, 8], pages=PAGES)
    assert relative_error(got, oracle_logits(params, token_ids, T1)) < TOLERANCE["float32"]


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    params = make_params(T1)
    ids = [make_ids(20, seed) for seed in range(4)]
    pages = [(1, 2, 3, 4, 5), (31, 30, 29, 28, 27), (6, 8, 10, 12, 14), (7, 9, 11, 13, 15)]
    alone = [
        run_in_chunks(PagedModel(params, T1), i, chunks=[9, 10, 1], pages=p)
        for i, p in zip(ids, pages, strict=True)
    ]
    model = PagedModel(params, T1)
    for start, end in ((0, 9), (9, 19)):
        for index in range(4):
            model.run([Piece(pages[index], start, ids[index][start:end])])
    # Two decode rows beside two chunks that compute their last tokens once more.
    mixed = model.run(
        [
            Piece(pages[0], 19, ids[0][19:]),
            Piece(pages[1], 19, ids[1][19:]),
            Piece(pages[2], 12, ids[2][12:19]),
            Piece(pages[3], 17, ids[3][17:19]),
        ]
    )
    for got, wanted in zip(
        mixed, [alone[0][19:], alone[1][19:], alone[2][12:19], alone[3][17:19]], strict=True
    ):
        assert relative_error(got, wanted) < TOLERANCE["float32"]


def test_padding_never_writes_to_the_pool() -> None:
    params = make_params(T1)
    model = PagedModel(params, T1)
    model.run([Piece((31, 5, 17), 0, make_ids(12))])
    last_pages = [np.array(kv_C2KRH[31]) for kv_C2KRH in model.kv]
    assert not np.isnan(last_pages).any()
    before = [np.array(kv_C2KRH) for kv_C2KRH in model.kv]
    model.run([Piece((1,), 0, make_ids(1))])  # one row is real; all else is padding
    model.run([])
    for kv_C2KRH, old in zip(model.kv, before, strict=True):
        new = np.array(kv_C2KRH)
        changed = {int(c) for c in np.nonzero((new != old) & ~(np.isnan(new) & np.isnan(old)))[0]}
        assert changed == {1}
        assert np.isnan(new[1, :, :, 1:]).all()  # of page 1, row 0 alone was written
        assert not np.isnan(new[1, :, :, 0]).any()


def test_the_pool_is_updated_in_place() -> None:
    batch, _ = build_batch([Piece((1, 2), 0, make_ids(5))])
    shape = (4096, 2, T1.num_kv_heads, paged.PAGE, T1.head_dim)
    kv = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(T1.num_layers))
    kv_bytes = 4 * T1.num_layers * int(np.prod(shape))
    memory = (
        paged.compile_forward(make_params(T1), kv, batch, config=T1).compile().memory_analysis()
    )
    assert memory is not None
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes // T1.num_layers // 4


def test_ids_beyond_the_vocabulary_have_no_logit() -> None:
    params = dict(make_params(T1))
    # All real logits near -5: a padding row's logit of 0 would win.
    hidden_BD = jnp.ones((2, T1.hidden_size), jnp.float32)
    params["final_norm_D"] = jnp.ones(T1.hidden_size, jnp.float32)
    row_V = jnp.arange(T1.padded_vocab_size) < T1.vocab_size
    params["head_VD"] = jnp.where(row_V[:, None], -5.0 / T1.hidden_size, 0.0) * jnp.ones(
        (1, T1.hidden_size), jnp.float32
    )
    out_BV = np.asarray(logits(params, hidden_BD, config=T1, matmul="xla"))
    assert out_BV.dtype == np.float32
    assert (out_BV[:, T1.vocab_size :] == -np.inf).all()
    np.testing.assert_allclose(out_BV[:, : T1.vocab_size], -5.0, atol=1e-3)
    share = np.exp(out_BV) / np.exp(out_BV).sum(-1, keepdims=True)
    np.testing.assert_allclose(share[:, : T1.vocab_size].sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_logits_depend_on_the_batch_size_by_rounding_only(dtype: str) -> None:
    params = make_params(T1, dtype)
    hidden_BD = jax.random.normal(jax.random.key(3), (64, T1.hidden_size), jnp.float32)
    wanted = np.asarray(logits(params, hidden_BD, config=T1, matmul="xla"))[:, : T1.vocab_size]
    for size in (2, 4, 32):
        got = np.asarray(logits(params, hidden_BD[:size], config=T1, matmul="xla"))
        got = got[:, : T1.vocab_size]
        assert relative_error(got, wanted[:size]) < 1e-6


def test_the_parameter_table_tells_shapes_dtypes_and_axes() -> None:
    specs = abstract_params(BIASED, "bfloat16")
    assert "head_VD" not in specs
    assert specs["embedding_VD"].shape == (192, 48)
    assert specs["layers/2/q_DNH"].shape == (48, 8, 16)
    assert specs["layers/0/attn_norm_D"].dtype == np.float32
    assert specs["layers/0/o_bias_D"].dtype == jnp.bfloat16
    for path, spec in specs.items():
        letters = re.search("_([A-Z]+)$", path)
        assert letters is not None
        assert len(letters[1]) == len(spec.shape) == len(spec.axes)
    params = make_params(BIASED, "bfloat16")
    assert num_param_bytes(BIASED, "bfloat16") == sum(x.nbytes for x in jax.tree.leaves(params))
    assert (np.asarray(params["embedding_VD"][BIASED.vocab_size :], np.float32) == 0).all()


def test_a_pool_of_another_depth_is_refused() -> None:
    model = PagedModel(make_params(T1), T1)
    model.kv = model.kv[:2]
    with pytest.raises(ShapeError, match="the pool has 2 layers, the model 3"):
        model.run([Piece((1,), 0, [5])])
