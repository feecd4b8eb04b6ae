"""One thing of a checkpoint is damaged at a time: each must be an error that names it.

CASES harness 5. A damage that goes unnoticed fails, and so does a whole checkpoint that is refused.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint import convert as conversion
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.header import ModelHeader, NumpyParams
from jaxserve.checkpoint.registry import find_model
from jaxserve.errors import CheckpointError
from tests.checkpoint.damages import BUNDLE, GGUF, GGUF_FILE, HF, SHARDED, Case
from tests.checkpoint.writers import T1, make_weights, write_gguf, write_hf

CASES = {"hf": HF, "sharded": SHARDED, "gguf": GGUF, "bundle": BUNDLE}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model in each form."""
    folder = tmp_path_factory.mktemp("whole")
    weights = make_weights(T1)
    write_hf(folder / "hf", T1, weights)
    write_hf(folder / "sharded", T1, weights, num_shards=3)
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / GGUF_FILE, T1, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "PART_BYTES", 250_000)  # so that there are two
        convert(find_model(str(folder / "hf")), folder / "bundle")
    return folder


def load(folder: Path, form: str) -> tuple[ModelHeader, NumpyParams]:
    """What an engine reads before it serves."""
    source = find_model(str(folder / GGUF_FILE if form == "gguf" else folder))
    return source.load_header(), source.load_params(np.float32)


@pytest.mark.parametrize("form", CASES)
def test_a_whole_checkpoint_loads(whole: Path, form: str) -> None:
    header, params = load(whole / form, form)
    assert header.config == T1
    assert params["embedding_VD"].shape == (320, 64)


@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form}-{case.title}")
        for form, cases in CASES.items()
        for case in cases
    ],
)
def test_a_damage_is_an_error_that_names_it(
    tmp_path: Path, whole: Path, form: str, case: Case
) -> None:
    folder = shutil.copytree(whole / form, tmp_path / "m")
    case.damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder, form)
    message = str(caught.value)
    assert [name for name in case.names if name not in message] == [], message


def test_there_are_enough_damages() -> None:
    assert sum(map(len, CASES.values())) >= 40
    assert all(len(cases) >= 10 for cases in CASES.values())
