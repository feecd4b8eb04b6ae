"""The configuration: one frozen pydantic model, read from TOML, then environment, then flags.

Without a file the defaults below hold; they equal `configs/cpu.toml`, where each number says where
it was measured. Nothing here is changed after start-up.
"""

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxserve.errors import ConfigError

ENV_PREFIX = "JAXSERVE_"
GIB = 1 << 30
MIB = 1 << 20


class Section(pydantic.BaseModel):
    """A table of the file: frozen, finite, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSection(Section):
    """The model as it is served."""

    dtype: Literal["auto", "float32", "bfloat16"] = pydantic.Field(
        "auto",
        description="Weights and activations. auto: bfloat16 where the machine is fast at it.",
    )
    max_model_tokens: int | None = pydantic.Field(
        None, ge=2, description="Longest prompt + output. Unset: min(model, pool)."
    )


class KVSection(Section):
    """The paged KV pool."""

    page_size: int = pydantic.Field(16, ge=1, le=1024, description="Tokens of a page.")
    dtype: Literal["auto", "float32", "bfloat16"] = pydantic.Field(
        "auto", description="auto: the model's dtype."
    )
    pool_bytes: int | None = pydantic.Field(
        None, ge=1, description="Bytes of the pool. Unset: 1 GiB on CPU, what is free elsewhere."
    )
    num_pages: int | None = pydantic.Field(
        None, ge=2, description="Pages of the pool, page 0 (padding) among them; over pool_bytes."
    )
    reserve: Literal["on_demand", "max_length"] = pydantic.Field(
        "on_demand",
        description="When a sequence takes its pages: as it grows, or all at admission (ablation).",
    )


class SchedulerSection(Section):
    """Which requests run, and how many tokens a step computes."""

    batching: Literal["continuous", "static"] = pydantic.Field(
        "continuous", description="static: a new batch only when the last one is done (ablation)."
    )
    chunked_prefill: bool = pydantic.Field(
        True, description="Split prompts over steps, beside decoding rows."
    )
    max_seqs: int = pydantic.Field(32, ge=1, le=4096, description="Sequences running at once.")
    max_chunks: int = pydantic.Field(
        4, ge=1, le=64, description="Sequences that compute more than one token in one step."
    )
    max_step_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Token budget of a step. Unset: max_seqs + the largest chunk bucket.",
    )


class BucketsSection(Section):
    """The padded shapes that are compiled at start-up."""

    decode_seqs: tuple[int, ...] = pydantic.Field(
        (2, 4, 8, 16, 32), description="One-token rows; max_seqs is always added."
    )
    chunk_tokens: tuple[int, ...] = pydantic.Field(
        (64, 128, 256), description="Prompt tokens of a step; the largest is the chunk size."
    )
    chunk_decode_seqs: tuple[int, ...] = pydantic.Field(
        (8,), description="Decode sizes that chunks are combined with; max_seqs is always added."
    )
    chunk_tile: int = pydantic.Field(
        16, ge=1, le=256, description="Chunks are laid out in tiles of this many tokens."
    )
    capture: bool = pydantic.Field(
        True, description="Off: one maximal bucket of each kind (ablation)."
    )

    @pydantic.field_validator("decode_seqs", "chunk_tokens", "chunk_decode_seqs", mode="before")
    @classmethod
    def _expand_geometric(cls, sizes: object) -> object:
        """`{first = 2, last = 32, ratio = 2}` stands for [2, 4, 8, 16, 32]."""
        match sizes:
            case {"first": int(first), "last": int(last), "ratio": int(ratio), **rest}:
                if rest or first < 1 or ratio < 2 or last < first:
                    raise ValueError("a geometric list needs 1 ≤ first ≤ last, ratio ≥ 2, no more")
                steps = range(last.bit_length())  # ratio is at least 2
                return [first * ratio**n for n in steps if first * ratio**n <= last]
        return sizes

    @pydantic.field_validator("decode_seqs", "chunk_tokens", "chunk_decode_seqs")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError("must be a rising list of sizes ≥ 1, such as [2, 8, 32]")
        return sizes


class RunnerSection(Section):
    """How steps reach the device."""

    overlap: bool = pydantic.Field(
        True, description="Launch step n+1 before step n's result is read."
    )
    attention: Literal["auto", "reference", "xla"] = pydantic.Field(
        "auto", description="Attention implementation; auto is xla."
    )
    compile_threads: int = pydantic.Field(2, ge=1, le=64, description="Threads that compile.")
    cache_dir: Path | None = pydantic.Field(
        None, description="Compilation cache. Unset: jaxserve/ in the user's cache folder."
    )
    forbid_recompile: bool = pydantic.Field(
        False, description="Raise where a program is compiled after warm-up (tests); else counted."
    )


class LimitsSection(Section):
    """Every limit is finite and is enforced at submit."""

    max_waiting_requests: int = pydantic.Field(256, ge=1, description="Queue length.")
    max_waiting_tokens: int = pydantic.Field(
        1 << 20, ge=1, description="Prompt tokens in the queue."
    )
    queue_timeout_s: float = pydantic.Field(600.0, gt=0, description="Longest wait for admission.")
    max_prompt_bytes: int = pydantic.Field(4 * MIB, ge=1, description="UTF-8 bytes of a prompt.")
    max_stop_strings: int = pydantic.Field(16, ge=0, description="Stop strings of a request.")
    max_stop_string_bytes: int = pydantic.Field(1024, ge=1, description="UTF-8 bytes of one.")
    max_stop_token_ids: int = pydantic.Field(64, ge=0, description="Stop ids of a request.")
    max_logit_bias: int = pydantic.Field(300, ge=0, description="Biased ids of a request.")
    max_request_id_bytes: int = pydantic.Field(
        256, ge=1, description="UTF-8 bytes of a request id."
    )
    max_chat_messages: int = pydantic.Field(1024, ge=1, description="Turns of a conversation.")
    stream_buffer_bytes: int = pydantic.Field(
        1 * MIB, ge=1, description="Unread output of one stream before it is ended."
    )
    max_message_bytes: int = pydantic.Field(
        16 * MIB, ge=1, description="Largest gRPC message received or sent."
    )
    max_open_calls: int = pydantic.Field(
        1024, ge=1, description="RPCs open at once over all connections."
    )


class ServerSection(Section):
    """Where the gRPC front end listens."""

    host: str = pydantic.Field("127.0.0.1", min_length=1, description="Address to bind.")
    port: int = pydantic.Field(50051, ge=0, le=65535, description="0 picks a free one.")
    drain_timeout_s: float = pydantic.Field(
        30.0, ge=0, description="After SIGTERM, how long running requests may finish."
    )


class Config(Section):
    """All of it."""

    model: ModelSection = ModelSection()
    kv: KVSection = KVSection()
    scheduler: SchedulerSection = SchedulerSection()
    buckets: BucketsSection = BucketsSection()
    runner: RunnerSection = RunnerSection()
    limits: LimitsSection = LimitsSection()
    server: ServerSection = ServerSection()


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
      flags: dotted keys, `{"model.dtype": "float32"}`; None values are left out.

    Raises:
      ConfigError: an unreadable file, an unknown key (with a did-you-mean) or a wrong value; one
        line that says where it stands, the key, the value and what is allowed.
    """
    sources = {
        str(path): _read_toml(Path(path)) if path else {},
        "environment": _read_environment(),
        "flags": _nest(flags or {}),
    }
    merged: dict[str, dict[str, Any]] = {}
    for where, values in sources.items():
        _refuse_unknown(values, where)
        for section, keys in values.items():
            merged.setdefault(section, {}).update(keys)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(error, sources)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error


