"""What was traced, kept beside what was compiled: a later start neither traces nor lowers it.

JAX's compilation cache is asked with a lowered program, and to trace and lower one takes as long as
to read what it was compiled to. A trace is kept as StableHLO, by `jax.export`: it is data, and can
call nothing of Python.
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import flax
import jax
import numpy as np
from jax import export

import jaxserve
from jaxserve.kernels.dot import PackedWeight
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.pool import QuantizedPool
from jaxserve.model.sampling import SamplingRows
from jaxserve.runner.cache_entries import CacheEntries
from jaxserve.runner.lowering import ProgramKey, ProgramSource, build_source, lower
from jaxserve.runner.native_build import TARGETS
from jaxserve.runner.state import RowState

logger = logging.getLogger(__name__)

# Those that can be kept: the others call Python where they are simulated, and where they are not
# nobody has compared what a GPU makes of a kept one.
_KEPT_ATTENTION: Final[frozenset[Impl]] = frozenset({"native", "reference", "xla"})

# The one setting of JAX that names a place and no more: a cache folder may be moved.
_FOLDER_SETTING: Final = "jax_compilation_cache_dir"

_IMPORTED_S: Final = time.time()

for _node in (PackedWeight, QuantizedPool, RowState, SamplingRows):
    export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jaxserve.{_node.__name__}",
        serialize_auxdata=lambda _: b"",  # they are made of arrays alone
        deserialize_auxdata=lambda _: (),
    )


def lower_or_read(key: ProgramKey, entries: CacheEntries | None) -> jax.stages.Lowered:
    """Returns the program as `lower` does: from what is kept of it, or traced, and then kept.

    Args:
      entries: what is kept; None keeps nothing.
    """
    if entries is None or not _can_keep(key):
        return lower(key)
    source = build_source(key)
    name = f"trace_{source.function.__name__}-{_digest(key)}"
    stored = entries.get(name)
    exported = None if stored is None else _read(stored, key)
    if exported is None:
        exported = _trace(source)
        entries.put(name, bytes(exported.serialize()))
    call: Callable[..., Any] = exported.call

    def run(*arguments: Any) -> Any:  # noqa: ANN401  # as the program's
        return call(*arguments)

    run.__name__ = source.function.__name__  # what JAX calls it in logs and in its own cache
    return jax.jit(run, donate_argnums=source.donated).lower(*source.arguments)


def _can_keep(key: ProgramKey) -> bool:
    is_keepable = jax.default_backend() == "cpu" and key.spec.kernels.attention in _KEPT_ATTENTION
    return is_keepable and _digest_of_package() is not None


def _trace(source: ProgramSource) -> export.Exported:
    # Our own may change from version to version; a trace is read by the very package that kept it.
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    return export.export(source.jit(), disabled_checks=checks)(*source.arguments, **source.static)


def _read(stored: bytes, key: ProgramKey) -> export.Exported | None:
    try:
        exported: export.Exported = export.deserialize(bytearray(stored))
        return exported
    except Exception as error:  # noqa: BLE001  # whatever is wrong with it, it can be made again
        logger.warning("kept trace unusable program=%r error=%r; tracing", key.name, error)
        return None


def _digest(key: ProgramKey) -> str:
    """Of all that a trace depends on: the program, JAX and its settings, and this package."""
    settings = sorted(
        (name, repr(value)) for name, value in jax.config.values.items() if name != _FOLDER_SETTING
    )
    versions = (
        jax.__version__,
        np.__version__,
        flax.__version__,
    )  # those that a trace is made with
    facts = (repr(key), *versions, repr(settings), str(_digest_of_package()))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


@functools.cache
def _digest_of_package() -> str | None:
    """Of every source file: what may change a trace is not told apart from the rest. None where
    there are none, as in a zip file, and where one has changed since it was imported: what runs
    here is then not what would be hashed."""
    root = Path(jaxserve.__file__).parent
    digest, paths = hashlib.sha256(), sorted(root.rglob("*.py"))
    if not paths:
        return None
    for path in paths:
        if path.stat().st_ctime > _IMPORTED_S:
            logger.info("traces are not kept, a source file has changed since file=%s", path)
            return None
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
