"""What the machine does to a command: memory, disks, cache folders, interrupts."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxserve.cli import exit_codes
from tests.faults.processes import EXIT_S, ROOT, RUN, Done, Place, generate, run_command

GIB = 1 << 30
# Runs the command with a limit of the process: its name, its value, then the command's words.
LIMITED = (
    sys.executable,
    "-c",
    "import resource, sys\n"
    "limit = int(sys.argv.pop(2))\n"
    "resource.setrlimit(getattr(resource, sys.argv.pop(1)), (limit, limit))\n"
    "from jaxserve.cli.main import main\n"
    "sys.exit(main())",
)


@pytest.fixture(scope="module")
def said(place: Place) -> Done:
    """What the command says where nothing is wrong; it fills the cache."""
    done = generate(place)
    assert (done.code, done.err) == (exit_codes.OK, "")
    assert len(done.out) > 5
    return done


def entries_of(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*-cache"))


def with_cache(place: Place, cache: Path) -> Place:
    return Place(model=place.model, config=place.config, cache=cache)


def test_damaged_cache_entries_are_said_once_compiled_again_and_replaced(
    place: Place, said: Done, tmp_path: Path
) -> None:
    damaged = with_cache(place, tmp_path)
    damages: list[Callable[[bytes], bytes]] = [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:999] + bytes([content[999] ^ 4]) + content[1000:],
    ]
    for i, path in enumerate(entries_of(place.cache)):
        copy = tmp_path / path.relative_to(place.cache)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(damages[i % 3](path.read_bytes()))
    done = generate(damaged)
    assert (done.code, done.out) == (exit_codes.OK, said.out)
    (line,) = done.err.splitlines()
    assert "compilation cache entry unusable" in line
    again = generate(damaged)
    assert (again.code, again.out, again.err) == (exit_codes.OK, said.out, "")


def test_a_full_disk_for_the_cache_is_said_once_and_nothing_half_is_left(
    place: Place, said: Done, tmp_path: Path
) -> None:
    full = with_cache(place, tmp_path)
    done = generate(full, prefix=(*LIMITED, "RLIMIT_FSIZE", "4096"))
    assert (done.code, done.out) == (exit_codes.OK, said.out)
    (line,) = done.err.splitlines()
    assert "compiled programs cannot be kept" in line
    assert "File too large" in line
    assert [path for path in tmp_path.glob("*/*") if path.stat().st_size > 0] == []


def test_a_cache_folder_that_cannot_be_made_is_said_once(
    place: Place, said: Done, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    done = generate(with_cache(place, tmp_path / "file" / "cache"))
    assert (done.code, done.out) == (exit_codes.OK, said.out)
    (line,) = done.err.splitlines()
    assert "compilation cache unusable" in line
    assert str(tmp_path / "file" / "cache") in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
@pytest.mark.parametrize("words", ["generate", "config show"])
def test_a_full_disk_for_the_output_is_one_line(words: str, place: Place) -> None:
    with open("/dev/full", "wb") as full:
        if words == "generate":
            done = generate(place, stdout=full)
        else:
            done = run_command(*words.split(), stdout=full)
    assert done.code == exit_codes.REFUSED
    assert done.error_line.endswith("cannot write the output: No space left on device")


def test_a_prompt_beyond_the_context_is_one_line(place: Place) -> None:
    done = generate(place, prompt="x" * 9000)
    assert done.code == exit_codes.REFUSED
    assert "8192" in done.error_line


def test_a_pool_beyond_the_process_limit_is_refused_with_both_numbers(place: Place) -> None:
    limit = 8 * GIB
    pool = ("--set", f"kv.num_pages={3_000_000}")  # 12 GB
    done = generate(place, *pool, prefix=(*LIMITED, "RLIMIT_AS", str(limit)))
    assert done.code == exit_codes.REFUSED
    assert str(limit) in done.error_line
    assert str(3_000_000 * 4096) in done.error_line


def test_memory_that_is_not_there_when_it_is_taken_is_one_line(place: Place) -> None:
    """The pool is below the limit; with all else of the process it is not."""
    limit = 8 * GIB
    pool = ("--set", f"kv.num_pages={limit // 4096 - 1000}")
    done = generate(place, *pool, prefix=(*LIMITED, "RLIMIT_AS", str(limit)))
    assert done.code == exit_codes.REFUSED
    assert "do not fit the memory" in done.error_line


def test_memory_that_does_not_hold_the_libraries_is_one_line(place: Place) -> None:
    done = generate(place, prefix=(*LIMITED, "RLIMIT_AS", str(400 << 20)))
    assert done.code == exit_codes.REFUSED
    assert "not enough memory: " in done.error_line


def interrupted_at(module: str, place: Place) -> Iterator[str]:
    """Interrupts the command when it has just imported `module`; yields what else it says."""
    words = [*RUN[1:], "generate", *place.options, "--prompt", "Hi", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if not line.startswith("import time:"):
                yield line
            elif line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
    assert process.wait(EXIT_S) == exit_codes.INTERRUPTED


@pytest.mark.parametrize("module", ["pydantic", "jax._src.core"])
def test_an_interrupt_during_imports_is_one_line(module: str, place: Place) -> None:
    assert list(interrupted_at(module, place)) == ["jaxserve: interrupted\n"]
