"""From the C++ files in `kernels/native` to functions that XLA calls: compiled once, then kept."""

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import jax

from jaxserve.config import read_cxx
from jaxserve.errors import JaxserveError

logger = logging.getLogger(__name__)

HERE: Final = Path(__file__).parents[1] / "kernels" / "native"
# Those of a group are compiled as one: of a small one the headers of XLA are most of the work.
SOURCES: Final = (
    ("attention.cc",),
    ("attention_bytes.cc",),
    ("dot.cc", "gated.cc", "norm.cc", "rotate_write.cc"),
)
TARGETS: Final = (
    "jaxserve_paged_attention",
    "jaxserve_dot",
    "jaxserve_dot_add",
    "jaxserve_gated",
    "jaxserve_norm",
    "jaxserve_rotate_write",
)
FLAGS: Final = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fno-exceptions", "-w")
COMPILERS: Final = ("c++", "g++", "clang++")
TIMEOUT_S: Final = 300.0  # of compiling
PROBE_TIMEOUT_S: Final = 20.0  # of asking the compiler for its macros

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_FOLDER_PREFIX: Final = "jaxserve-native-"
_DAY_S: Final = 24 * 3600

_loaded: list[ctypes.CDLL] = []  # a process registers its functions once


class NativeUnavailableError(JaxserveError):
    """There are no native kernels here; says why, and what would help."""


def load_native(cache_dir: Path | None) -> None:
    """Has XLA know the native kernels; compiles them where this machine has not done so yet.

    The library is kept in `cache_dir`, by a digest of the sources, jaxlib's headers, and what the
    compiler says of itself and of this machine. It ends with a digest of itself: what is kept is
    never run unchecked.

    Args:
      cache_dir: None compiles each time.

    Raises:
      NativeUnavailableError: no compiler, or it fails; also where $CXX cannot be found.
    """
    if _loaded:
        return
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError(
            "there is no C++ compiler: install one (c++, g++ or clang++ on PATH, or $CXX), or "
            "jaxserve[ffi], which brings one"
        )
    path = None if cache_dir is None else cache_dir / f"native-{_digest(compiler)}.so"
    if path is not None and _load_kept(path):
        return
    _remove_leftovers(cache_dir)
    try:
        folder = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX)
    except OSError as error:
        raise NativeUnavailableError(f"there is no folder to compile in: {error}") from error
    with folder:
        began_s = time.monotonic()
        logger.info(
            "native kernels are being built compiler=%s timeout_s=%.0f",
            " ".join(compiler),
            TIMEOUT_S,
        )
        built = _build(compiler, Path(folder.name))
        try:
            _register(built)
        except NativeUnavailableError as error:
            raise NativeUnavailableError(f"what {' '.join(compiler)} made: {error}") from error
        logger.info("native kernels built seconds=%.1f", time.monotonic() - began_s)
        if path is not None:
            _keep(built, path)


def _build(compiler: tuple[str, ...], folder: Path) -> Path:
    """Returns a library of all sources, whose groups are compiled side by side."""
    include = f"-I{jax.ffi.include_dir()}"

    def compile_group(names: tuple[str, ...]) -> str:
        source, compiled = folder / f"of_{names[0]}", folder / f"{names[0]}.o"
        source.write_text("".join(f'#include "{HERE / name}"\n' for name in names))
        command = [*compiler, *FLAGS, include, "-c", str(source), "-o", str(compiled)]
        _run(command, timeout_s=TIMEOUT_S)
        return str(compiled)

    with ThreadPoolExecutor(len(SOURCES)) as pool:
        objects = list(pool.map(compile_group, SOURCES))
    built = folder / "native.so"
    _run([*compiler, *FLAGS, "-shared", *objects, "-o", str(built)], timeout_s=TIMEOUT_S)
    return built


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of a C++ compiler: $CXX, the system's, or the extra's; None without.

    Raises:
      NativeUnavailableError: $CXX is no command.
    """
    if cxx := read_cxx():
        try:
            words = shlex.split(cxx)
        except ValueError as error:
            raise NativeUnavailableError(f"$CXX is {cxx!r}: {error}; mend it") from error
        if shutil.which(words[0]) is None:
            text = f"$CXX is {words[0]!r}, which is no command that is there; mend it, or unset it"
            raise NativeUnavailableError(text)
        return tuple(words)
    for name in COMPILERS:
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _digest(compiler: tuple[str, ...]) -> str:
    # What the compiler predefines tells its version and this machine's instructions.
    probe = [*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    macros = _run(probe, timeout_s=PROBE_TIMEOUT_S)
    headers = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api"
    hashed = hashlib.sha256(macros + b"\0".join(word.encode() for word in (*compiler, *FLAGS)))
    sources = [HERE / name for group in SOURCES for name in group]
    files = [*headers.glob("*.h"), *HERE.glob("*.h"), *sources]
    for path in sorted(files):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def _run(command: Sequence[str], *, timeout_s: float) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(
            f"the C++ compiler {command[0]} cannot be run: {error}"
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-1000:]
        raise NativeUnavailableError(
            f"the C++ compiler {command[0]} ended with {done.returncode}: {said or 'no message'}"
        )
    return done.stdout


def _load_kept(path: Path) -> bool:
    """Returns whether a library was kept, whole, and is loaded now."""
    try:
        kept = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
    try:
        if hashlib.sha256(kept[:-_DIGEST_BYTES]).digest() != kept[-_DIGEST_BYTES:]:
            raise NativeUnavailableError(f"{path} is damaged")
        _register(path)
    except NativeUnavailableError as error:
        logger.warning("native kernels are built again error=%s", error)
        return False
    return True


def _keep(built: Path, path: Path) -> None:
    """Puts a library into the cache, whole or not at all; the last of several processes' stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        library = built.read_bytes()
        temporary.write_bytes(library + hashlib.sha256(library).digest())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        logger.info("native kernels cannot be kept path=%s error=%r", path, error)
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def _remove_leftovers(cache_dir: Path | None) -> None:
    """Removes what starts that were killed while they built left behind a day ago or earlier."""
    old_s = time.time() - _DAY_S
    with contextlib.suppress(OSError, ValueError):  # ValueError: a NUL in the name
        for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
            if folder.lstat().st_mtime < old_s:
                shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError):
        for file in () if cache_dir is None else cache_dir.glob(".native-*.tmp"):
            if file.lstat().st_mtime < old_s:
                file.unlink(missing_ok=True)


def _register(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))
        functions = [getattr(library, name) for name in TARGETS]
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
    for name, function in zip(TARGETS, functions, strict=True):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    _loaded.append(library)
