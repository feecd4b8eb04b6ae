"""A judge's table: what was asked and what came back, and the rows where it disagrees.

The judges run under interpreters of their own, which have not this project's packages.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=Exception)
T = TypeVar("T")
WIDTH = 130  # of what a row shows


class Checks:
    """Prints a row for each check as it is made; `end` counts those that disagree."""

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._num_rows = 0
        self._num_faults = 0

    def holds(self, name: str, good: object, seen: object = "") -> None:
        """Adds a row that agrees where `good` is true."""
        self._num_rows += 1
        self._num_faults += not good
        text = " ".join(str(seen).split())
        text = text if len(text) <= WIDTH or not good else f"{text[:WIDTH]}…"
        print(f"{'ok' if good else 'DISAGREES':9}  {name:44}  {text}", flush=True)

    def same(self, name: str, got: object, wanted: object) -> None:
        good = got == wanted
        self.holds(name, good, repr(got) if good else f"got {got!r}, wanted {wanted!r}")

    def raises(self, name: str, kind: type[E], call: Callable[[], object]) -> E | None:
        """Adds a row that agrees where the call raises just this class; returns the error."""
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # of which class is the question
            good = type(error) is kind
            self.holds(name, good, f"{type(error).__name__}: {error}")
            return error if isinstance(error, kind) else None
        self.holds(name, False, f"no {kind.__name__}, but {result!r}")
        return None

    def part(self, judge: Callable[[T], object], on: T) -> None:
        """Runs a part of the judge; what it raises is a disagreement, and the others go on."""
        try:
            judge(on)
        except Exception as error:  # noqa: BLE001  # as the package puts it
            traceback.print_exc()
            self.holds(judge.__name__, False, f"{type(error).__name__}: {error}")

    def end(self) -> int:
        """Prints the count, and returns the exit code."""
        print(f"{self._judge}: {self._num_rows} checks, {self._num_faults} disagree")
        return int(self._num_faults > 0)
