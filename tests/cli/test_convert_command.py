"""`jaxserve convert`: what it says, its exit codes, and what it leaves."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.cli.main import main
from jaxserve.llm import LLM
from tests.checkpoint.writers import T1, make_weights, write_gguf, write_hf
from tests.engine.test_start import CONFIG, GREEDY

RUN_IN_100_KB = """
import resource, sys
from jaxserve.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """The command sets these, for a process of its own."""
    platforms, logger = jax.config.jax_platforms, logging.getLogger("jaxserve")
    level = logger.level
    yield
    jax.config.update("jax_platforms", platforms)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", T1, make_weights(T1))


def test_a_bundle_gives_the_tokens_of_its_source(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By relative paths, which the library of checkpoints does not take."""
    monkeypatch.chdir(tmp_path)
    gguf = write_gguf(tmp_path / "tiny.gguf", T1, make_weights(T1))
    for source, target in ((folder, "of-hf"), (gguf.name, "of-gguf")):
        assert main(["convert", str(source), target, "--quiet"]) == 0
    prompts = [(1, 2, 3), (7,) * 20]
    outputs = []
    for model in (folder, "of-hf", "of-gguf"):
        with LLM(str(model), CONFIG) as llm:
            outputs.append([done.token_ids for done in llm.generate(prompts, GREEDY)])
    assert outputs == [outputs[0]] * 3


def test_it_says_what_it_does_on_stderr(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b"
    assert main(["convert", str(folder), str(target), "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "weights written, MiB: 0 of 0",
        "parts verified: 1 of 1",
        f"{target}: tiny in bfloat16",
    ]
    assert main(["convert", str(folder), str(target)]) == 1
    assert capsys.readouterr().err == (
        f"jaxserve: error: {target} exists; remove it, or give another path for the bundle\n"
    )
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "c")]) == 1
    assert "there is no model" in capsys.readouterr().err


def test_a_disk_that_takes_no_more_is_one_line_and_no_leftover(
    tmp_path: Path, folder: Path
) -> None:
    """A limit on the size of files stands for a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_IN_100_KB, "convert", str(folder), str(tmp_path / "b")],
        capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        f"jaxserve: error: cannot write {tmp_path / 'b'}: File too large; nothing is left of it; "
        "free space on the disk, or give a path on another\n"
    )
    assert list(tmp_path.iterdir()) == []
