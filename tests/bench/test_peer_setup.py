"""What cannot be made is named, with why."""

import sys
from pathlib import Path

import pytest

from bench.peer import setup as setups
from bench.peer.absent import Absent
from bench.peer.replay import serve_command
from bench.peer.report import Findings
from bench.peer.setup import Environment, Setup
from bench.peer.variants import build_variants
from bench.peers import make_environments


def test_a_failed_install_says_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho ERROR: no matching distribution; exit 1\n")
    script.chmod(0o755)
    setup = Setup(folder=tmp_path / "peers", base_python=script, given={})
    with pytest.raises(Absent, match="failed: ERROR: no matching distribution"):
        setup.build_environment("openvino")


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, base_python=Path("/nowhere"), given={})
    venv = tmp_path / "venv-openvino"
    venv.mkdir()
    (venv / setups.MARK).touch()
    assert setup.build_environment("openvino").python == venv / "bin" / "python"


def test_a_given_interpreter_is_taken(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, base_python=Path("/nowhere"), given={"vllm": Path("/v/python")})
    assert setup.build_environment("vllm").python == Path("/v/python")


def test_an_engine_that_cannot_be_had_leaves_the_others(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, base_python=Path("/bin/false"), given={})
    found = Findings()
    (tmp_path / "weights" / "hf").mkdir(parents=True)
    (tmp_path / "weights" / "hf" / setups.MARK).touch()
    for kind in setups.GGUF_KINDS:
        (tmp_path / "weights" / f"{kind}.gguf").touch()
    environments = make_environments(setup, {"jaxserve", "openvino"}, found)
    assert set(environments) == {"jaxserve"}
    assert set(found.absent) == {"openvino"}


def test_engines_without_a_server_say_so(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, base_python=Path(sys.executable), given={})
    environment = Environment(python=Path(sys.executable))
    without = set()
    for variant in build_variants(tmp_path, max_seqs=4):
        try:
            command = serve_command(variant, environment, port=1, threads=2, setup=setup)
        except Absent:
            without.add(variant.engine)
        else:
            assert "1" in map(str, command)
    assert without == {"openvino", "transformers"}
