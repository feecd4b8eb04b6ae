"""The programs that serving a model would compile, by name, without loading its weights."""

import dataclasses
import time
from typing import TYPE_CHECKING

from jaxserve.config import Config, default_cache_dir
from jaxserve.engine.start import Progress
from jaxserve.mechanisms import check_mechanisms

if TYPE_CHECKING:
    from jaxserve.runner.survey import Program as Program
    from jaxserve.runner.survey import Survey


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ProgramList:
    """What was found.

    Attributes:
      seconds: that compiling took in all, its threads side by side; 0.0 where nothing was.
    """

    model: str
    programs: "tuple[Program, ...]"
    seconds: float = 0.0


def list_programs(model: str, config: Config) -> ProgramList:
    """Returns the programs of a model, not compiled.

    Raises:
      JaxserveError: whatever `load_engine` raises for this model and configuration, but for faults
        of the weights themselves.
    """
    name, survey = _open(model, config)
    return ProgramList(model=name, programs=survey.programs())


def compile_programs(model: str, config: Config, *, progress: Progress) -> ProgramList:
    """Compiles the programs of a model, through the persistent cache, and returns what each took.

    Raises:
      JaxserveError: as `list_programs`.
    """
    started_s = time.monotonic()
    name, survey = _open(model, config)
    survey.compile(lambda done, total, name, seconds: progress("compile", done, total))
    seconds = time.monotonic() - started_s
    return ProgramList(model=name, programs=survey.programs(), seconds=seconds)


def _open(model: str, config: Config) -> "tuple[str, Survey]":
    from jaxserve.checkpoint.registry import find_model
    from jaxserve.runner.survey import Survey

    check_mechanisms(config)
    header = find_model(model).load_header()
    cache_dir = config.runner.cache_dir or default_cache_dir()
    return header.name, Survey(header.config, config, cache_dir=cache_dir)
