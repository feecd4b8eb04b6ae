"""The ear on JAX's compile events: faults after warm-up, and hits of the persistent cache."""

import logging
import threading

import jax

from jaxserve.metrics import Metrics

logger = logging.getLogger(__name__)

COMPILE_THREAD_PREFIX = "jaxserve-compile"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also when the cache has it
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class _ThreadHits(threading.local):
    count = 0


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
        self._thread_hits = _ThreadHits()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def num_hits_here(self) -> int:
        """Programs that this thread took from the persistent cache."""
        return self._thread_hits.count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _HIT_EVENT:
            self._thread_hits.count += 1

    def _on_duration(self, event: str, duration_s: float, **_: str | int) -> None:
        if event != _COMPILE_EVENT or not self.is_armed:
            return
        if threading.current_thread().name.startswith(COMPILE_THREAD_PREFIX):
            return
        self.num_recompiles += 1
        self._metrics.recompiles.inc()
        logger.warning("compiled after warm-up seconds=%.2f", duration_s)
