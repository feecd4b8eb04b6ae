"""Typed reads of an architecture's keys in a GGUF file, which notice the keys that nobody read."""

import numpy as np

from jaxserve.checkpoint.gguf_file import GgufFile
from jaxserve.errors import CheckpointError


class GgufKeys:
    """The keys of the file's architecture, by their names without its prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.where, self._prefix = file, str(file.path), f"{architecture}."
        self._read: set[str] = set()

    def value(self, name: str) -> object:
        """Returns a key's value, or None where it is absent; it then counts as read."""
        self._read.add(name)
        return self.file.metadata.get(self._prefix + name)

    def unread(self) -> dict[str, object]:
        """Returns what nobody asked for."""
        mine = {
            key.removeprefix(self._prefix): value
            for key, value in self.file.metadata.items()
            if key.startswith(self._prefix)
        }
        return {name: mine[name] for name in sorted(mine.keys() - self._read)}

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.wrong(name, value, "a whole number, the same for all layers")

    def number(self, name: str, default: float | None = None) -> float:
        """Returns the shortest decimal of this float32: 1e-05, as the model's makers wrote it."""
        value = self._get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(str(np.float32(value)))
        raise self.wrong(name, value, "a number")

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {self._prefix}{name} is {value!s:.200}, but must be {wanted}"
        )

    def _get(self, name: str, default: object) -> object:
        value = self.value(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} lacks the key {self._prefix}{name}")
        return value
