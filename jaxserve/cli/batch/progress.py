"""How far a batch is: a bar on a terminal, a line now and then elsewhere. On stderr."""

import dataclasses
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import rich.console
import rich.progress

LINE_INTERVAL_S: Final = 10.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """What has come of the lines so far.

    Attributes:
      num_lines: of the output, those of earlier runs among them.
      num_failed: of these.
      num_earlier: of these, what earlier runs did.
      num_tokens: that this run generated.
    """

    num_lines: int = 0
    num_failed: int = 0
    num_earlier: int = 0
    num_tokens: int = 0


class BatchProgress:
    """Shows the counts until it is closed. A `with` block: a bar is cleared at its end."""

    def __init__(
        self,
        counts: Counts,
        *,
        num_all: int | None,
        is_quiet: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        num_all: lines of the input; None where nobody can know.
        """
        self._counts = counts
        self._num_all = num_all
        self._is_quiet = is_quiet
        self._clock = clock
        self._started_s = self._shown_s = clock()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        if sys.stderr.isatty() and not is_quiet:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.description}"),
                console=rich.console.Console(stderr=True),
                transient=True,
                expand=True,
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self._describe(), total=self._num_all)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def show(self) -> None:
        """The counts have changed."""
        if self._bar and self._task is not None:
            self._bar.update(
                self._task, completed=self._counts.num_lines, description=self._describe()
            )
        elif not self._is_quiet and self._clock() - self._shown_s >= LINE_INTERVAL_S:
            self._shown_s = self._clock()
            print(self._describe(), file=sys.stderr, flush=True)

    def _describe(self) -> str:
        """Returns the counts in one line that fits beside a bar in 80 columns."""
        counts, elapsed_s = self._counts, max(self.elapsed_s, 1e-9)
        of_all = "" if self._num_all is None else f"/{self._num_all}"
        parts = [f"{counts.num_lines}{of_all} lines"]
        if counts.num_failed:
            parts.append(f"{counts.num_failed} failed")
        parts.append(f"{counts.num_tokens / elapsed_s:.0f} tokens/s")
        num_new = counts.num_lines - counts.num_earlier
        if self._num_all is not None and num_new:
            left_s = elapsed_s / num_new * (self._num_all - counts.num_lines)
            parts.append(f"{format_time(left_s)} left")
        return " · ".join(parts)


def format_time(seconds: float) -> str:
    """Returns 0:07, 12:34 or 1:23:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
