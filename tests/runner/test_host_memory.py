"""What the process may use of the machine's memory."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.runner.host_memory import (
    container_limits,
    machine_bytes,
    process_limits,
    read_host_memory_bytes,
)

MIB = 1 << 20


def limits(root: Path, own: str) -> list[int]:
    path = root / "own"
    path.write_text(own)
    return list(container_limits(groups=root, own=path))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_the_limit_of_a_group_and_of_those_around_it_hold(tmp_path: Path) -> None:
    write(tmp_path / "a/b/memory.max", "300")
    write(tmp_path / "a/memory.max", "max")
    write(tmp_path / "memory.max", "500")
    assert limits(tmp_path, "0::/a/b\n") == [300, 500]


def test_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(tmp_path / "memory/x/memory.limit_in_bytes", "700")
    assert limits(tmp_path, "5:devices:/\n4:cpu,memory:/x\n") == [700]


def test_no_groups_are_no_limit(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/\n") == []
    assert list(container_limits(own=tmp_path / "none")) == []


def test_a_limit_of_the_address_space_holds() -> None:
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({900 * MIB}, {900 * MIB}))\n"
        "from jaxserve.runner.host_memory import read_host_memory_bytes\n"
        "print(read_host_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 900 * MIB


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY, reason="limited here"
)
def test_without_limits_it_is_the_machines() -> None:
    assert list(process_limits()) == []
    assert 0 < read_host_memory_bytes() <= machine_bytes()
