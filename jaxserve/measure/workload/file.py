"""Workload files: JSON lines, the header first, then the entries, and last their count and hash."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload.entry import (
    ContentHash,
    Header,
    Recipe,
    Workload,
    WorkloadEntry,
    dump_line,
    entry_facts,
)
from jaxserve.measure.workload.fields import header_facts, read_entry, read_header
from jaxserve.measure.workload.lines import Lines, Problems
from jaxserve.measure.workload.values import FieldError, check_names, parse_object, shorten, whole

TAIL_BYTES: Final = 1 << 16  # the end is a short line
_END_FIELDS: Final = ("num_entries", "content_hash", "counts")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class WorkloadEnd:
    """The last line of a file, without which it was cut.

    Attributes:
      counts: what is not in the file, by reason: requests dropped by an import, say.
    """

    num_entries: int
    content_hash: str
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class OpenedWorkload:
    """A file that is being read.

    Attributes:
      end: None only where the caller does without.
      entries: may be read once; its last step raises WorkloadError where any line was bad or the
        hash is another.
    """

    header: Header
    end: WorkloadEnd | None
    entries: Iterator[WorkloadEntry]


def load_workload(path: Path | str) -> Workload:
    """Returns the whole workload.

    Raises:
      WorkloadError: as `open_workload`.
    """
    with open_workload(path) as opened:
        entries = tuple(opened.entries)
    assert opened.end is not None
    return Workload(header=opened.header, entries=entries, content_hash=opened.end.content_hash)


@contextlib.contextmanager
def open_workload(path: Path | str, *, needs_end: bool = True) -> Iterator[OpenedWorkload]:
    """Opens a file for reading entry by entry, whatever its size.

    Args:
      needs_end: False takes a file that was cut or written by hand, with its hash unchecked.

    Raises:
      WorkloadError: it cannot be read, is no workload, was cut, or has bad lines; the message
        has the first one and the numbers of the others.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            end = _read_end(file)
            if needs_end and end is None:
                raise WorkloadError(
                    f"{path}: its last line is not its end, so it was cut or written by hand; "
                    "`jaxserve workload import --format jaxserve` takes what is there"
                )
            lines = Lines(file, path)
            header = _read_first(lines, path)
            checked_end = end if needs_end else None
            entries = _read_entries(lines, header, path, end=checked_end)
            yield OpenedWorkload(header=header, end=end, entries=entries)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from error


def save_workload(workload: Workload, path: Path | str, *, replace: bool = False) -> None:
    """Writes the workload; see `write_workload`."""
    write_workload(path, workload.header, workload.entries, replace=replace)


def write_workload(
    path: Path | str,
    header: Header,
    entries: Iterable[WorkloadEntry],
    *,
    counts: Mapping[str, int] | None = None,
    replace: bool = False,
) -> WorkloadEnd:
    """Writes a file, which appears under its name only when all of it is written.

    Args:
      entries: by rising `at_s`; their `index` is not written.
      counts: for the last line; read when the entries are through, so that they may fill it.
      replace: whether a file of this name may be there.

    Raises:
      WorkloadError: the file is there, or cannot be written; or the entries raise it.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise WorkloadError(f"the output {path} is there already; --overwrite replaces it")
    part = path.with_name(f"{path.name}.part")
    content_hash, num_entries = ContentHash(header), 0
    try:
        with part.open("wb") as file:
            file.write(dump_line(header_facts(header)))
            for entry in entries:
                line = dump_line(entry_facts(entry))
                content_hash.add_line(line)
                num_entries += 1
                file.write(line)
            end = WorkloadEnd(
                num_entries=num_entries,
                content_hash=content_hash.hexdigest(),
                counts=dict(counts or {}),
            )
            file.write(dump_line({"end": dataclasses.asdict(end)}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return end


def _read_first(lines: Lines, path: Path) -> Header:
    first = next(iter(lines), None)
    if first is None:
        raise WorkloadError(f"{path} is empty, but a workload begins with its header")
    number, line = first
    try:
        return read_header(parse_object(line))
    except FieldError as error:
        raise WorkloadError(f"{path}, line {number}: {error}") from error


def _read_entries(
    lines: Lines, header: Header, path: Path, *, end: WorkloadEnd | None
) -> Iterator[WorkloadEntry]:
    problems = Problems(path)
    content_hash, index, last_s = ContentHash(header), 0, 0.0
    num_after_end: int | None = None
    for number, line in lines:
        try:
            if num_after_end is not None:
                raise FieldError("it stands after the end; leave it out")
            found = parse_object(line)
            if found.keys() == {"end"}:
                num_after_end = 0
                continue
            entry = read_entry(found, index)
            _check_place(entry, header, last_s)
        except FieldError as error:
            problems.add(number, str(error))
            continue
        index, last_s = index + 1, entry.at_s
        content_hash.add(entry)
        yield entry
    problems.raise_any()
    _check_end(end, index, content_hash.hexdigest(), path)


def _check_place(entry: WorkloadEntry, header: Header, last_s: float) -> None:
    """Refuses what the entry alone could have, but not here."""
    if entry.at_s < last_s:
        raise FieldError(f"at_s is {entry.at_s}, but the entry before has {last_s}; sort them")
    if header.arrivals == "closed" and entry.at_s:
        raise FieldError(f"at_s is {entry.at_s}, but in a closed loop it must be 0")
    if header.prompts == "unique" and not isinstance(entry.prompt, Recipe):
        kind = "text" if isinstance(entry.prompt, str) else "token_ids"
        raise FieldError(
            f"{kind} is the same in every run, but the header's prompts is unique; "
            "set that to fixed, or give prompt_tokens"
        )


def _check_end(end: WorkloadEnd | None, num_entries: int, content_hash: str, path: Path) -> None:
    if end is None:
        return
    fix = "it was changed; `jaxserve workload import --format jaxserve` takes it as it is"
    if end.num_entries != num_entries:
        raise WorkloadError(f"{path} has {num_entries} entries, not {end.num_entries}: {fix}")
    if end.content_hash != content_hash:
        raise WorkloadError(
            f"{path} has the content hash {content_hash[:12]}…, not {end.content_hash[:12]}…: {fix}"
        )


def _read_end(file: BinaryIO) -> WorkloadEnd | None:
    """Returns the last line where it is an end, and goes back to the start."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read().rstrip()
    file.seek(0)
    try:
        found = parse_object(tail[tail.rfind(b"\n") + 1 :])
        if found.keys() != {"end"} or not isinstance(found["end"], dict):
            return None
        end = found["end"]
        check_names(end, _END_FIELDS, prefix="end.")
        counts = end.get("counts", {})
        if not isinstance(end.get("content_hash"), str) or not isinstance(counts, dict):
            raise FieldError(f"end is {shorten(end)}, but needs num_entries and content_hash")
        return WorkloadEnd(
            num_entries=whole(end.get("num_entries"), "end.num_entries"),
            content_hash=end["content_hash"],
            counts={name: whole(count, f"end.counts.{name}") for name, count in counts.items()},
        )
    except FieldError:
        return None
