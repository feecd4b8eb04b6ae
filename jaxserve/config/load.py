"""Reads the configuration: defaults, then a file, then the environment, then flags; later wins."""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pydantic

from jaxserve.config.config import Config
from jaxserve.config.section import Section
from jaxserve.config.tenants import TenantLimits
from jaxserve.errors import ConfigError

ENV_PREFIX: Final = "JAXSERVE_"
JSON_HINT: Final = "lists and tables are JSON, such as [2, 8, 32]"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Origin:
    """Where a value comes from.

    Attributes:
      name: the file's path or the variable's name; empty for the other two.
    """

    kind: Literal["default", "file", "environment", "flag"]
    name: str = ""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Resolved:
    """A configuration, and where each of its keys (dotted) comes from."""

    config: Config
    origins: Mapping[str, Origin]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Source:
    """What one source says, as far as its keys are known; the rest is in `problems`."""

    where: str
    kind: Literal["file", "environment", "flag"]
    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, values: Mapping[str, Any]) -> None:
        """Takes the known keys of nested `values`, and notes the others as problems."""
        known = known_keys()
        for section, keys in values.items():
            if section not in Config.model_fields:
                hint = _did_you_mean(section, list(Config.model_fields))
                self.problems.append(f"{self.where}: unknown section {section}{hint}")
            elif not isinstance(keys, Mapping):
                self.problems.append(
                    f"{self.where}: {section} is {keys!r}, but must be a table of keys"
                )
            else:
                for key, value in keys.items():
                    self._add_key(f"{section}.{key}", value, known)

    def _add_key(self, dotted: str, value: object, known: list[str]) -> None:
        if dotted not in known:
            hint = _did_you_mean(dotted, known)
            self.problems.append(f"{self.where}: unknown key {dotted}{hint}")
            return
        section, _, key = dotted.partition(".")
        self.values.setdefault(section, {})[key] = value

    def origin(self, dotted: str) -> Origin:
        match self.kind:
            case "file":
                return Origin(kind="file", name=self.where)
            case "environment":
                return Origin(kind="environment", name=env_name(dotted))
            case "flag":
                return Origin(kind="flag")


def read_cxx() -> str:
    """Returns the C++ compiler that the environment names; "" where it names none."""
    return os.environ.get("CXX", "").strip()


