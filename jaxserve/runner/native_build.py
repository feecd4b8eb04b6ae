"""From the C++ files in `kernels/native` to functions that XLA calls: compiled once, then kept."""

import contextlib
import ctypes
import dataclasses
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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import jax

from jaxserve.config import read_cxx
from jaxserve.errors import JaxserveError
from jaxserve.kernels.paged_attention.native import POOL_DTYPES, target_of

logger = logging.getLogger(__name__)

HERE: Final = Path(__file__).parents[1] / "kernels" / "native"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Library:
    """What is compiled as one file, because the headers of XLA are most of a small one's work.

    Attributes:
      sources: files in `HERE`.
      targets: the functions in them that XLA calls, by the names that it knows them by.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]


def attention_library(pool_dtype: str) -> str:
    """Returns the name in `LIBRARIES` of attention over a pool of one of `POOL_DTYPES`."""
    return f"attention_{pool_dtype}"


PRODUCTS: Final = "products"  # and what stands between them
LIBRARIES: Final[Mapping[str, Library]] = {
    PRODUCTS: Library(
        sources=("dot.cc", "gated.cc", "norm.cc", "rotate_write.cc", "team.cc"),
        targets=(
            "jaxserve_dot",
            "jaxserve_dot_add",
            "jaxserve_gated",
            "jaxserve_norm",
            "jaxserve_rotate_write",
        ),
    ),
    **{
        attention_library(dtype): Library(
            sources=(f"{attention_library(dtype)}.cc", "team.cc"), targets=(target_of(dtype),)
        )
        for dtype in POOL_DTYPES
    },
}
TARGETS: Final = tuple(target for library in LIBRARIES.values() for target in library.targets)
FLAGS: Final = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fno-exceptions", "-w")
COMPILERS: Final = ("c++", "g++", "clang++")
TIMEOUT_S: Final = 300.0  # of compiling
PROBE_TIMEOUT_S: Final = 20.0  # of asking the compiler for its macros

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_FOLDER_PREFIX: Final = "jaxserve-native-"
_DAY_S: Final = 24 * 3600

_loaded: dict[str, ctypes.CDLL] = {}  # by name; a process registers a function once


class NativeUnavailableError(JaxserveError):
    """There are no native kernels here; says why, and what would help."""


def load_native(cache_dir: Path | None, names: Collection[str]) -> None:
    """Has XLA know some native kernels; compiles those that this machine has not compiled yet.

    A library is kept in `cache_dir`, by a digest of its sources, jaxlib's headers, and what the
    compiler says of itself and of this machine. It ends with a digest of itself: what is kept is
    never run unchecked.

    Args:
      cache_dir: None compiles each time.
      names: those of `LIBRARIES` that are wanted; what the process has loaded already stays.

    Raises:
      NativeUnavailableError: no compiler, or it fails; also where $CXX cannot be found.
    """
    missing = [name for name in names if name not in _loaded]
    if not missing:
        return
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError(
            "there is no C++ compiler: install one (c++, g++ or clang++ on PATH, or $CXX), or "
            "jaxserve[ffi], which brings one"
        )
    paths = {} if cache_dir is None else _paths(cache_dir, compiler, missing)
    missing = [name for name in missing if name not in paths or not _load_kept(name, paths[name])]
    if not missing:
        return
    _remove_leftovers(cache_dir)
    try:
        folder = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX)
    except OSError as error:
        raise NativeUnavailableError(f"there is no folder to compile in: {error}") from error
    with folder:
        for name, built in _build(compiler, Path(folder.name), missing).items():
            if name in paths:
                _keep(built, paths[name])


def _build(compiler: tuple[str, ...], folder: Path, names: Collection[str]) -> dict[str, Path]:
    """Returns libraries, compiled side by side, that XLA knows now."""
    began_s = time.monotonic()
    command = " ".join(compiler)
    logger.info("native kernels are being built compiler=%s timeout_s=%.0f", command, TIMEOUT_S)
    with ThreadPoolExecutor(len(names)) as pool:
        paths = pool.map(lambda name: _compile(compiler, folder, name), names)
        built = dict(zip(names, paths, strict=True))
    try:
        for name, path in built.items():
            _register(name, path)
    except NativeUnavailableError as error:
        raise NativeUnavailableError(f"what {command} made: {error}") from error
    logger.info("native kernels built seconds=%.1f", time.monotonic() - began_s)
    return built


def _compile(compiler: tuple[str, ...], folder: Path, name: str) -> Path:
    source, built = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text("".join(f'#include "{HERE / file}"\n' for file in LIBRARIES[name].sources))
    include = f"-I{jax.ffi.include_dir()}"
    _run(
        [*compiler, *FLAGS, include, "-shared", str(source), "-o", str(built)], timeout_s=TIMEOUT_S
    )
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


def _paths(cache_dir: Path, compiler: tuple[str, ...], names: Collection[str]) -> dict[str, Path]:
    """Returns where libraries are kept."""
    # What the compiler predefines tells its version and this machine's instructions.
    probe = [*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    macros = _run(probe, timeout_s=PROBE_TIMEOUT_S)
    words = b"\0".join(word.encode() for word in (*compiler, *FLAGS))
    headers = [
        *(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api").glob("*.h"),
        *HERE.glob("*.h"),
    ]
    paths = {}
    for name in names:
        hashed = hashlib.sha256(macros + words)
        for path in sorted([*headers, *(HERE / file for file in LIBRARIES[name].sources)]):
            hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        paths[name] = cache_dir / f"native-{name}-{hashed.hexdigest()[:16]}.so"
    return paths


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


def _load_kept(name: str, path: Path) -> bool:
    """Returns whether a library was kept, whole, and is loaded now."""
    try:
        kept = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
    try:
        if hashlib.sha256(kept[:-_DIGEST_BYTES]).digest() != kept[-_DIGEST_BYTES:]:
            raise NativeUnavailableError(f"{path} is damaged")
        _register(name, path)
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


def _register(name: str, path: Path) -> None:
    targets = LIBRARIES[name].targets
    try:
        library = ctypes.CDLL(str(path))
        functions = [getattr(library, target) for target in targets]
        join_team = library.jaxserve_join_team
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
    if _loaded:  # two teams of threads would keep each other from the cores
        join_team(next(iter(_loaded.values())).jaxserve_get_team)
    for target, function in zip(targets, functions, strict=True):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    _loaded[name] = library