def _read_environment() -> dict[str, Any]:
    """Returns what `JAXSERVE_SECTION__KEY` variables say; an empty one counts as unset."""
    import pydantic_settings  # lazily: a quarter of a second, and only commands read these

    known = [f"{ENV_PREFIX}{key.replace('.', '__').upper()}" for key in _known_keys()]
    given = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX))
    for name in given:
        if name.upper() not in known:
            raise ConfigError(f"environment: unknown variable {name}{_did_you_mean(name, known)}")

    class Settings(Config, pydantic_settings.BaseSettings):
        model_config = pydantic_settings.SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True
        )

    try:
        return pydantic_settings.EnvSettingsSource(Settings)()
    except pydantic_settings.SettingsError as error:
        among = ", ".join(f"{name}={os.environ[name]!r}" for name in given if _is_list(name))
        raise ConfigError(
            f"environment: {among}: not JSON; lists are JSON, such as [2, 8, 32]"
        ) from error


def _is_list(variable: str) -> bool:
    section, _, key = variable.lower().removeprefix(ENV_PREFIX.lower()).partition("__")
    field = _section_type(Config.model_fields[section]).model_fields[key]
    return isinstance(field.default, tuple)


def _nest(flags: Mapping[str, object]) -> dict[str, Any]:
    """Returns `{"a.b": 1}` as `{"a": {"b": 1}}`, without the values that are None."""
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
    return nested


def _known_keys() -> list[str]:
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in _section_type(field).model_fields
    ]


def _section_type(field: pydantic.fields.FieldInfo) -> type[Section]:
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, Section)
    return field.annotation


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError at the first key of `values` that no section has."""
    known = _known_keys()
    for section, keys in values.items():
        if section not in Config.model_fields:
            hint = _did_you_mean(section, list(Config.model_fields))
            raise ConfigError(f"{where}: unknown section {section}{hint}")
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{where}: {section} is {keys!r}, but must be a table of keys")
        for key in keys:
            dotted = f"{section}.{key}"
            if dotted not in known:
                raise ConfigError(f"{where}: unknown key {dotted}{_did_you_mean(dotted, known)}")


def _did_you_mean(name: str, known: list[str]) -> str:
    """Returns "; did you mean …?", or what there is when nothing is near."""
    # the last part counts too: `max_seqs` in the wrong section is still a near miss
    last = re.split(r"\.|__", name.lower())[-1]
    near = [other for other in known if re.split(r"\.|__", other.lower())[-1] == last]
    near = near or difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    section = name.partition(".")[0]
    others = [other for other in known if other.startswith(f"{section}.")] or known
    return f"; known: {', '.join(others)}"


def _one_line(error: pydantic.ValidationError, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the first of the errors: `FILE: KEY is VALUE, but …`."""
    first = error.errors()[0]
    section, *rest = (str(part) for part in first["loc"])
    where = [name for name, values in sources.items() if rest[0] in values.get(section, {})][-1]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    wanted = first["msg"].removeprefix("Value error, ")
    wanted = wanted[0].lower() + wanted[1:]
    return f"{where}: {'.'.join([section, *rest])} is {first['input']!r}, but {wanted}{more}"