def default_cache_dir() -> Path:
    """Returns jaxserve's folder in the user's cache folder (XDG_CACHE_HOME, else the system's)."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "jaxserve"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "jaxserve"


def load_config(
    path: Path | str | None = None, *, flags: Mapping[str, object] | None = None
) -> Config:
    """Returns the configuration: defaults, then the file, then `JAXSERVE_SECTION__KEY`, then flags.

    Args:
      path: a TOML file; None reads none.
      flags: dotted keys, `{"model.dtype": "float32"}`; None values are left out. A text is read as
        a variable's would be: a list as JSON.

    Raises:
      ConfigError: an unreadable file, an unknown key (with a did-you-mean) or a wrong value; one
        line that says where it stands, the key, the value and what is allowed.
    """
    return resolve_config(path, flags=flags).config


def resolve_config(
    path: Path | str | None = None, *, flags: Mapping[str, object] | None = None
) -> Resolved:
    """Returns what `load_config` does, with the origin of each value.

    Raises:
      ConfigError: as `load_config`.
    """
    sources = [_read_file(path)] if path else []
    sources += [_read_environment(), _read_flags(flags or {})]
    config, problems = _validate(sources)
    if config is None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    origins = dict.fromkeys(known_keys(), Origin(kind="default"))
    for source in sources:
        for section, keys in source.values.items():
            for key in keys:
                origins[f"{section}.{key}"] = source.origin(f"{section}.{key}")
    return Resolved(config=config, origins=origins)


def find_problems(path: Path | str) -> tuple[Config | None, list[str]]:
    """Returns the configuration of a file alone, or None and one line for each thing wrong."""
    return _validate([_read_file(path)])


def known_keys() -> list[str]:
    """Returns every key, dotted, in the order of the sections."""
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in section_type(field).model_fields
    ]


def env_name(dotted: str) -> str:
    """Returns the variable of a key: `JAXSERVE_SERVER__PORT` of `server.port`."""
    return f"{ENV_PREFIX}{dotted.replace('.', '__').upper()}"


def section_type(field: pydantic.fields.FieldInfo) -> type[Section]:
    """Returns the class of a section of `Config`."""
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, Section)
    return field.annotation


def _validate(sources: Sequence[_Source]) -> tuple[Config | None, list[str]]:
    problems = [problem for source in sources for problem in source.problems]
    merged: dict[str, dict[str, Any]] = {}
    for source in sources:
        for section, keys in source.values.items():
            merged.setdefault(section, {}).update(keys)
    config = None
    try:
        config = Config.model_validate(merged)
    except pydantic.ValidationError as error:
        problems += [_describe(details, sources) for details in error.errors()]
    return (None if problems else config), problems


def _read_file(path: Path | str) -> _Source:
    source = _Source(where=str(path), kind="file")
    try:
        source.add(tomllib.loads(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        match error:
            case OSError():
                problem = f"cannot be read: {error.strerror}"
            case tomllib.TOMLDecodeError() | UnicodeDecodeError():
                problem = f"is not valid TOML: {error}"
            case _:  # a NUL in the name
                problem = f"cannot be read: {error}"
        source.problems.append(f"config file {path} {problem}")
    return source


def _read_environment() -> _Source:
    """Returns what `JAXSERVE_SECTION__KEY` variables say; an empty one counts as unset."""
    import pydantic_settings  # lazily: a quarter of a second, and only commands read these

    source = _Source(where="environment", kind="environment")
    known = [env_name(key) for key in known_keys()]
    given = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX))
    for name in given:
        if name.upper() not in known:
            bare = [other.removeprefix(ENV_PREFIX) for other in known]  # the prefix is near to all
            hint = _did_you_mean(name.upper().removeprefix(ENV_PREFIX), bare, prefix=ENV_PREFIX)
            source.problems.append(f"environment: unknown variable {name}{hint}")

    class Settings(Config, pydantic_settings.BaseSettings):
        model_config = pydantic_settings.SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True
        )

    try:
        values = pydantic_settings.EnvSettingsSource(Settings)()
    except pydantic_settings.SettingsError:
        structured = [name for name in given if name.upper() in known and _is_json(_key_of(name))]
        among = ", ".join(f"{name}={os.environ[name]!r}" for name in structured)
        source.problems.append(f"environment: {among}: not JSON; {JSON_HINT}")
        return source
    keys = known_keys()  # the others were told above
    for section, found in values.items():
        if isinstance(found, Mapping):
            source.add({section: {key: found[key] for key in found if f"{section}.{key}" in keys}})
    return source


def _read_flags(flags: Mapping[str, object]) -> _Source:
    source = _Source(where="flags", kind="flag")
    for dotted, value in flags.items():
        if value is None:
            continue
        section, _, key = dotted.partition(".")
        if isinstance(value, str) and _is_json(dotted):
            try:
                value = json.loads(value)
            except ValueError:
                source.problems.append(f"flags: {dotted}={value!r}: not JSON; {JSON_HINT}")
                continue
        source.add({section: {key: value}})
    return source


def _key_of(variable: str) -> str:
    return variable.upper().removeprefix(ENV_PREFIX).replace("__", ".").lower()


def _is_json(dotted: str) -> bool:
    """Whether the key's value is a list or a table."""
    section, _, key = dotted.partition(".")
    with contextlib.suppress(KeyError):  # unknown: said elsewhere
        field = section_type(Config.model_fields[section]).model_fields[key]
        return isinstance(field.default, tuple | dict | Section)
    return False


def _did_you_mean(name: str, known: list[str], *, prefix: str = "") -> str:
    """Returns "; did you mean …?", or what there is when nothing is near.

    Args:
      prefix: that `name` and `known` lack, and the answer has.
    """
    # the last part counts too: `max_seqs` in the wrong section is still a near miss
    last = re.split(r"\.|__", name.lower())[-1]
    near = [other for other in known if re.split(r"\.|__", other.lower())[-1] == last]
    near = near or difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    if prefix:
        return "; `jaxserve config show` lists the keys"
    section = name.partition(".")[0]
    others = [other for other in known if other.startswith(f"{section}.")] or known
    return f"; known: {', '.join(others)}"


def _describe(details: Any, sources: Sequence[_Source]) -> str:  # noqa: ANN401  # pydantic's dict
    """Returns one error: `FILE: KEY is VALUE, but …`."""
    section, *rest = (str(part) for part in details["loc"])
    wanted = details["msg"].removeprefix("Value error, ")
    if not rest:  # keys that contradict each other; the last source that sets one is named
        where = [source.where for source in sources if section in source.values][-1]
        return f"{where}: {section}.{wanted}"
    where = [source.where for source in sources if rest[0] in source.values.get(section, {})][-1]
    if details["type"] == "extra_forbidden":  # in a table of a tenant: other keys were checked
        hint = _did_you_mean(rest[-1], list(TenantLimits.model_fields))
        return f"{where}: unknown key {'.'.join([section, *rest])}{hint}"
    wanted = wanted[0].lower() + wanted[1:]
    return f"{where}: {'.'.join([section, *rest])} is {details['input']!r}, but {wanted}"
