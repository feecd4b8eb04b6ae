"""What long work shows on stderr: a bar on a terminal, a line per phase elsewhere."""

import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import rich.console
import rich.progress

# The phases of engine/start.py, with the unit of their parts.
START_TITLES: Final = {"load": "weights read, MiB", "compile": "programs compiled"}


class StartProgress:
    """Shows the phases of one piece of work until it is closed. Never writes to stdout.

    A `with` block: whatever was drawn is cleared at its end, so that the output follows cleanly.
    """

    def __init__(self, *, is_quiet: bool = False, titles: Mapping[str, str] = START_TITLES) -> None:
        """Args:
        titles: what each phase is called, with the unit of its parts.
        """
        self._is_quiet = is_quiet
        self._titles = titles
        self._lock = threading.Lock()  # weights load in one thread, programs compile in others
        console = rich.console.Console(stderr=True)
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty() and not is_quiet:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                console=console,
                transient=True,
            )
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._printed: set[str] = set()  # parts may be rounded: the last can come more than once

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            for phase, title in self._titles.items():
                self._tasks[phase] = self._bar.add_task(title, total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, phase: str, num_done: int, num_all: int) -> None:
        """Says that `num_done` of `num_all` parts of `phase` are done."""
        with self._lock:
            if self._bar:
                self._bar.update(self._tasks[phase], completed=num_done, total=num_all)
            elif not self._is_quiet and num_done == num_all and phase not in self._printed:
                self._printed.add(phase)
                print(
                    f"{self._titles[phase]}: {num_done} of {num_all}", file=sys.stderr, flush=True
                )
