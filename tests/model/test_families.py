"""Every detail of a family, through chunks and decode, against the oracle; and each detail wrong.

Of the 60 tokens 40 are the prompt, where RoPE follows the length of the sequence.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model.config import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params
from jaxserve.model.transformer import embed
from tests import oracle
from tests.model.families import FAMILIES, GEMMA2, MUTATIONS, random_params
from tests.model.paged import T1, PagedModel, Piece, run_in_chunks
from tests.oracle import oracle_logits

# Largest |logit| difference over the largest |logit|: float32's seven digits through three layers.
TOLERANCE = 1e-5
# What a wrong detail must exceed. The least visible is the exact GELU for the approximate one.
WRONG = 20 * TOLERANCE

PAGES = (31, 5, 17, 2, 9, 30, 12, 7, 3, 22, 14, 25, 1, 28, 19)
NUM_TOKENS, PROMPT_LEN = 60, 40
TOKEN_IDS = np.random.default_rng(5).integers(0, T1.vocab_size, NUM_TOKENS).tolist()
DECODE = (1,) * 20


@functools.cache
def params_of(config: ModelConfig) -> Params:
    """Logits reach five times a final cap."""
    params = random_params(config)
    if config.final_soft_cap is not None:
        params["final_norm_D"] = 3.0 * params["final_norm_D"]
    return params


@functools.cache
def right_logits(config: ModelConfig, prompt_len: int = PROMPT_LEN) -> np.ndarray:
    return oracle_logits(params_of(config), TOKEN_IDS, config, prompt_len=prompt_len)


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def check_chunks(
    config: ModelConfig, *all_chunks: Sequence[int], prompt_len: int = PROMPT_LEN
) -> None:
    """Whatever the chunks, in one pool that holds what the run before left."""
    model = PagedModel(params_of(config), config)
    for chunks in all_chunks:
        num_tokens = sum(chunks)
        got = run_in_chunks(
            model, TOKEN_IDS[:num_tokens], chunks=chunks, pages=PAGES, prompt_len=prompt_len
        )
        wanted = right_logits(config, prompt_len)[:num_tokens]
        assert difference(got, wanted) < TOLERANCE
        assert np.abs(got - wanted).max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_decode_give_the_oracles_logits(name: str) -> None:
    check_chunks(
        FAMILIES[name], (12, 12, 12, 4, *DECODE), (5, 3, 9, 1, 1, 2, 12, 7, 3, 12, 5), (1,) * 60
    )


def test_bfloat16_stays_near_the_oracle() -> None:
    """As near as a plain model's does: see TOLERANCE in test_transformer.py."""
    config = FAMILIES["gemma3"]
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(leaf, "float32" if "_norm_" in path[-1].key else "bfloat16"),
        params_of(config),
    )
    got = run_in_chunks(
        PagedModel(params, config), TOKEN_IDS, chunks=(12, 12, 1, 12, 12, 11), pages=PAGES
    )
    wanted = oracle_logits(params, TOKEN_IDS, config)
    assert np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean()) < 4e-2


@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, mutations in MUTATIONS.items() for mutation in mutations],
)
def test_a_wrong_detail_is_seen(name: str, mutation: str) -> None:
    config = FAMILIES[name]
    wrong_params, wrong_config = MUTATIONS[name][mutation](params_of(config), config)
    wrong = oracle_logits(wrong_params, TOKEN_IDS, wrong_config, prompt_len=PROMPT_LEN)
    assert difference(wrong, right_logits(config)) > WRONG


def test_the_logits_of_the_capped_family_go_far_beyond_the_cap() -> None:
    config = dataclasses.replace(GEMMA2, final_soft_cap=None)
    assert GEMMA2.final_soft_cap is not None
    uncapped = oracle_logits(params_of(GEMMA2), TOKEN_IDS, config)
    assert np.abs(uncapped).max() > 5 * GEMMA2.final_soft_cap


def _rope_before_norm(
    x: oracle.Array,
    weight: oracle.Array,
    config: ModelConfig,
    rope: RopeConfig | None,
    lens: Sequence[int],
) -> oracle.Array:
    return oracle._norm_heads(oracle._rope(x, rope, lens), weight, config)


def _other_cap(x: oracle.Array, cap: float | None) -> oracle.Array:
    return x if cap is None else x * np.tanh(x / cap)


def _softmax_of_chosen(logits_E: oracle.Array, experts: ExpertsConfig) -> dict[int, float]:
    """The probabilities are taken among the experts that were picked by their logits."""
    best = np.argsort(-logits_E)[: experts.num_active]
    share = np.exp(logits_E[best] - logits_E.max())
    return dict(zip(best.tolist(), share / share.sum(), strict=True))


