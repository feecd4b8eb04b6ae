"""A peer's process: started, asked, stood still while others run, and ended whatever it does."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from bench.peer.absent import Absent
from bench.peer.usage import busy_s, group_cpu_s, peak_bytes, reset_peaks

TIMEOUT_S: Final = 1800.0  # of a start that compiles, on a slow machine
END_TIMEOUT_S: Final = 10.0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Run:
    """One batch.

    Attributes:
      others: CPU that anything else had meanwhile, as a share of the cores.
    """

    seconds: float
    output_ids: Sequence[Sequence[int]]
    others: float


@contextlib.contextmanager
def group_of(
    command: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path, log: TextIO, asked: bool
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command as the leader of a process group, which does not outlive the block.

    Args:
      asked: whether it is spoken to through pipes; else all it says goes to the log.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **env},
        cwd=cwd,
        stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
        stdout=subprocess.PIPE if asked else log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """Ends a group, kindly first; one that stands still is woken for it."""
    for end in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, end)
            os.killpg(process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Peer:
    """An adapter's process. Outside of `generate` it stands still and uses no CPU.

    Attributes:
      versions: of what runs.
      start_s: until it could be asked.
      start_peak_bytes: of memory until then.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Waits until it can be asked.

        Raises:
          Absent: it cannot.
        """
        self._process = process
        self._log = log
        began = time.perf_counter()
        self.versions: dict[str, str] = self._read()["ready"]
        self.start_s = time.perf_counter() - began
        self.start_peak_bytes = peak_bytes(process.pid)
        reset_peaks(process.pid)
        self._pause()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """Returns the greedy outputs of one batch.

        Raises:
          Absent: it died, or gave another number of tokens.
        """
        self._resume()
        began, busy, own = time.perf_counter(), busy_s(), group_cpu_s(self._process.pid)
        order = json.dumps({"prompts": prompts, "num_tokens": num_tokens})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says so too
            print(order, file=self._process.stdin, flush=True)
        answer = self._read()
        own = group_cpu_s(self._process.pid) - own
        others = (busy_s() - busy - own) / (time.perf_counter() - began) / (os.cpu_count() or 1)
        self._pause()
        lens = [len(ids) for ids in answer["output_ids"]]
        if lens != [num_tokens] * len(prompts):
            raise Absent(f"gave {sorted(set(lens))} tokens where {num_tokens} were asked for")
        return Run(seconds=answer["seconds"], output_ids=answer["output_ids"], others=others)

    def peak_bytes(self) -> int:
        """Returns the most memory since it could be asked."""
        return peak_bytes(self._process.pid)

    def _pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            end_group(self._process)  # it would go on beside those that are measured
            raise Absent(f"gave no answer in {TIMEOUT_S:g} s; {self._log} says more")
        line = self._process.stdout.readline()
        if not line:
            end_group(self._process)  # its children
            raise Absent(f"died: {last_line(self._log)} ({self._log} says more)")
        answer: dict[str, Any] = json.loads(line)
        return answer


def last_line(log: Path) -> str:
    """Returns the last line of a log that says anything."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
