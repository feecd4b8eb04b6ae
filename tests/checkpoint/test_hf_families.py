"""Each family and kind of RoPE gives transformers' logits, from its folder (CASES C48, C51)."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.safetensors import HfFolderSource
from tests.checkpoint.hf_folders import (
    case_tensors,
    golden_logits,
    paged_logits,
    write_folder,
)
from tests.model.golden.hf_families import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source = HfFolderSource(write_folder(tmp_path / "m", case.config, case_tensors(case)))
    logits = paged_logits(source.load_params(np.float32), source.load_header().config, case)
    assert np.abs(logits - golden_logits(name)).max() < 1e-4
