"""What a process group uses of the machine, as Linux counts it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
GROUP, USER_TICKS, SYSTEM_TICKS = 4, 13, 14  # fields of /proc/PID/stat, the first being 0
IDLE: Final = (3, 4)  # idle and iowait, of the fields of /proc/stat after its name
COUNTED: Final = 8  # those after steal are in the ones before
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def parse_process(text: str) -> tuple[int, float]:
    """Returns group and CPU seconds of a process, of its /proc/PID/stat.

    The command stands second, in brackets, and may hold anything: 7 (a) b) S 1 7 ….
    """
    command_end = text.rindex(")")
    fields = ["", "", *text[command_end + 1 :].split()]
    return int(fields[GROUP]), TICK_S * (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]))


def parse_busy_s(text: str) -> float:
    """Returns the seconds that all cores have been busy, or taken away, of /proc/stat."""
    ticks = [int(field) for field in text.splitlines()[0].split()[1 : 1 + COUNTED]]
    return TICK_S * sum(count for place, count in enumerate(ticks) if place not in IDLE)


def parse_peak_bytes(text: str) -> int:
    """Returns the largest resident set of a process, of its /proc/PID/status; 0 of a dead one."""
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0


def busy_s() -> float:
    return parse_busy_s((PROC / "stat").read_text())


def group_cpu_s(group: int) -> float:
    """Returns the CPU seconds of what lives of a group."""
    return sum(seconds for _, seconds in _processes(group))


def peak_bytes(group: int) -> int:
    """Returns the sum of the processes' own peaks, which may not have been at one time."""
    total = 0
    for process, _ in _processes(group):
        with contextlib.suppress(OSError):
            total += parse_peak_bytes((process / "status").read_text())
    return total


def reset_peaks(group: int) -> None:
    """Lets peaks begin anew at what is resident now."""
    for process, _ in _processes(group):
        with contextlib.suppress(OSError):
            (process / "clear_refs").write_text("5")


def _processes(group: int) -> Iterator[tuple[Path, float]]:
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            found, seconds = parse_process((folder / "stat").read_text())
            if found == group:
                yield folder, seconds
