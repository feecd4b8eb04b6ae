"""From the C++ files beside this one to functions that XLA can call: compiled once, then kept."""

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
from pathlib import Path
from typing import Final

import jax

from jaxserve.errors import JaxserveError

logger = logging.getLogger(__name__)

HERE: Final = Path(__file__).parent
SOURCES: Final = ("attention.cc", "dot.cc")
TARGETS: Final = ("jaxserve_paged_attention", "jaxserve_dot")
FLAGS: Final = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fno-exceptions", "-w")
COMPILERS: Final = ("c++", "g++", "clang++")
TIMEOUT_S: Final = 300.0

_loaded: dict[str, ctypes.CDLL] = {}  # a process registers its functions once


class NativeUnavailableError(JaxserveError):
    """There are no native kernels here; says why, and what would help."""


def load_native(cache_dir: Path | None) -> None:
    """Has XLA know the native kernels; compiles them where this machine has not done so yet.

    The library is kept in `cache_dir`, by a digest of the sources, jaxlib's headers, and what the
    compiler says of itself and of this machine.

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
    digest = _digest(compiler)
    path = None if cache_dir is None else cache_dir / f"native-{digest}.so"
    if path is not None and path.exists():
        try:
            _register(path)
        except NativeUnavailableError as error:
            logger.warning("native kernels are built again error=%s", error)
        else:
            return
    with tempfile.TemporaryDirectory(prefix="jaxserve-native-") as folder:
        built = Path(folder) / "native.so"
        began_s = time.monotonic()
        sources = [str(HERE / name) for name in SOURCES]
        _run([*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(built)])
        logger.info(
            "native kernels built compiler=%s seconds=%.1f",
            " ".join(compiler),
            time.monotonic() - began_s,
        )
        if path is not None:
            built = _keep(built, path)
        _register(built)


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of a C++ compiler: $CXX, the system's, or the extra's; None without."""
    if words := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(words[0]) is None:
            raise NativeUnavailableError(f"$CXX is {words[0]}, which is not there; mend it")
        return tuple(words)
    for name in COMPILERS:
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _digest(compiler: tuple[str, ...]) -> str:
    # What the compiler predefines tells its version and this machine's instructions.
    macros = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    headers = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api"
    hashed = hashlib.sha256(macros + b"\0".join(word.encode() for word in (*compiler, *FLAGS)))
    files = [*headers.glob("*.h"), *HERE.glob("*.h"), *map(HERE.joinpath, SOURCES)]
    for path in sorted(files):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def _run(command: Sequence[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
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


def _keep(built: Path, path: Path) -> Path:
    """Returns where the library is now: in the cache, or where it was if that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same at the same time: each makes a file, and the last stays.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="native-") as folder:
            shutil.copyfile(built, Path(folder) / path.name).replace(path)
    except OSError as error:
        logger.info("native kernels cannot be kept path=%s error=%r", path, error)
        return built
    return path


def _register(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))
        functions = [getattr(library, name) for name in TARGETS]
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
    for name, function in zip(TARGETS, functions, strict=True):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    _loaded[str(path)] = library
