"""From C++ to a library: what is kept, what is built again, and what is said when it cannot be."""

import ctypes
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.runner import native_build as build
from jaxserve.runner.native_build import (
    PRODUCTS,
    Library,
    NativeUnavailableError,
    attention_library,
    load_native,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A process that has loaded nothing, with small sources; returns the libraries it registers."""
    registered: list[Path] = []

    def register(name: str, path: Path) -> None:
        if path.read_bytes()[:4] != b"\x7fELF":
            raise NativeUnavailableError(f"{path} cannot be loaded")
        registered.append(path)

    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_register", register)
    monkeypatch.setattr(build, "FLAGS", ("-std=c++20", "-fPIC", "-w"))
    monkeypatch.delenv("CXX", raising=False)
    return registered


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cc").write_text(
        '#include "number.h"\n'
        'extern "C" int one() { return kNumber; }\n'
        'extern "C" void jaxserve_join_team(void*) {}\n'
    )
    (folder / "number.h").write_text("constexpr int kNumber = 1;\n")
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setattr(build, "LIBRARIES", {"one": Library(sources=("one.cc",), targets=("one",))})
    return folder


def compiler_that(tmp_path: Path, script: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        NativeUnavailableError, match=r"no C\+\+ compiler: install .*jaxserve\[ffi]"
    ):
        load_native(None, [PRODUCTS])


def test_without_the_systems_compiler_the_extras_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert build.find_compiler() == (sys.executable, "-m", "ziglang", "c++")


def test_cxx_is_taken_first_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -c")
    assert build.find_compiler() == ("sh", "-c")
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(NativeUnavailableError, match=r"\$CXX is .* closing quotation; mend it"):
        load_native(None, [PRODUCTS])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailableError, match=r"\$CXX is 'no-such-compiler', which is no"):
        load_native(None, [PRODUCTS])


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo bad news >&2; exit 3", "ended with 3: bad news"), ("exit 1", "with 1: no message")],
)
def test_a_broken_compiler_is_told_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    with pytest.raises(NativeUnavailableError, match=message):
        load_native(tmp_path / "cache", [PRODUCTS])
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("limit", "script"),
    [
        ("PROBE_TIMEOUT_S", "exec sleep 20"),
        ("TIMEOUT_S", 'case "$*" in *-E*) ;; *) exec sleep 20;; esac'),
    ],
)
def test_a_compiler_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, script: str
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    monkeypatch.setattr(build, limit, 0.2)
    with pytest.raises(NativeUnavailableError, match=r"cannot be run: .* timed out"):
        load_native(tmp_path / "cache", [PRODUCTS])


@pytest.mark.native
def test_a_library_is_built_once_and_again_after_a_change(
    tmp_path: Path, sources: Path, fresh: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    load_native(cache, ["one"])
    load_native(cache, ["one"])
    assert list(cache.iterdir()) == [fresh[1]]
    assert fresh[0] != fresh[1]  # where it was built
    (sources / "number.h").write_text("constexpr int kNumber = 2;\n")
    load_native(cache, ["one"])
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-exceptions"))
    load_native(cache, ["one"])
    kept = set(cache.iterdir())
    assert len(kept) == 3
    assert len(fresh) == 4
    assert kept & set(fresh) == {fresh[1]}


COMPILER = """
for last; do :; done
case "$last" in *.so) echo "$last" >> "$0.made" && printf '\\177ELF' > "$last" ;; esac
"""


def test_a_pool_of_one_dtype_has_no_other_ones_attention_built(
    tmp_path: Path, fresh: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = build._register

    def remember(name: str, path: Path) -> None:
        register(name, path)
        build._loaded[name] = ctypes.CDLL(None)

    monkeypatch.setattr(build, "_register", remember)
    compiler = compiler_that(tmp_path, COMPILER)
    monkeypatch.setenv("CXX", compiler)
    made, cache = Path(f"{compiler}.made"), tmp_path / "cache"
    wanted = [PRODUCTS, attention_library("bfloat16")]
    load_native(cache, wanted)
    assert {Path(line).stem for line in made.read_text().splitlines()} == set(wanted)
    made.unlink()
    load_native(cache, wanted)
    assert not made.exists()
    load_native(cache, [PRODUCTS, attention_library("int8")])
    assert [Path(line).stem for line in made.read_text().splitlines()] == ["attention_int8"]
    assert len(fresh) == 3  # nor is anything known to XLA that nobody asked for, or known twice
    assert len(list(cache.iterdir())) == 3
    made.unlink()
    build._loaded.clear()  # the next process
    load_native(cache, [attention_library("int8"), attention_library("float32")])
    assert [Path(line).stem for line in made.read_text().splitlines()] == ["attention_float32"]
    assert fresh[3].parent == cache


@pytest.mark.native
def test_a_change_of_one_librarys_source_has_no_other_built_again(
    tmp_path: Path, sources: Path, fresh: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "two.cc").write_text("int two() { return 2; }\n")
    two = Library(sources=("two.cc",), targets=())
    monkeypatch.setattr(build, "LIBRARIES", {**build.LIBRARIES, "two": two})
    cache = tmp_path / "cache"
    load_native(cache, ["one", "two"])
    (sources / "two.cc").write_text("int two() { return 3; }\n")
    load_native(cache, ["one", "two"])
    assert [path.parent == cache for path in fresh] == [False, False, True, False]
    assert len(list(cache.glob("native-one-*.so"))) == 1
    assert len(list(cache.glob("native-two-*.so"))) == 2


def flip(library: bytes) -> bytes:
    middle = len(library) // 2
    return library[:middle] + bytes([library[middle] ^ 1]) + library[middle + 1 :]


@pytest.mark.native
@pytest.mark.parametrize(
    "damage", [lambda library: b"cut", lambda library: library[:-100], flip, lambda library: b""]
)
def test_a_kept_library_that_is_damaged_is_built_again(
    tmp_path: Path,
    sources: Path,
    fresh: list[Path],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    cache = tmp_path / "cache"
    load_native(cache, ["one"])
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    load_native(cache, ["one"])
    assert "native kernels are built again" in caplog.text
    assert kept not in fresh
    assert len(fresh) == 2
    load_native(cache, ["one"])
    assert fresh[2] == kept


@pytest.mark.native
def test_a_kept_library_that_cannot_be_loaded_is_built_again(
    tmp_path: Path, sources: Path, fresh: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    load_native(cache, ["one"])
    (kept,) = cache.iterdir()

    def refuse(name: str, path: Path) -> None:
        if path == kept:
            raise NativeUnavailableError("the folder is mounted noexec")
        fresh.append(path)

    monkeypatch.setattr(build, "_register", refuse)
    load_native(cache, ["one"])
    assert len(fresh) == 2


@pytest.mark.native
def test_folders_that_cannot_be_are_told_or_done_without(
    tmp_path: Path, sources: Path, fresh: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_native(tmp_path / "a\0b", ["one"])
    assert len(fresh) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(NativeUnavailableError, match="no folder to compile in"):
        load_native(None, ["one"])


@pytest.mark.native
@pytest.mark.parametrize("is_file", [True, False])
def test_a_cache_folder_that_cannot_be_written_is_told_and_done_without(
    tmp_path: Path,
    sources: Path,
    fresh: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_file: bool,
) -> None:
    cache = tmp_path / "cache"
    if is_file:
        cache.write_text("")
    else:  # root may write anywhere, so a folder without the right to is not enough

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "replace", refuse)
    caplog.set_level(logging.INFO)
    load_native(cache, ["one"])
    assert len(fresh) == 1
    assert "native kernels cannot be kept" in caplog.text
    if not is_file:
        assert list(cache.iterdir()) == []


@pytest.mark.native
def test_the_build_is_told_before_with_its_compiler_and_after_with_its_seconds(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load_native(None, ["one"])
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("native kernels are being built compiler=")
    assert second.startswith("native kernels built seconds=")


def test_what_makes_no_library_is_named(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = compiler_that(tmp_path, 'for last; do :; done; echo text > "$last"')
    monkeypatch.setenv("CXX", compiler)
    caplog.set_level(logging.INFO)
    with pytest.raises(NativeUnavailableError, match=rf"what {compiler} made: .* cannot be loaded"):
        load_native(tmp_path / "cache", ["one"])
    assert "native kernels built" not in caplog.text


@pytest.mark.native
def test_what_killed_builds_left_is_removed_after_a_day(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    names = ("old", "new")
    for name in names:
        (temporary / f"jaxserve-native-{name}").mkdir(parents=True)
        (temporary / f"jaxserve-native-{name}" / "one.o").touch()
        cache.mkdir(exist_ok=True)
        (cache / f".native-{name}.so.1.tmp").touch()
    (temporary / "jaxserve-native-a").symlink_to("nowhere")  # which is in nobody's way
    a_day_ago_s = time.time() - 24 * 3600 - 1
    for path in (temporary / "jaxserve-native-old", cache / ".native-old.so.1.tmp"):
        os.utime(path, (a_day_ago_s, a_day_ago_s))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    load_native(cache, ["one"])
    left = {path.name for path in temporary.iterdir()}
    assert left == {"jaxserve-native-a", "jaxserve-native-new"}
    assert {path.name for path in cache.glob(".native-*")} == {".native-new.so.1.tmp"}


BUILD = """
import sys
from pathlib import Path
from jaxserve.runner import native_build as build
build.HERE = Path(sys.argv[1])
build.LIBRARIES = {"one": build.Library(sources=("one.cc",), targets=("one",))}
build.load_native(Path(sys.argv[2]), ["one"])
print(*build._loaded)
"""


@pytest.mark.native
def test_two_processes_may_build_at_once(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(sources), str(cache)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert said == {"one\n"}
    (kept,) = cache.iterdir()
    before = kept.stat().st_mtime_ns
    after = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert after.stdout == "one\n"  # and who comes after them takes what is kept
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


SUITE = """
import sys
import pytest
from jaxserve.runner import native_build as build
others = {"-march=native": "-march=x86-64-v3", "-O3": "-O1"}  # -O1 compiles in half the time
build.FLAGS = tuple(others.get(flag, flag) for flag in build.FLAGS)
folder = "tests/kernels"
names = ("native_dot", "native_libraries", "paged_attention")
suite = [f"{folder}/test_{name}.py" for name in names]
sys.exit(pytest.main(["-q", "-m", "native", "-p", "no:cacheprovider", *suite]))
"""


@pytest.mark.native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the suites themselves run it")
def test_the_suites_pass_without_the_newest_instructions() -> None:
    """What a machine without AVX-512 runs: other code for the products, other vectors for both."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", SUITE], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
