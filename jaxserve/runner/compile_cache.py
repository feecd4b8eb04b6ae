"""The persistent compilation cache: where it lies, and JAX's settings while programs compile."""

import contextlib
import hashlib
import logging
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.runner.cache_entries import FORMAT, CacheEntries
from jaxserve.runner.memory import read_cpu_flags

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def persistent_cache(root: Path | None) -> Iterator[CacheEntries | None]:
    """Has JAX keep what is compiled inside, however small, in a versioned folder under `root`.

    Gives the folder's entries, for what else is kept there; None where nothing is. A folder that
    cannot be used is a warning, never an error; so is an entry that cannot be read or kept
    (`CacheEntries`). JAX's own settings hold again afterwards.
    """
    folder = _usable_folder(root) if root else None
    if folder is None:
        yield None
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_raise_persistent_cache_errors": False,
        # a kept trace is the one that would be made, not one that an older JAX could read
        "jax_export_ignore_forward_compatibility": True,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    _apply(settings)
    entries = CacheEntries(folder)
    entries.install()
    try:
        yield entries
    finally:
        _apply(before)


def versioned_folder(root: Path) -> Path:
    """Returns the folder for this jaxlib, this kind of device and this machine's features: code
    compiled for other CPU features may not run here."""
    device = jax.devices()[0]
    facts = (
        FORMAT,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        device.client.platform_version,
        platform.machine(),
        *sorted(read_cpu_flags()),
    )
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
    return root / f"jaxlib-{jaxlib.version.__version__}-{device.platform}-{digest}"


def _usable_folder(root: Path) -> Path | None:
    folder = versioned_folder(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        logger.warning("compilation cache unusable folder=%s error=%r; compiling", folder, error)
        return None
    logger.info("compilation cache folder=%s", folder)
    return folder


def _apply(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the folder once, unless told
