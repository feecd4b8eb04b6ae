"""The file of keys: one JSON object a line, with a digest in place of the key."""

import datetime
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

import pydantic

from jaxserve.config import check_tenant_name
from jaxserve.errors import ConfigError

KEY_PREFIX: Final = "jsk_"  # what scanners for leaked secrets can look for
NUM_KEY_BYTES: Final = 32
ID_LEN: Final = 12  # hexadecimal digits of the digest: what a key is called
MAX_KEYS: Final = 100_000
OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
OTHERS_MAY_READ: Final = stat.S_IRGRP | stat.S_IROTH
HEADER: Final = "# Keys of jaxserve, one JSON object a line: `jaxserve keys --help`.\n"


class Key(pydantic.BaseModel):
    """One line of the file. The key itself is nowhere but with its owner.

    A digest without salt does: a key is 256 random bits, which no list of guesses holds.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    tenant: str
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    name: str = pydantic.Field("", max_length=200)
    created: pydantic.AwareDatetime | None = None
    expires: pydantic.AwareDatetime | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        check_tenant_name(self.tenant)
        if not self.name.isprintable():
            raise ValueError("the name must be printable")
        return self

    @property
    def id(self) -> str:
        """What it is called in lists and logs."""
        return self.sha256[:ID_LEN]

    def is_expired(self, now: datetime.datetime) -> bool:
        return self.expires is not None and now >= self.expires


def digest(key: str) -> str:
    """Returns what the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def make_key(
    tenant: str, *, name: str = "", now: datetime.datetime, expires: datetime.datetime | None = None
) -> tuple[str, Key]:
    """Returns a new key and its line.

    Raises:
      ConfigError: no tenant can be called that.
    """
    text = f"{KEY_PREFIX}{secrets.token_urlsafe(NUM_KEY_BYTES)}"
    try:
        key = Key(tenant=tenant, sha256=digest(text), name=name, created=now, expires=expires)
    except pydantic.ValidationError as error:
        raise ConfigError(_describe(error)) from error
    return text, key


def read_keys(path: Path) -> tuple[Key, ...]:
    """Returns the keys of a file.

    Raises:
      ConfigError: it cannot be read, others may write it, or a line is wrong; names the line.
    """
    return tuple(key for _, key in _parse(_read(path), path))


def find_exposure(path: Path) -> str:
    """Returns who else can read the file, as a warning; empty where nobody can."""
    mode = path.stat().st_mode
    if not mode & OTHERS_MAY_READ:
        return ""
    return f"{path} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it"


def add_key(path: Path, key: Key) -> None:
    """Writes one more line; makes the file where there is none.

    Raises:
      ConfigError: as `read_keys`, or it cannot be written.
    """
    lines = _read(path) if path.exists() else HEADER
    _parse(lines, path)
    if lines and not lines.endswith("\n"):
        lines += "\n"
    line = json.dumps(key.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False)
    _write(path, f"{lines}{line}\n")


def remove_keys(path: Path, ids: Sequence[str]) -> tuple[Key, ...]:
    """Takes the keys with these ids out, and returns them; comments stay.

    Raises:
      ConfigError: as `read_keys`, an id is nobody's, or the file cannot be written.
    """
    text = _read(path)
    numbered = _parse(text, path)
    gone = {number: key for number, key in numbered if key.id in ids}
    if missing := sorted(set(ids) - {key.id for key in gone.values()}):
        raise ConfigError(
            f"{path} has no key {missing[0]}; `jaxserve keys list` shows the ids of all"
        )
    lines = text.splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, start=1) if number not in gone]
    _write(path, "".join(kept))
    return tuple(gone.values())


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the keys file {path} cannot be read: {cause}") from error
    if mode & OTHERS_MAY_WRITE:
        raise ConfigError(
            f"the keys file {path} can be written by others (mode {stat.S_IMODE(mode):o}), who "
            "could give themselves keys; chmod 600 it"
        )
    return text


def _parse(text: str, path: Path) -> list[tuple[int, Key]]:
    """Returns each key with the number of its line."""
    keys: list[tuple[int, Key]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = Key.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{path}, line {number}: {_describe(error)}") from error
        if key.sha256 in seen:
            raise ConfigError(
                f"{path}, line {number}: the key of line {seen[key.sha256]} again; remove one"
            )
        seen[key.sha256] = number
        keys.append((number, key))
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{path} holds {len(keys)} keys, but at most {MAX_KEYS} are read")
    return keys


def _describe(error: pydantic.ValidationError) -> str:
    """Returns what is wrong without the value: it may be a key that went astray."""
    details = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, details["loc"]))
    what = details["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def _write(path: Path, text: str) -> None:
    """Replaces the file at once, readable by its owner alone."""
    target = path.resolve()  # of a link, what it points at
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _keep_owner(target, name)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"the keys file {path} cannot be written: {error.strerror}") from error


def _keep_owner(target: Path, name: str) -> None:
    """Has a rewritten file stay readable for whom it was: a server that runs as another user."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return  # a new one is 0600, as mkstemp made it
    os.chmod(name, stat.S_IMODE(old.st_mode) & ~OTHERS_MAY_WRITE)
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(name, old.st_uid, old.st_gid)


def tenants_of(keys: Iterable[Key]) -> frozenset[str]:
    """Returns whose keys these are."""
    return frozenset(key.tenant for key in keys)
