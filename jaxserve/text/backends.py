"""Reads a tokenizer.json, and names what the `tokenizers` library raises."""

from pathlib import Path
from types import TracebackType

import tokenizers

from jaxserve.errors import CheckpointError


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`.

    Raises:
      CheckpointError: the file is missing or is not a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read the tokenizer {path}: {error}; a model folder needs its tokenizer.json"
        ) from error
    with naming_library_errors(f"{path} is not a tokenizer that the tokenizers library knows"):
        return tokenizers.Tokenizer.from_str(text)


class naming_library_errors:  # noqa: N801  (used as a function)
    """Turns the bare `Exception` that the tokenizers library raises into a `CheckpointError`.

    It raises no class of its own, and an `except Exception` would take in everything else.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind in (Exception, ValueError, TypeError):
            raise CheckpointError(f"{self._what}: {error}") from error
