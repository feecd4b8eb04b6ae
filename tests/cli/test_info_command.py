"""`jaxserve info`: what is found, and that what cannot be found is said in its place."""

import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxserve
from jaxserve.cli.info import find_environment
from jaxserve.cli.main import main
from jaxserve.engine.machine import read_cpu_model, read_gpus
from tests.checkpoint.writers import T1, make_weights, write_hf

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


def test_it_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cache" / "jaxlib-x"
    folder.mkdir(parents=True)
    (folder / "a-cache").write_bytes(b"12345")
    (folder / "b-cache").write_bytes(b"123")
    (folder / ".c.tmp").write_bytes(b"half")
    model = write_hf(tmp_path / "tiny", T1, make_weights(T1))
    words = ["info", str(model), "--json", "--set", f"runner.cache_dir={tmp_path / 'cache'}"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    machine = facts["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] >= machine["usable_memory_bytes"] > 0
    assert facts["versions"]["jaxserve"] == jaxserve.__version__
    assert facts["versions"]["python"] == platform.python_version()
    for package in ("jax", "jaxlib", "flax", "numpy", "grpcio", "protobuf", "tokenizers"):
        assert facts["versions"][package] == importlib.metadata.version(package)
    assert facts["devices"]["found"][0]["id"] == 0
    assert facts["cache"] == {
        "folder": str(tmp_path / "cache"),
        "versions": [{"name": "jaxlib-x", "entries": 2, "size_bytes": 8}],
    }
    assert "smollm2-135m-instruct" in facts["models"]
    assert facts["model"]["architecture"] == "llama"
    assert (facts["model"]["layers"], facts["model"]["vocabulary"]) == (2, 271)


def test_the_text_has_a_line_for_each_fact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert main(["info", "--set", f"runner.cache_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    sections = [block.splitlines()[0] for block in text.split("\n\n")]
    assert sections == ["machine", "versions", "devices", "environment", "cache", "models"]
    assert f"jaxserve    {jaxserve.__version__}\n" in text
    assert "name one, entries 0, size 0.0 MiB\n" in text
    assert "\n            name two, entries 0, size 0.0 MiB\n" in text
    assert "\x1b" not in text


def test_what_cannot_be_found_out_is_said_in_its_place(tmp_path: Path) -> None:
    """In a process, where jax has no device, the cache is a file, and a variable is wrong."""
    (tmp_path / "jaxserve").write_text("not a folder")
    code = "import sys; from jaxserve.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "info", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            "JAX_PLATFORMS": "no_such",
            "XDG_CACHE_HOME": str(tmp_path),
            "JAXSERVE_KV__PAGESIZE": "8",
            "SECRET": "s3cret",
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert "no_such" in facts["devices"]["error"]
    assert facts["cache"]["error"] == "Not a directory"
    assert "did you mean JAXSERVE_KV__PAGE_SIZE?" in facts["cache"]["configuration_error"]
    assert facts["environment"] == {
        "JAXSERVE_KV__PAGESIZE": "8",
        "JAX_PLATFORMS": "no_such",
        "XDG_CACHE_HOME": str(tmp_path),
    }


def test_a_cache_that_is_not_there_yet_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json", "--set", f"runner.cache_dir={tmp_path / 'none'}"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["versions"] == []


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "no/such"]) == 1
    assert "there is no model 'no/such'" in capsys.readouterr().err


def test_the_environment_shows_what_changes_a_run_and_no_more() -> None:
    shown = find_environment(
        {"JAX_X": "1", "XLA_FLAGS": "--a", "jaxserve_y": "2", "HOME": "/h", "PATH": "/p"}
    )
    assert shown == {"JAX_X": "1", "XLA_FLAGS": "--a", "jaxserve_y": "2"}


def test_cpu_and_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert read_cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"
    for i in (0, 1):
        (tmp_path / f"gpu{i}").mkdir()
        (tmp_path / f"gpu{i}" / "information").write_text(f"Model: \t NVIDIA {i}\nIRQ: 1\n")
    assert read_gpus(tmp_path) == ["NVIDIA 0", "NVIDIA 1"]
    assert read_gpus(tmp_path / "none") == []
