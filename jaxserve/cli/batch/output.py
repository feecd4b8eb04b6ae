"""The output of a batch: OUT.partial while it grows, OUT when it is complete; one process's own."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from jaxserve.errors import BatchError

SYNC_INTERVAL_S: Final = 5.0  # what a power failure may cost; a killed process costs nothing


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Job:
    """What decides every token of an output; it stands in OUT.job while OUT is not complete.

    Attributes:
      input_sha256: of all the input; empty for a stream.
      seed: of the run.
      model: facts of the model; empty until it is loaded.
    """

    input_sha256: str
    seed: int
    model: dict[str, object] = dataclasses.field(default_factory=dict)

    def find_difference(self, other: "Job") -> str:
        """Returns in what the two differ; empty where they agree."""
        if not (self.input_sha256 and other.input_sha256):
            return "a stream cannot be read twice"
        if self.input_sha256 != other.input_sha256:
            return "the input has changed"
        if self.seed != other.seed:
            return f"--seed was {other.seed} and is {self.seed}"
        if self.model and other.model:
            for name, value in self.model.items():
                if value != other.model.get(name):
                    return f"the model's {name} was {other.model.get(name)!r} and is {value!r}"
        return ""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class DoneLine:
    """A line of the output that an earlier run has finished."""

    custom_id: str | None
    has_failed: bool


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class _Stored:
    """What OUT.job holds.

    Attributes:
      inode: of OUT.partial, and of OUT when it has got its name.
      is_replacing: whether an older OUT was there, to be replaced.
    """

    job: Job
    inode: int
    is_replacing: bool


def find_output(name: str) -> Path:
    """Returns the path of the file to write: what a link leads to, so that the link stays.

    Raises:
      BatchError: it cannot be a file, or it is something that must not be replaced by one.
    """
    if not name:
        raise BatchError("the output has no name; name a file, or - for stdout")
    path = Path(name)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.is_dir():
        raise BatchError(f"the output {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise BatchError(f"the output {path} is a pipe or a device; use -o - and redirect stdout")
    return path


class OutputFile:
    """Holds OUT.partial, locked, and gives it OUT's name when it is complete.

    Invariant: what is in OUT.partial are whole lines, in the input's order, and at most one torn
    line that the next run cuts off. OUT.job says what they were made of.

    Attributes:
      is_complete: an earlier run has finished OUT, and was killed before it could tidy up.
      done: lines that were there when it was opened.
    """

    def __init__(
        self, path: Path, *, overwrite: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the lock.

        Raises:
          BatchError: another process writes the same output, or it cannot be made.
        """
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.is_complete = False
        self.done: list[DoneLine] = []
        self._job_path = path.with_name(f"{path.name}.job")
        self._overwrite = overwrite
        self._job: Job | None = None
        self._clock = clock
        self._num_bytes = 0  # of whole lines
        self._synced_s = clock()
        self._fd = self._lock()

    def open(self, job: Job) -> None:
        """Finds out what is done already, and makes ready to go on behind it.

        Raises:
          BatchError: OUT is there already, or what is there belongs to another job.
        """
        stored = self._read_stored()
        has_lines = os.fstat(self._fd).st_size > 0
        difference = job.find_difference(stored.job) if stored else "it has no .job file beside it"
        is_there = self.path.exists()
        if stored and is_there and stored.inode == os.stat(self.path).st_ino and not difference:
            self.is_complete = True  # it was killed between its last two steps
            self.done = [line for line, _ in _read_done(self.path)]
            self._tidy()
            return
        can_resume = stored is not None and has_lines and not difference
        is_expected = can_resume and stored is not None and stored.is_replacing
        if is_there and not is_expected and not self._overwrite:
            raise BatchError(f"the output {self.path} is there already; --overwrite replaces it")
        if has_lines and not can_resume:
            self._give_up(difference)
        if can_resume and stored is not None:
            self._resume()
            job = dataclasses.replace(job, model=stored.job.model)
        self._save(job)

    def _give_up(self, difference: str) -> None:
        """Drops the lines of another job, where that was asked for."""
        if not self._overwrite:
            raise BatchError(
                f"{self.partial} cannot be resumed: {difference}; run it as before, or start over "
                "with --overwrite"
            )
        self._truncate(0)
        self.done = []

    def set_model(self, model: dict[str, object]) -> None:
        """Adds the facts of the model.

        Raises:
          BatchError: the lines that are done are of another model.
        """
        assert self._job is not None, "opened first"
        job = dataclasses.replace(self._job, model=model)
        if self.done and (difference := job.find_difference(self._job)):
            self._give_up(difference)
        self._save(job)

    def append(self, line: bytes) -> None:
        """Adds a whole line; where it does not fit, `close` takes back what there is of it.

        Raises:
          BatchError: the disk is full, or the file has become too large.
        """
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._num_bytes += len(line)
            if self._clock() - self._synced_s > SYNC_INTERVAL_S:
                self.sync()
        except OSError as error:
            raise BatchError(f"cannot write {self.partial}: {error.strerror}") from error

    def sync(self) -> None:
        """Has the disk keep what was written so far."""
        os.fsync(self._fd)
        self._synced_s = self._clock()

    def finish(self) -> None:
        """Gives the file its name; from here on it is complete, whatever happens."""
        self.sync()
        os.rename(self.partial, self.path)
        self.is_complete = True
        self._tidy()

    def close(self) -> None:
        """Lets go of the file; what is done stays for the next run."""
        if self._fd < 0:
            return
        if not self.is_complete:
            if self._job is not None:
                self._truncate(self._num_bytes)  # the last line may be torn
            if os.fstat(self._fd).st_size == 0:
                self._tidy()  # nothing is done
            with contextlib.suppress(OSError):  # of a full disk there was word before
                self.sync()
        os.close(self._fd)
        self._fd = -1

    def _lock(self) -> int:
        """Returns the locked file. The lock is the kernel's: it ends with the process."""
        while True:
            try:
                fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise BatchError(f"cannot write {self.partial}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # it may have been renamed or deleted between the two calls
                if os.stat(self.partial).st_ino == os.fstat(fd).st_ino:
                    return fd
                os.close(fd)
            except FileNotFoundError:
                os.close(fd)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise BatchError(
                        f"another process writes {self.path} (it holds {self.partial}); "
                        "wait for it, or write to another file"
                    ) from error
                raise BatchError(f"cannot lock {self.partial}: {error.strerror}") from error

    def _read_stored(self) -> "_Stored | None":
        """Returns what OUT.job says; None where it is not there, or is not whole."""
        try:
            fields = json.loads(self._job_path.read_bytes())
            return _Stored(job=Job(**fields.pop("job")), **fields)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # as good as none: nothing can be resumed with it

    def _save(self, job: Job) -> None:
        """Writes OUT.job, whole or not at all."""
        self._job = job
        stored = _Stored(job=job, inode=os.fstat(self._fd).st_ino, is_replacing=self.path.exists())
        new = self._job_path.with_name(f"{self._job_path.name}.new")
        try:
            with new.open("w") as file:
                json.dump(dataclasses.asdict(stored), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, self._job_path)
        except OSError as error:
            raise BatchError(f"cannot write {self._job_path}: {error.strerror}") from error
        self._sync_folder()

    def _resume(self) -> None:
        """Counts the whole lines, and cuts off what stands behind them."""
        self.done = []
        num_bytes = 0
        for line, num_line_bytes in _read_done(self.partial):
            num_bytes += num_line_bytes
            self.done.append(line)
        self._truncate(num_bytes)

    def _truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)
        os.lseek(self._fd, num_bytes, os.SEEK_SET)
        self._num_bytes = num_bytes

    def _tidy(self) -> None:
        """Removes what only an unfinished output needs."""
        self._sync_folder()
        if self.is_complete or self._job is not None:
            self._job_path.unlink(missing_ok=True)
        if self.partial.exists() and os.stat(self.partial).st_ino == os.fstat(self._fd).st_ino:
            self.partial.unlink()

    def _sync_folder(self) -> None:
        fd = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot
                os.fsync(fd)
        finally:
            os.close(fd)


def _read_done(path: Path) -> Iterator[tuple[DoneLine, int]]:
    """Yields whole lines with their bytes, up to the first that is not one of ours.

    After a power failure a file may end in zeros, not only in half a line.
    """
    with path.open("rb") as file:
        for content in file:
            try:
                whole = json.loads(content if content.endswith(b"\n") else b"")
                custom_id, error = whole["custom_id"], whole["error"]
            except (ValueError, LookupError, TypeError):
                return
            yield DoneLine(custom_id=custom_id, has_failed=error is not None), len(content)
