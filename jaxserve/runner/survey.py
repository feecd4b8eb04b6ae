"""The programs of a configuration without a runner: which there are, and what each costs."""

import dataclasses
from pathlib import Path
from typing import Final

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.config import ModelConfig
from jaxserve.runner.device import find_device
from jaxserve.runner.kernel_choice import choose_kernels
from jaxserve.runner.lowering import Kind, ProgramKey, bucket_name
from jaxserve.runner.memory import choose_dtypes, read_cpu_flags
from jaxserve.runner.programs import Programs, Progress, program_keys
from jaxserve.runner.sizing import size_runner

_ORDER: Final[tuple[Kind, ...]] = (
    "forward", "output", "score", "row_load", "counts", "page_copy", "page_out", "page_in", "init"
)  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ProgramCost:
    """What a compiled program took and takes.

    Attributes:
      seconds: of compiling, or of reading the cache.
      temp_bytes: what it needs beside its arguments and results; None where XLA does not say.
    """

    seconds: float
    temp_bytes: int | None
    is_cached: bool


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Program:
    """One program of a configuration.

    Attributes:
      bucket: as the metrics name it; empty where there is one program of the kind.
      cost: None while it is not compiled.
    """

    kind: str
    bucket: str
    cost: ProgramCost | None = None


class Survey:
    """The programs that a runner of this model and configuration would compile.

    Sizes are found as a runner finds them, so on a device with memory statistics the largest three
    programs are compiled here already, unless the configuration gives the pool's size.
    """

    def __init__(self, model: ModelConfig, config: Config, *, cache_dir: Path | None) -> None:
        """Raises what `Runner` raises for sizes that do not fit."""
        self._config = config
        self._cache_dir = cache_dir
        self._metrics = Metrics()
        self._programs = Programs(self._metrics)
        device = find_device()
        dtypes = choose_dtypes(config, platform=device.platform, cpu_flags=read_cpu_flags())
        sizes = size_runner(
            model,
            config,
            dtypes=dtypes,
            kernels=choose_kernels(
                model, config, dtypes=dtypes, device=device, cache_dir=cache_dir
            ),
            programs=self._programs,
            compile_keys=self._compile,
        )
        self._keys = program_keys(sizes.spec, sizes.scheme, has_host_tier=sizes.num_host_pages > 0)

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles what is not compiled yet, through the persistent cache."""
        self._compile(self._keys, progress)

    def programs(self) -> tuple[Program, ...]:
        """Returns all programs, kind by kind, the small ones first."""
        small_first = self._keys[::-1]
        keys = sorted(small_first, key=lambda key: _ORDER.index(key.kind))
        return tuple(self._describe(key) for key in keys)

    def _compile(self, keys: tuple[ProgramKey, ...], progress: Progress | None = None) -> None:
        self._programs.compile_all(
            keys,
            num_threads=self._config.runner.compile_threads,
            cache_dir=self._cache_dir,
            progress=progress,
        )

    def _describe(self, key: ProgramKey) -> Program:
        bucket = bucket_name(key.bucket) if key.bucket else ""
        if key not in self._programs:
            return Program(kind=key.kind, bucket=bucket)
        memory = self._programs[key].memory_analysis()
        value = self._metrics.value
        cost = ProgramCost(
            seconds=value("compile_seconds_total", kind=key.kind, bucket=bucket),
            temp_bytes=None if memory is None else memory.temp_size_in_bytes,
            is_cached=value("compile_cache_hits_total", kind=key.kind, bucket=bucket) > 0,
        )
        return Program(kind=key.kind, bucket=bucket, cost=cost)
