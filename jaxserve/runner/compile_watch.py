"""The ear on JAX's compile events: faults after warm-up, and hits of the persistent cache."""

import contextlib
import logging
import threading
from collections.abc import Iterator

import jax

from jaxserve.metrics import Metrics

logger = logging.getLogger(__name__)

COMPILE_THREAD_PREFIX = "jaxserve-compile"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also when the cache has it
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class _ThreadCounts(threading.local):
    compiles = 0  # those that the cache had among them
    hits = 0
    bucket = ""


class CompileWatch:
    """Counts compiles in the process while armed, but for threads that compile for a runner.

    JAX keeps its listeners until `close`.

    Attributes:
      num_recompiles: faults so far.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.is_armed = False
        self.num_recompiles = 0
        self._metrics = metrics
        self._here = _ThreadCounts()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def num_hits_here(self) -> int:
        """Programs that this thread took from the persistent cache."""
        return self._here.hits

    @property
    def num_compiles_here(self) -> int:
        """Programs that this thread compiled."""
        return self._here.compiles - self._here.hits

    @contextlib.contextmanager
    def running(self, bucket: str) -> Iterator[None]:
        """Counts a fault of this thread, inside, as one of a step of this shape."""
        self._here.bucket = bucket
        try:
            yield
        finally:
            self._here.bucket = ""

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _HIT_EVENT:
            self._here.hits += 1

    def _on_duration(self, event: str, duration_secs: float, **facts: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        self._here.compiles += 1
        if not self.is_armed or threading.current_thread().name.startswith(COMPILE_THREAD_PREFIX):
            return
        self.num_recompiles += 1
        self._metrics.recompiles.labels(bucket=self._here.bucket).inc()
        logger.warning(
            "compiled after warm-up function=%s bucket=%s seconds=%.2f",
            facts.get("fun_name", "unknown"), self._here.bucket or "none", duration_secs,
        )  # fmt: skip
