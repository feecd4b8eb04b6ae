"""Records what a live server is asked, as a workload: arrivals, lengths and sharing, no content."""

import dataclasses
import hashlib
import io
import logging
import os
import queue
import secrets
import threading
from array import array
from pathlib import Path
from typing import Final

from jaxserve.errors import ConfigError
from jaxserve.measure.workload.entry import (
    Header,
    Prompt,
    Recipe,
    Sampling,
    WorkloadEntry,
    dump_line,
    entry_facts,
)
from jaxserve.measure.workload.fields import header_facts
from jaxserve.measure.workload.file import WorkloadEnd, write_workload
from jaxserve.measure.workload.importing import import_workload
from jaxserve.measure.workload.traces import Counts
from jaxserve.measure.workload.values import MAX_SECONDS
from jaxserve.request import Request, SamplingParams

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 1024  # ended requests that wait for the writer
SALT_BYTES: Final = 32
KEY_CHARS: Final = 16  # 64 bits: two pages of a recording meet by chance once in 10^5 recordings
_NEUTRAL: Final = SamplingParams()
_RECORDED: Final = (
    "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RecordLimits:
    """What is kept: no more requests and bytes than these; the rest is counted."""

    max_entries: int
    max_bytes: int


class Recorder:
    """Takes the requests that end from the engine thread, which never waits for it.

    A thread writes them to PATH.recording as they end; `close` sorts that into PATH. Of a process
    that was killed PATH.recording stays, and `jaxserve workload import --format jaxserve` takes it.

    The page keys are SHA-256 of a salt that is never written, of the key before and of the page's
    tokens: equal keys are equal prefixes, and nobody can try out what the tokens were.
    """

    def __init__(
        self,
        path: Path,
        *,
        start_s: float,
        page_size: int,
        source: str,
        limits: RecordLimits,
        keeps_content: bool = False,
    ) -> None:
        """Starts the thread.

        Args:
          start_s: now, on the clock of the requests' arrivals.
          source: for the header.

        Raises:
          ConfigError: the file is there, or cannot be made.
        """
        check_path(path)
        self._path = path
        self._raw_path = _raw_path(path)
        self._start_s = start_s
        self._page_size = page_size
        self._limits = limits
        self._keeps_content = keeps_content
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._num_refused = 0  # the engine thread's
        self._counts = Counts()  # the writer's
        self._num_entries = 0
        self._queue: queue.SimpleQueue[tuple[Request, int] | None] = queue.SimpleQueue()
        header = Header(
            name=path.stem,
            prompts="fixed" if keeps_content else "unique",
            source=source,
            parameters={"page_size": page_size, "record_content": keeps_content},
        )
        try:
            self._file = _open_private(self._raw_path)
            self._num_bytes = self._file.write(dump_line(header_facts(header)))
        except OSError as error:
            raise ConfigError(f"measure.record_path {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._write_all, name="jaxserve-record", daemon=True)
        self._thread.start()

    def note(self, request: Request, num_output_tokens: int) -> None:
        """Takes a request that ended; returns at once, whatever the writer does."""
        if self._queue.qsize() >= MAX_QUEUED:
            self._num_refused += 1
            return
        self._queue.put((request, num_output_tokens))

    def close(self) -> WorkloadEnd | None:
        """Writes the workload; None where no request was recorded.

        Raises:
          WorkloadError: it cannot be written; PATH.recording stays.
        """
        self._queue.put(None)
        self._thread.join()
        if not self._num_entries:
            self._raw_path.unlink(missing_ok=True)
            return None
        if self._num_refused:
            self._counts["writer_too_slow"] = self._num_refused
        recorded = import_workload(self._raw_path)
        end = write_workload(
            self._path,
            recorded.header,
            recorded.entries,
            counts=self._counts + recorded.counts,
            mode=0o600,
        )
        self._raw_path.unlink()
        return end

    def _write_all(self) -> None:
        """The thread."""
        with self._file:
            while (noted := self._queue.get()) is not None:
                self._write(*noted)

    def _write(self, request: Request, num_output_tokens: int) -> None:
        if self._num_entries >= self._limits.max_entries:
            self._counts["over_record_max_entries"] += 1
            return
        line = dump_line(entry_facts(self._build_entry(request, num_output_tokens)))
        if self._num_bytes + len(line) > self._limits.max_bytes:
            self._counts["over_record_max_bytes"] += 1
        elif self._try_to_write(line):
            self._num_entries += 1
        else:
            self._counts["write_failed"] += 1

    def _try_to_write(self, line: bytes) -> bool:
        """Writes a line; a full disk costs the recording lines, and the server nothing."""
        try:
            if self._file.write(line) == len(line):
                self._num_bytes += len(line)
                return True
            self._file.truncate(self._num_bytes)  # a part of it went in
        except OSError as error:
            if not self._counts["write_failed"]:
                logger.warning("cannot record path=%s error=%s", self._raw_path, error.strerror)
        return False

    def _build_entry(self, request: Request, num_output_tokens: int) -> WorkloadEntry:
        sampling = _sampling_of(request.sampling)
        if not num_output_tokens:  # ended before its first token: nobody knows what it would be
            sampling = {**sampling, "max_tokens": request.max_tokens}
        deadline_s = None
        if request.deadline_s is not None:
            deadline_s = round(max(request.deadline_s - request.arrival_s, 1e-6), 6)
        return WorkloadEntry(
            index=0,
            at_s=round(max(request.arrival_s - self._start_s, 0.0), 6),
            prompt=self._build_prompt(request.prompt),
            wanted_tokens=num_output_tokens or None,
            deadline_s=None if deadline_s is None or deadline_s > MAX_SECONDS else deadline_s,
            priority=request.priority,
            sampling=sampling,
        )

    def _build_prompt(self, token_ids: tuple[int, ...]) -> Prompt:
        if self._keeps_content:
            return token_ids
        keys, chain = [], self._salt
        for end in range(self._page_size, len(token_ids) + 1, self._page_size):
            page = array("Q", token_ids[end - self._page_size : end]).tobytes()
            chain = hashlib.sha256(self._salt + chain + page).digest()
            keys.append(chain.hex()[:KEY_CHARS])
        block_tokens = self._page_size if keys else 0
        return Recipe(num_tokens=len(token_ids), block_tokens=block_tokens, blocks=tuple(keys))


def check_path(path: Path) -> None:
    """Refuses a path that a recording cannot go to.

    Raises:
      ConfigError: something is there, or its folder is not.
    """
    raw_path = _raw_path(path)
    if path.exists():
        raise ConfigError(f"measure.record_path {path} is there already; move it, or name another")
    if raw_path.exists():
        raise ConfigError(
            f"measure.record_path {path}: {raw_path.name} is there, a recording that another "
            "server writes or that was cut; `jaxserve workload import --format jaxserve` takes "
            "what is in it, then remove it"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"measure.record_path {path}: its folder is not there; make it")


def _raw_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.recording")


def _open_private(path: Path) -> io.FileIO:
    """Returns a new file that its owner alone may read, which writes each line at once."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    return io.FileIO(descriptor, "wb")


def _sampling_of(sampling: SamplingParams) -> Sampling:
    """Returns the numbers that cost time; no seed, no stop strings and no bias."""
    found: dict[str, bool | int | float] = {"temperature": sampling.temperature}
    for name in _RECORDED:
        value = getattr(sampling, name)
        if value != getattr(_NEUTRAL, name):
            found[name] = value
    return found
