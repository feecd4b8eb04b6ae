"""Entries of the persistent compilation cache: whole or not there, and never trusted unchecked.

JAX's own cache writes an entry in place and never replaces one: what a full disk or a killed
process left half written is compiled again, with a warning, at every start, and flipped bits may
run. Here an entry carries a checksum, appears by a rename, and a broken one is replaced.
"""

import hashlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final, override

from jax._src import compilation_cache as jax_cache  # no public way puts a cache of one's own there
from jax._src.compilation_cache_interface import CacheInterface

logger = logging.getLogger(__name__)

FORMAT: Final = "value + SHA-256 of key and value"
SUFFIX: Final = "-cache"
_TEMPORARY: Final = ".tmp"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_DAY_S: Final = 24 * 3600


class CacheEntries(CacheInterface):
    """One folder of entries, for all compile threads of a start. Says each kind of fault once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._lock = threading.Lock()
        self._has_said_broken = False
        self._can_write = True
        self._remove_leftovers()

    @override
    def get(self, key: str) -> bytes | None:
        """Returns the value, or None where there is none that is whole."""
        path = self._path / f"{key}{SUFFIX}"
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_broken(path, error.strerror or repr(error))
            return None
        value, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
        if digest != _digest(key, value):
            self._say_broken(path, "its checksum is wrong")
            return None
        return value

    @override
    def put(self, key: str, value: bytes) -> None:
        """Keeps the value, over a broken one too; gives up where it cannot be written."""
        if not self._can_write:
            return
        writer = f"{os.getpid()}.{threading.get_ident()}"  # a process may have several runners
        temporary = self._path / f".{key}.{writer}{_TEMPORARY}"
        try:
            temporary.write_bytes(value + _digest(key, value))
            temporary.replace(self._path / f"{key}{SUFFIX}")
        except OSError as error:
            self._give_up(error)
            temporary.unlink(missing_ok=True)

    def install(self) -> None:
        """Has JAX use these entries until its next `reset_cache`."""
        jax_cache._cache = self
        jax_cache._cache_initialized = True

    def _say_broken(self, path: Path, why: str) -> None:
        with self._lock:
            level = logging.DEBUG if self._has_said_broken else logging.WARNING
            self._has_said_broken = True
        logger.log(
            level,
            "compilation cache entry unusable, compiling it again file=%s reason=%r "
            "(further ones at log level debug)",
            path,
            why,
        )

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            is_first, self._can_write = self._can_write, False
        if is_first:
            logger.warning(
                "compiled programs cannot be kept folder=%s error=%r; going on without",
                self._path,
                error.strerror,
            )

    def _remove_leftovers(self) -> None:
        """Removes what processes that were killed while writing left behind."""
        for path in self._path.glob(f".*{_TEMPORARY}"):
            try:
                if path.stat().st_mtime < time.time() - _DAY_S:
                    path.unlink()
            except OSError:
                continue  # another start was faster


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()
