"""A GGUF file and its Hugging Face twin are the same model, logit by logit (CASES C56, C51)."""

import dataclasses
from pathlib import Path

import flax.traverse_util
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from jaxserve.checkpoint.gguf import GgufSource
from jaxserve.checkpoint.header import NumpyParams
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.model.config import ModelConfig, RopeConfig
from jaxserve.model.rope import inverse_frequencies
from tests.checkpoint.twins import TWINS, make_twin_weights, write_twin_gguf, write_twin_hf
from tests.model.paged import PagedModel, run_in_chunks

NUM_TOKENS = 40  # past every window, and past the original lengths of the scaled ropes
TOKEN_IDS = [int(id) for id in np.random.default_rng(1).integers(0, 260, size=NUM_TOKENS)]


def flat(params: NumpyParams) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")  # type: ignore[no-any-return]


def comparable(config: ModelConfig) -> ModelConfig:
    """The config with what the formats only spell differently spelled alike."""
    layers = tuple(
        dataclasses.replace(layer, rope=layer.rope and comparable_rope(layer.rope))
        for layer in config.layers
    )
    return dataclasses.replace(config, architecture="", attention_scale=config.scale, layers=layers)


def comparable_rope(rope: RopeConfig) -> RopeConfig:
    """GGUF's numbers are float32; LongRoPE's factor is only said by HF, and not computed with."""
    return dataclasses.replace(
        rope,
        factor=1.0 if rope.kind == "longrope" else rope.factor,
        attention_factor=float(np.float32(rope.attention_factor)),
        short_factors=tuple(np.array(rope.short_factors, np.float32).tolist()),
        long_factors=tuple(np.array(rope.long_factors, np.float32).tolist()),
    )


def write_both(folder: Path, name: str) -> tuple[GgufSource, HfFolderSource]:
    weights = make_twin_weights(TWINS[name])
    return (
        GgufSource(write_twin_gguf(folder / "m.gguf", TWINS[name], weights)),
        HfFolderSource(write_twin_hf(folder / "m", TWINS[name], weights)),
    )


def logits(source: GgufSource | HfFolderSource) -> np.ndarray:
    config = comparable(source.load_header().config)  # equal configs share the compiled program
    return run_in_chunks(
        PagedModel(source.load_params(np.float32), config),
        TOKEN_IDS,
        chunks=[12, 12, 12, 1, 1, 1, 1],
        pages=range(10),
        prompt_len=36,
    )


@pytest.mark.parametrize("name", TWINS)
def test_a_gguf_file_and_its_twin_are_the_same_model(tmp_path: Path, name: str) -> None:
    file, folder = write_both(tmp_path, name)
    ours, wanted = flat(file.load_params(np.float32)), flat(folder.load_params(np.float32))
    assert ours.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)
    our_config = comparable(file.load_header().config)
    wanted_config = comparable(folder.load_header().config)
    if name == "llama 3":  # the rule's result is in the file, not its numbers
        ropes = [config.layers[0].rope for config in (our_config, wanted_config)]
        turns = [inverse_frequencies(rope, 16) for rope in ropes if rope is not None]
        np.testing.assert_allclose(turns[0], turns[1], rtol=5e-7)
        our_config = dataclasses.replace(our_config, layers=wanted_config.layers)
    assert our_config == wanted_config


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", ["llama 32/4", "mixtral", "qwen2", "phi3"])
def test_quantized_rows_go_where_their_twins_go(tmp_path: Path, name: str, kind: Kind) -> None:
    weights = make_twin_weights(TWINS[name])
    # What is permuted, stacked or fused is whole rows, so that rounding may come first.
    rounded = {
        stored: dequantize(quantize(array, kind), kind)
        if array.ndim == 2 and ".gate.weight" not in stored
        else array
        for stored, array in weights.items()
    }
    file = GgufSource(write_twin_gguf(tmp_path / "m.gguf", TWINS[name], weights, kind=kind))
    folder = HfFolderSource(write_twin_hf(tmp_path / "m", TWINS[name], rounded))
    assert file.load_header().quantization == kind.name
    ours, wanted = flat(file.load_params(np.float32)), flat(folder.load_params(np.float32))
    for path, array in wanted.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


@pytest.mark.parametrize(
    "name", ["llama 3", *{t.architecture: n for n, t in TWINS.items()}.values()]
)
def test_a_gguf_file_and_its_twin_give_the_same_logits(tmp_path: Path, name: str) -> None:
    file, folder = write_both(tmp_path, name)
    expected = logits(folder)
    assert np.ptp(expected, axis=1).min() > 1
    # Where configs are equal the results are; Llama 3's RoPE differs in the last digit.
    np.testing.assert_allclose(logits(file), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
