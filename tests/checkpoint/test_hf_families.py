"""Each family and kind of RoPE gives transformers' logits, from its folder (CASES C48, C51)."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.hf_config import read_model_config
from jaxserve.checkpoint.safetensors import HfFolderSource
from tests.checkpoint.hf_folders import (
    case_tensors,
    golden_logits,
    paged_logits,
    saved_settings,
    write_folder,
)
from tests.model.golden.hf_families import CASES, FAMILIES


@pytest.fixture(autouse=True, scope="module")
def fast_compiles() -> Iterator[None]:
    """Each program here runs once; tests/model runs optimized ones against the oracle."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source = HfFolderSource(write_folder(tmp_path / "m", case.config, case_tensors(case)))
    logits = paged_logits(
        source.load_params(np.float32),
        source.load_header().config,
        case,
        attention="xla" if name in FAMILIES else "reference",  # RoPE has nothing to do with it
    )
    assert logits.shape == golden_logits(name).shape
    assert np.abs(logits - golden_logits(name)).max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_config_json_as_transformers_saves_it_says_the_same(name: str) -> None:
    ours = CASES[name].config
    saved = saved_settings()[name]
    assert "rope_parameters" in saved
    assert "rope_parameters" not in ours
    configs = [
        read_model_config(given, num_tensors=1000, where="config.json") for given in (ours, saved)
    ]
    assert configs[0] == configs[1]
