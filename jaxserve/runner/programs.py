"""The compiled programs of a runner: which there are, their compilation, and the guard after it."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax

from jaxserve.errors import RecompileError
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket
from jaxserve.runner.buckets import VARIANTS, BucketScheme, Reach
from jaxserve.runner.cache_entries import CacheEntries
from jaxserve.runner.capture import COMMAND_KINDS, Capture, read_capture
from jaxserve.runner.compile_cache import persistent_cache
from jaxserve.runner.compile_watch import COMPILE_THREAD_PREFIX, CompileWatch
from jaxserve.runner.kept_traces import lower_or_read
from jaxserve.runner.lowering import Kind, ProgramKey
from jaxserve.runner.spec import RunnerSpec

logger = logging.getLogger(__name__)

# Called after each program: programs done, of how many, the last one's name, its seconds.
Progress = Callable[[int, int, str, float], None]


def program_keys(
    spec: RunnerSpec,
    scheme: BucketScheme,
    reach: Reach | None = None,
    *,
    has_host_tier: bool = False,
) -> tuple[ProgramKey, ...]:
    """Returns the keys of every program that steps within the scheme can run; the slowest to
    compile first, so that threads end together.

    Args:
      reach: of the one request that runs, where the scheme is no more than it reaches.
      has_host_tier: whether pages go to host memory.
    """
    forwards = sorted(scheme.forwards, key=lambda bucket: -bucket.num_tokens)
    outputs = sorted(
        scheme.outputs, key=lambda b: (VARIANTS.index(b.variant), b.rows), reverse=True
    )
    kinds: list[Kind] = ["init", "row_load", "counts"]
    if reach is None or reach.num_choices > 1:
        kinds.insert(0, "page_copy")
    if reach is None or reach.has_scoring:
        kinds.insert(0, "score")
    if has_host_tier:
        kinds = ["page_out", "page_in", *kinds]
    return (
        *(ProgramKey(kind="forward", spec=spec, bucket=bucket) for bucket in forwards),
        *(ProgramKey(kind="output", spec=spec, bucket=bucket) for bucket in outputs),
        *(ProgramKey(kind=kind, spec=spec) for kind in kinds),
    )


class Programs:
    """Compiled programs by key. Only these run in the step loop, and they never retrace.

    After `forbid_compiles`, any other compile in the process is counted as a fault; threads that
    compile programs for a runner are excepted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}
        self._captures: dict[ProgramKey, Capture] = {}
        self._watch = CompileWatch(metrics)
        weakref.finalize(self, self._watch.close)

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        return self._compiled[key]

    def __contains__(self, key: ProgramKey) -> bool:
        return key in self._compiled

    def is_captured(self, key: ProgramKey) -> bool:
        """Whether the whole program is one CUDA graph."""
        return key in self._captures and self._captures[key].is_whole

    def compile_all(
        self,
        keys: Iterable[ProgramKey],
        *,
        num_threads: int,
        cache_dir: Path | None,
        progress: Progress | None = None,
    ) -> None:
        """Compiles what is not compiled yet, in threads, and returns when all is done.

        Args:
          cache_dir: root of the persistent cache; None keeps nothing between starts.
        """
        missing = [key for key in keys if key not in self._compiled]
        with (
            persistent_cache(cache_dir) as entries,
            ThreadPoolExecutor(num_threads, thread_name_prefix=COMPILE_THREAD_PREFIX) as pool,
        ):
            futures = {pool.submit(self._compile, key, entries): key for key in missing}
            try:
                for num_done, future in enumerate(as_completed(futures), 1):
                    key = futures[future]
                    self._compiled[key], seconds, is_cached = future.result()
                    logger.info(
                        "compiled program=%r seconds=%.2f is_cached=%s done=%d of=%d",
                        key.name, seconds, is_cached, num_done, len(missing),
                    )  # fmt: skip
                    if progress:
                        progress(num_done, len(missing), key.name, seconds)
            finally:
                pool.shutdown(cancel_futures=True)  # after a failure the rest is not compiled

    def _compile(
        self, key: ProgramKey, entries: CacheEntries | None
    ) -> tuple[jax.stages.Compiled, float, bool]:
        """Returns the program, the seconds it took, and whether nothing had to be compiled."""
        started_s = time.monotonic()
        watch = self._watch
        hits_before, compiles_before = watch.num_hits_here, watch.num_compiles_here
        lowered = lower_or_read(key, entries)
        compiled = lowered.compile(compiler_options(key.spec, jax.default_backend()))
        if key.spec.command_buffers:
            self._note_capture(key, read_capture(compiled.as_text() or ""))
        num_hits = watch.num_hits_here - hits_before
        num_compiles = watch.num_compiles_here - compiles_before  # 0: this process had it already
        seconds = time.monotonic() - started_s
        self._metrics.compile_seconds.labels(**key.labels).inc(seconds)
        self._metrics.cache_hits.labels(**key.labels).inc(num_hits)
        self._metrics.compiles.labels(**key.labels).inc(num_compiles)
        return compiled, seconds, num_compiles == 0

    def _note_capture(self, key: ProgramKey, capture: Capture) -> None:
        """Takes down how much of a program is captured, of one from the cache too."""
        self._captures[key] = capture
        self._metrics.program_graphs.labels(**key.labels).set(capture.num_graphs)
        self._metrics.program_operations.labels(**key.labels).set(capture.num_operations)
        self._metrics.uncaptured_operations.labels(**key.labels).set(capture.num_outside)

    def running(self, bucket: Bucket) -> contextlib.AbstractContextManager[None]:
        """Compiles inside are counted as faults of a step of this shape."""
        return self._watch.running(bucket.name)

    def forbid_compiles(self) -> None:
        """From now on a compile outside `compile_all` is a fault."""
        self._watch.is_armed = True

    def check_no_recompile(self) -> None:
        """Raises RecompileError if there was such a compile."""
        if self._watch.num_recompiles:
            raise RecompileError(
                f"{self._watch.num_recompiles} programs were compiled after warm-up, where "
                "runner.forbid_recompile allows none; run what needs them before serving, or "
                "find the shape that no bucket covers"
            )


def compiler_options(spec: RunnerSpec, platform: str) -> dict[str, str | bool | int]:
    """Returns what a program is compiled with beyond XLA's defaults."""
    if platform != "gpu":
        return {}
    kinds = COMMAND_KINDS if spec.command_buffers else ()
    options: dict[str, str | bool | int] = {"xla_gpu_enable_command_buffer": ",".join(kinds)}
    if spec.batch_invariant:
        # Products by XLA's own rule, not by what was fastest today. What XLA calls deterministic
        # operations is about float32 atomics, and no program has any.
        options["xla_gpu_autotune_level"] = 0
    return options
