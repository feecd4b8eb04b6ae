"""Whole programs in the compilation cache: a start that finds them all traces nothing.

JAX's own cache is asked with a lowered program, and tracing and lowering it takes longer than
reading what was compiled. Here an entry is named by the program's key, and says in a digest all
that it was made from: one that was made from anything else is not looked into, and is replaced.
"""

import hashlib
import importlib.metadata
import pickle
import sys
from pathlib import Path
from typing import Final

import jax
from jax.experimental import serialize_executable

import jaxserve
from jaxserve.config import read_xla_flags
from jaxserve.runner.cache_entries import CacheEntries

MADE_BY: Final = ("jax", "numpy", "ml_dtypes", "flax")  # jaxlib and the machine name the folder
# Set while programs compile; they say where to keep them, not what they are.
_OWN_SETTINGS: Final = ("jax_compilation_cache_", "jax_persistent_cache_", "jax_raise_persistent_")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class ProgramStore:
    """Programs by the text of their keys, through the checksums and renames of `CacheEntries`."""

    def __init__(self, entries: CacheEntries) -> None:
        self._entries = entries
        self._origin = _digest_origin()

    def find(self, kind: str, key: str) -> jax.stages.Compiled | None:
        """Returns the program; None where none is kept that was made from the same.

        Args:
          key: all that distinguishes programs of the same code.
        """
        kept = self._entries.get(_name(kind, key))
        if kept is None or kept[:_DIGEST_BYTES] != self._digest(key):
            return None
        program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
            *pickle.loads(kept[_DIGEST_BYTES:])
        )
        return program

    def keep(self, kind: str, key: str, program: jax.stages.Compiled) -> None:
        """Keeps a program that this process compiled. One that it has read lacks functions when it
        is written again (jaxlib 0.12: "Function wrapped_broadcast not found" when it runs)."""
        kept = pickle.dumps(serialize_executable.serialize(program))
        self._entries.put(_name(kind, key), self._digest(key) + kept)

    def _digest(self, key: str) -> bytes:
        return hashlib.sha256(self._origin + key.encode()).digest()


def _name(kind: str, key: str) -> str:
    return f"program-{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _digest_origin() -> bytes:
    """Returns a digest of what a key's program depends on beside the key: our code, who traces it,
    and every setting of JAX."""
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if not name.startswith(_OWN_SETTINGS)
    }
    versions = [importlib.metadata.version(name) for name in MADE_BY]
    facts = (sys.version, *versions, read_xla_flags(), repr(sorted(settings.items())))
    hashed = hashlib.sha256("\0".join(facts).encode())
    root = Path(jaxserve.__file__).parent
    for path in sorted(root.rglob("*.py")):
        hashed.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return hashed.digest()
