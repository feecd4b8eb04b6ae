"""Lines of a file by number, and the account of those that are bad."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal

from jaxserve.errors import WorkloadError

MAX_LINE_BYTES: Final = 64 << 20
MAX_PROBLEMS: Final = 1000  # kept in full: a file of another format has one on each line
NUM_NAMED: Final = 5


class Lines:
    """The lines that are not blank, each with its number from 1; in memory for one.

    Attributes:
      number: of the line read last.
      is_whole: whether that line has its end; the last one of a file that was cut has not.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.number = 0
        self.is_whole = True

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            self.number += 1
            self.is_whole = line.endswith(b"\n")
            if len(line) > MAX_LINE_BYTES:
                raise WorkloadError(
                    f"{self._path}, line {self.number}: it is longer than {MAX_LINE_BYTES} bytes"
                )
            if line.strip():
                yield self.number, line


class Problems:
    """Bad lines of one file, or bad items of one that has no lines."""

    def __init__(self, path: Path, *, word: Literal["line", "item"] = "line") -> None:
        self._path = path
        self._word = word
        self._found: list[tuple[int, str]] = []
        self._num_found = 0

    def add(self, number: int, text: str) -> None:
        self._num_found += 1
        if len(self._found) < MAX_PROBLEMS:
            self._found.append((number, text))

    def raise_any(self) -> None:
        """Raises:
        WorkloadError: there was one; its message is one line.
        """
        if not self._found:
            return
        problems = tuple(
            f"{self._path}, {self._word} {number}: {text}" for number, text in self._found
        )
        others = [str(number) for number, _ in self._found[1 : NUM_NAMED + 1]]
        message = problems[0]
        if others:
            more = "" if self._num_found <= NUM_NAMED + 1 else ", …"
            message += f" (and {self._num_found - 1} more: {self._word}s {', '.join(others)}{more})"
        raise WorkloadError(message, problems=problems)
