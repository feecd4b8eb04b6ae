"""Workload files: JSON lines, the header first, then the entries, and last their count and hash."""

import collections
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
      counts: of lines left out, once the entries are through; "cut" is the last one of a file that
        was cut in it, where the caller does without an end.
      entries: may be read once; its last step raises WorkloadError where any line was bad or the
        hash is another.
    """

    header: Header
    end: WorkloadEnd | None
    entries: Iterator[WorkloadEntry]
    counts: collections.Counter[str]


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
      needs_end: False takes a file that was cut or written by hand, with its hash unchecked and
        its entries in any order.

    Raises:
      WorkloadError: it cannot be read, is no workload, was cut, or has bad lines; the message
        has the first one and the numbers of the others.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            end = _read_end(file)
            lines = Lines(file, path)
            header = _read_first(lines, path)
            if needs_end and end is None:
                raise WorkloadError(
                    f"{path}: its last line is not its end, so it was cut or written by hand; "
                    "`jaxserve workload import --format jaxserve` takes what is there"
                )
            counts: collections.Counter[str] = collections.Counter()
            if needs_end and end is not None:
                entries = _read_checked(lines, header, path, end)
            else:
                entries = _read_loose(lines, header, path, counts)
            yield OpenedWorkload(header=header, end=end, entries=entries, counts=counts)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from error


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
    mode: int = 0o666,
) -> WorkloadEnd:
    """Writes a file, which appears under its name only when all of it is written.

    Args:
      entries: by rising `at_s`; their `index` is not written.
      counts: for the last line; read when the entries are through, so that they may fill it.
      replace: whether a file of this name may be there.
      mode: of the file, less the process's mask.

    Raises:
      WorkloadError: the file is there, or cannot be written; or the entries raise it.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise WorkloadError(f"the output {path} is there already; --overwrite replaces it")
    part = path.with_name(f"{path.name}.part")
    content_hash, num_entries = ContentHash(header), 0
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
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


def _read_checked(
    lines: Lines, header: Header, path: Path, end: WorkloadEnd
) -> Iterator[WorkloadEntry]:
    content_hash, num_entries = ContentHash(header), 0
    last_s = 0.0
    problems = Problems(path)
    for number, found in _read_objects(lines, header):
        if isinstance(found, FieldError):
            problems.add(number, str(found))
        elif found.at_s < last_s:
            text = f"at_s is {found.at_s}, but the entry before has {last_s}; sort them"
            problems.add(number, text)
        else:
            last_s, num_entries = found.at_s, num_entries + 1
            content_hash.add(found)
            yield found
    problems.raise_any()
    _check_end(end, num_entries, content_hash.hexdigest(), path)


def _read_loose(
    lines: Lines, header: Header, path: Path, counts: collections.Counter[str]
) -> Iterator[WorkloadEntry]:
    problems = Problems(path)
    for number, found in _read_objects(lines, header):
        if not isinstance(found, FieldError):
            yield found
        elif lines.is_whole:
            problems.add(number, str(found))
        else:
            counts["cut"] += 1
    problems.raise_any()


def _read_objects(lines: Lines, header: Header) -> Iterator[tuple[int, WorkloadEntry | FieldError]]:
    """Yields each entry, or what is wrong with it, with its line."""
    index, has_ended = 0, False
    for number, line in lines:
        try:
            if has_ended:
                raise FieldError("it stands after the end; leave it out")
            found = parse_object(line)
            if found.keys() == {"end"}:
                has_ended = True
                continue
            entry = read_entry(found, index)
            _check_place(entry, header)
        except FieldError as error:
            yield number, error
            continue
        index += 1
        yield number, entry


def _check_place(entry: WorkloadEntry, header: Header) -> None:
    """Refuses what an entry of another header could have."""
    if header.arrivals == "closed" and entry.at_s:
        raise FieldError(f"at_s is {entry.at_s}, but in a closed loop it must be 0")
    if header.prompts == "unique" and not isinstance(entry.prompt, Recipe):
        kind = "text" if isinstance(entry.prompt, str) else "token_ids"
        raise FieldError(
            f"{kind} is the same in every run, but the header's prompts is unique; "
            "set that to fixed, or give prompt_tokens"
        )


def _check_end(end: WorkloadEnd, num_entries: int, content_hash: str, path: Path) -> None:
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