def _sigmoid_router(logits_E: oracle.Array, experts: ExpertsConfig) -> dict[int, float]:
    share_E = 1 / (1 + np.exp(-logits_E))
    best = np.argsort(-share_E)[: experts.num_active]
    total = share_E[best].sum() if experts.normalize else 1.0
    return {int(e): share_E[e] / total for e in best}


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("qwen3", "_prepare", _rope_before_norm),
        ("gemma3", "_prepare", _rope_before_norm),
        ("olmo2", "_prepare", _rope_before_norm),
        ("gemma2", "_cap", _other_cap),
        ("qwen3_moe", "_choose", _softmax_of_chosen),
        ("qwen3_moe", "_choose", _sigmoid_router),
        ("mixtral", "_choose", _sigmoid_router),
    ],
)
def test_a_wrong_order_or_formula_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, function: str, wrong: Callable[..., object]
) -> None:
    right = right_logits(FAMILIES[name])
    monkeypatch.setattr(oracle, function, wrong)
    config = FAMILIES[name]
    got = oracle_logits(params_of(config), TOKEN_IDS, config, prompt_len=PROMPT_LEN)
    assert difference(got, right) > WRONG


def test_to_pick_by_logits_is_to_pick_by_probabilities_once_these_are_normalized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = right_logits(FAMILIES["mixtral"])
    monkeypatch.setattr(oracle, "_choose", _softmax_of_chosen)
    config = FAMILIES["mixtral"]
    assert difference(oracle_logits(params_of(config), TOKEN_IDS, config), right) < TOLERANCE


@pytest.mark.parametrize("name", ["dynamic", "phi3"])
def test_rope_that_follows_the_length_does_not_follow_the_chunks(name: str) -> None:
    """The prompt is shorter than the original length of 16, ends beyond it, or is all."""
    config = FAMILIES[name]
    for prompt_len in (10, 20):
        check_chunks(
            config,
            (prompt_len, *(1,) * (60 - prompt_len)) if prompt_len <= 12 else (12, 8, *(1,) * 40),
            (12,) * 5,  # recomputed after a preemption: outputs come in chunks too
            (3, 9, 1, 11, 12, 12, 12),
            prompt_len=prompt_len,
        )


@pytest.mark.parametrize("name", ["dynamic", "phi3"])
def test_the_length_of_the_prompt_is_seen(name: str) -> None:
    config = FAMILIES[name]
    right = right_logits(config)
    for wrong_len in (0, PROMPT_LEN - 20, NUM_TOKENS):
        wrong = right_logits(config, wrong_len)
        # A long prompt or a longer one: all the same to longrope.
        is_seen = wrong_len == 0 or name == "dynamic"
        assert (difference(wrong, right) > WRONG) is is_seen


def _windowed(window: int | None) -> ModelConfig:
    return dataclasses.replace(T1, layers=(LayerConfig(rope=RopeConfig(), window=window),) * 2)


@pytest.mark.parametrize("window", [1, 12, 60])
def test_windows_of_one_of_a_chunk_and_of_everything(window: int) -> None:
    config = _windowed(window)
    check_chunks(config, (4,) * 10 + DECODE, (12,) * 5, (1, 7, 12, 12, 8, *DECODE))
    is_all = window >= NUM_TOKENS
    unlimited = oracle_logits(params_of(config), TOKEN_IDS, _windowed(None))
    assert (difference(unlimited, right_logits(config)) < TOLERANCE) is is_all


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_with_every_chunk_size_and_thirty_tokens_past_them(name: str) -> None:
    config = FAMILIES[name]
    sizes = [
        (*(size,) * (40 // size), *([40 % size] if 40 % size else [])) for size in range(1, 13)
    ]
    check_chunks(config, *sizes, (5, *(1,) * 37))


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_prompt_may_go_on_from_pages_of_another(name: str) -> None:
    """Sixteen tokens in common, computed once; then each has its own pages and tokens."""
    config = FAMILIES[name]
    model = PagedModel(params_of(config), config)
    shared, first_ids = PAGES[:4], TOKEN_IDS[:30]
    second_ids = [*TOKEN_IDS[:16], *TOKEN_IDS[40:54]]
    first = run_in_chunks(model, first_ids, chunks=(12, 12, 6), pages=(*shared, *PAGES[4:8]))
    (second,) = model.run([Piece((*shared, *PAGES[8:12]), 16, second_ids[16:28])])
    (last,) = model.run([Piece((*shared, *PAGES[8:12]), 28, second_ids[28:])])
    wanted = oracle_logits(params_of(config), second_ids, config)
    assert difference(first, oracle_logits(params_of(config), first_ids, config)) < TOLERANCE
    assert difference(np.concatenate([second, last]), wanted[16:]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedding_scale_is_rounded_to_the_weights_dtype(dtype: str) -> None:
    config = dataclasses.replace(T1, embedding_scale=3072**0.5)
    row_VD = jnp.ones((T1.padded_vocab_size, T1.hidden_size), dtype)
    x_TD = embed({"embedding_VD": row_VD}, jnp.array([3], jnp.int32), config=config)
    assert x_TD.dtype == jnp.float32
    wanted = {"float32": np.float32(3072**0.5), "bfloat16": 55.5}
    np.testing.assert_array_equal(x_TD, wanted[dtype])
