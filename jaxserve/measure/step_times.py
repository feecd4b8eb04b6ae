"""The file of a served model's step times: all that a simulation of it needs to know."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jaxserve
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, ResultError
from jaxserve.scheduler.step_time import StepTimes

STEP_TIMES_FILE: Final = "step_times.json"
_SIZES: Final = ("vocab_size", "max_model_tokens", "num_pages", "page_size", "page_bytes")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ServedTimes:
    """A model on a machine, as far as steps and K/V go.

    Attributes:
      platform: jax's word for the device the steps ran on.
      num_pages, page_size, page_bytes: of its pool; page_bytes over all layers, 0 if unknown.
    """

    times: StepTimes
    model: str
    platform: str
    vocab_size: int
    max_model_tokens: int
    num_pages: int
    page_size: int
    page_bytes: int

    @property
    def min_rows(self) -> int:
        """Rows of the smallest program: 2, unless one of one row was timed."""
        return 1 if any(bucket.decode_seqs == 1 for bucket in self.times.programs) else 2


def read_engine(engine: Engine, *, platform: str) -> ServedTimes:
    """Returns what an engine has found out by now; nothing may run in it.

    Args:
      platform: jax's word for its device.
    """
    page_size = engine.config.kv.page_size
    return ServedTimes(
        times=engine.step_times,
        model=engine.model.name,
        platform=platform,
        vocab_size=engine.model.vocab_size,
        max_model_tokens=engine.model.max_model_tokens,
        num_pages=engine.num_pages,
        page_size=page_size,
        page_bytes=round(engine.kv_token_bytes * page_size),
    )


def write_step_times(served: ServedTimes, path: Path) -> None:
    """Raises ResultError where the file cannot be written."""
    facts: dict[str, Any] = {
        "producer": f"jaxserve {jaxserve.__version__}",
        "model": served.model,
        "platform": served.platform,
        **{name: getattr(served, name) for name in _SIZES},
        "step_times": served.times.as_json(),
    }
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultError(f"step times {path} cannot be written: {error.strerror}") from error


def read_step_times(path: Path) -> ServedTimes:
    """Returns what `write_step_times` wrote.

    Raises:
      ConfigError: it cannot be read, or is no such file.
    """
    try:
        facts = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"step times {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"step times {path} is not JSON: {error}; is it complete?") from error
    if not isinstance(facts, Mapping) or not isinstance(facts.get("step_times"), Mapping):
        raise ConfigError(
            f"step times {path}: it has no step_times; give a {STEP_TIMES_FILE} of `jaxserve bench`"
        )
    for name in _SIZES:
        value, least = facts.get(name), 0 if name == "page_bytes" else 1
        if type(value) is not int or value < least:
            raise ConfigError(f"step times {path}: {name} is {value!r}, not a number above 0")
    return ServedTimes(
        times=StepTimes.from_json(facts["step_times"], source=str(path)),
        model=str(facts.get("model", "")),
        platform=str(facts.get("platform", "")),
        **{name: facts[name] for name in _SIZES},
    )
