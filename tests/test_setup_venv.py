"""What scripts/setup_venv.sh decides, without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("cat", "dirname", "grep", "head", "ls", "sort", "tail")


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A PATH of its own, with the few tools the script uses and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    return folder


def put(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)
    return path


def bash(code: str, bin_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash") or "bash", "-uc", f"source scripts/setup_venv.sh; {code}"],
        cwd=ROOT,
        env={"PATH": str(bin_dir), "HOME": str(bin_dir), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def is_running_python(output: str) -> bool:
    return os.path.samefile(output.strip(), sys._base_executable)  # type: ignore[attr-defined]  # documented nowhere, set since 3.7


def test_a_shim_that_fails_is_passed_over(bin_dir: Path) -> None:
    put(bin_dir, "python3.13", 'echo "pyenv: python3.13: command not found" >&2; exit 127')
    put(bin_dir, "python3.12", f'exec {sys.executable} "$@"')
    done = bash("find_python", bin_dir)
    assert done.returncode == 0, done.stderr
    assert is_running_python(done.stdout)


def test_versions_of_pyenv_are_found_behind_its_shims(bin_dir: Path, tmp_path: Path) -> None:
    put(bin_dir, "python3.12", "exit 127")
    put(bin_dir, "pyenv", f"echo {tmp_path}/pyenv")
    versions = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    put(versions, "python", f'exec {sys.executable} "$@"')
    assert is_running_python(bash("find_python", bin_dir).stdout)


def test_what_the_user_names_comes_first(bin_dir: Path) -> None:
    put(bin_dir, "python3.13", "exit 127")
    done = bash("find_python", bin_dir, PYTHON=sys.executable)
    assert is_running_python(done.stdout)


def test_no_python_is_a_clear_message_with_what_was_tried(bin_dir: Path) -> None:
    put(bin_dir, "python3.13", 'echo "shim: no such version" >&2; exit 127')
    put(bin_dir, "python3", "echo is Python 3.9.1")
    done = bash("find_python", bin_dir)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no Python 3.12 or newer was found" in done.stderr
    assert "python3.13: shim: no such version" in done.stderr
    assert "python3: is Python 3.9.1" in done.stderr


def test_a_broken_uv_counts_as_none(bin_dir: Path) -> None:
    put(bin_dir, "uv", "exit 127")
    assert bash("has_uv", bin_dir).returncode != 0


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """A folder and a lock that look as if `make_venv` had made the one from the other."""
    folder, lock = tmp_path / "venv", tmp_path / "lock.txt"
    (folder / "bin").mkdir(parents=True)
    put(folder / "bin", "python", f'exec {sys.executable} "$@"')
    lock.write_text("numpy==1\n")
    return folder, lock


def is_fresh(made: tuple[Path, Path], bin_dir: Path) -> bool:
    return bash(f"is_fresh {made[0]} {made[1]}", bin_dir).returncode == 0


def stamp(made: tuple[Path, Path], bin_dir: Path) -> None:
    folder, lock = made
    code = f"venv_stamp {folder} {lock} >{folder}/jaxserve-stamp"
    assert bash(code, bin_dir).returncode == 0


def test_a_half_made_environment_is_stale(made: tuple[Path, Path], bin_dir: Path) -> None:
    assert not is_fresh(made, bin_dir)
    stamp(made, bin_dir)
    assert is_fresh(made, bin_dir)


def test_another_lock_makes_it_stale(made: tuple[Path, Path], bin_dir: Path) -> None:
    stamp(made, bin_dir)
    made[1].write_text("numpy==2\n")
    assert not is_fresh(made, bin_dir)


def test_a_broken_interpreter_makes_it_stale(made: tuple[Path, Path], bin_dir: Path) -> None:
    stamp(made, bin_dir)
    put(made[0] / "bin", "python", "exit 127")
    assert not is_fresh(made, bin_dir)


def test_a_moved_environment_is_stale(
    made: tuple[Path, Path], bin_dir: Path, tmp_path: Path
) -> None:
    stamp(made, bin_dir)
    made[0].rename(tmp_path / "moved")
    assert not is_fresh((tmp_path / "moved", made[1]), bin_dir)


def test_pip_keeps_where_packages_come_from_and_drops_the_rest(bin_dir: Path) -> None:
    done = bash(
        "unset_pip_settings; echo ${PIP_INDEX_URL-} ${PIP_TARGET-none} ${PIP_USER-none}",
        bin_dir,
        PIP_INDEX_URL="mirror",
        PIP_TARGET="elsewhere",
        PIP_USER="1",
    )
    assert done.stdout.split() == ["mirror", "none", "none"]


@pytest.mark.parametrize(
    ("third", "installs"),
    [
        ("", ["-r locks/a.txt", "-r locks/demo-model.txt", "--editable ."]),
        ("--lock-alone", ["-r locks/a.txt"]),
    ],
)
def test_a_lock_alone_brings_neither_demo_model_nor_project(
    bin_dir: Path, tmp_path: Path, third: str, installs: list[str]
) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    stubs = (
        "find_python() { echo true; }; has_uv() { false; }; rm() { :; }; true() { :; }; "
        'venv_stamp() { :; }; install() { echo INSTALL "${@:2}"; }'
    )
    done = bash(f"{stubs}; make_venv {folder} locks/a.txt {third}", bin_dir)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("INSTALL")]
    assert [line[-len(end) :] for line, end in zip(found, installs, strict=True)] == installs
