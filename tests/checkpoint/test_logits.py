"""Both formats give the logits that transformers gives for the same weights."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.registry import find_model
from tests.checkpoint.writers import T1, make_weights, write_gguf, write_hf
from tests.oracle import oracle_logits

TOKEN_IDS = [5, 9, 100, 266, 3, 77, 12, 1]
# LlamaForCausalLM of transformers 5.24 in float32 on the folder that `write_hf` writes: the first
# five logits after the first and the last token, and each row's sum.
FIRST = [1.3562, -4.9821, -1.0547, -2.6563, -0.5606]
LAST = [1.4449, -3.0433, 0.0727, 1.1061, -5.7385]
SUMS = [-1.99, -33.88, 23.19, 35.38, 65.16, -17.90, -9.26, 5.28]


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_the_loaded_model_gives_transformers_logits(tmp_path: Path, form: str) -> None:
    config = dataclasses.replace(T1, vocab_size=267)
    weights = make_weights(config)
    write_hf(tmp_path / "hf", config, weights)
    write_gguf(tmp_path / "m.gguf", config, weights)
    source = find_model(str(tmp_path / ("hf" if form == "hf" else "m.gguf")))
    params = source.load_params(np.float32)
    logits_TV = oracle_logits(params, TOKEN_IDS, source.load_header().config)
    np.testing.assert_allclose(logits_TV[0, :5], FIRST, atol=2e-4)
    np.testing.assert_allclose(logits_TV[-1, :5], LAST, atol=2e-4)
    np.testing.assert_allclose(logits_TV.sum(axis=1), SUMS, atol=2e-2)
