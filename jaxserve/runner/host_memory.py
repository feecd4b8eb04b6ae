"""How much memory this process may use of the machine: what is there, less what limits it."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def read_host_memory_bytes() -> int:
    """Returns the least of the machine's memory, its control group's and the process's limit."""
    return min(machine_bytes(), *container_limits(), *process_limits())


def machine_bytes() -> int:
    """Returns the memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_limits() -> Iterator[int]:
    """Yields the limit of the address space, where one is set (`ulimit -v`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit


def container_limits(*, groups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[int]:
    """Yields the limits of the process's control group and of those it lies in, as a container's.

    Of versions 1 and 2; nothing where there are none, or where they may not be read.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for folder in (path, *path.parents):
            try:
                text = (root / folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # not "max"
                yield int(text)
