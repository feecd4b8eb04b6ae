"""How far a benchmark is: a bar on a terminal, a line now and then elsewhere. On stderr."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import rich.console
import rich.progress

from jaxserve.measure.bench import Progress

LINE_INTERVAL_S: Final = 10.0


class BenchProgress:
    """Shows each phase until it is closed. A `with` block: a bar is cleared at its end."""

    def __init__(
        self, *, is_quiet: bool, title: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        title: in front of each phase, such as a point of a sweep.
        """
        self._is_quiet = is_quiet
        self._title = title
        self._clock = clock
        self._phase = ""
        self._began_s = self._shown_s = self._last_s = clock()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        if sys.stderr.isatty() and not is_quiet:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=rich.console.Console(stderr=True),
                transient=True,
                expand=True,
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(f"{self._title}no request has ended yet")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """A request has ended."""
        now_s = self._clock()
        if progress.phase != self._phase:
            # it began when the one before ended, not with its own first end
            self._phase, self._began_s, self._shown_s = progress.phase, self._last_s, now_s
        self._last_s = now_s
        text = self._describe(progress, now_s - self._began_s)
        if self._bar and self._task is not None:
            self._bar.update(
                self._task,
                completed=progress.num_ended,
                total=progress.num_all,
                description=text,
            )
            return
        is_due = now_s - self._shown_s >= LINE_INTERVAL_S or progress.num_ended == progress.num_all
        if not self._is_quiet and is_due:
            self._shown_s = now_s
            print(text, file=sys.stderr, flush=True)

    def _describe(self, progress: Progress, elapsed_s: float) -> str:
        parts = [f"{self._title}{progress.phase}: {progress.num_ended}/{progress.num_all} requests"]
        if progress.num_bad:
            parts.append(f"{progress.num_bad} not ok")
        if elapsed_s > 0:
            parts.append(f"{progress.num_tokens / elapsed_s:.0f} tokens/s")
        return " · ".join(parts)
