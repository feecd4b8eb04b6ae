"""How busy an engine is, and how its compiled shapes are used, read from its metrics."""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Final

from jaxserve.engine import Engine
from jaxserve.metrics import Metrics

WINDOW_S: Final = 10.0  # over which a rate is the mean


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """One observation.

    Attributes:
      used_kv_tokens: tokens whose keys and values are in the pool.
      kv_cache_usage: share of the pool's pages in use, in [0, 1].
      generation_tokens_per_second: output tokens, as `LoadMeter` says.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    waiting_prompt_tokens: int = 0
    max_running_requests: int = 0
    used_kv_tokens: int = 0
    total_kv_tokens: int = 0
    kv_cache_usage: float = 0.0
    generation_tokens_per_second: float = 0.0
    finished_requests: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BucketUse:
    """A compiled program and what ran it.

    Attributes:
      shape: in the metrics' words; empty where the program has only one.
      real_tokens: that were asked of it; 0 where tokens are not counted.
      padded_tokens: that filled its shape up.
      compile_s: what compiling it, or reading it from the cache, took.
    """

    program: str
    shape: str
    steps: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    compile_s: float = 0.0


class LoadMeter:
    """Observes one server; the rate is over the window, or since the meter began.

    Whoever wants rates between two of its own observations has a meter with window 0.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._window_s = window_s
        self._clock = clock
        self._seen: collections.deque[tuple[float, float]] = collections.deque()
        self._note()

    def read(self, engine: Engine | None) -> Load:
        """Returns the load now.

        Args:
          engine: None while it is being loaded.
        """
        rate = self._note()
        load = read_load(self._metrics, engine)
        if engine is None:
            return load
        return dataclasses.replace(load, generation_tokens_per_second=rate)

    def _note(self) -> float:
        """Returns output tokens per second since the oldest observation that is kept."""
        now_s, count = self._clock(), self._metrics.value("output_tokens_total")
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        self._seen.append((now_s, count))
        begun_s, begun = self._seen[0]
        return (count - begun) / (now_s - begun_s) if now_s > begun_s else 0.0


def read_load(metrics: Metrics, engine: Engine | None) -> Load:
    """Returns the levels and counts now, and 0 as the rate.

    Args:
      engine: None while it is being loaded.
    """
    if engine is None:
        return Load()
    value, token_bytes = metrics.value, engine.kv_token_bytes
    return Load(
        running_requests=int(value("requests_running")),
        waiting_requests=int(value("requests_waiting")),
        waiting_prompt_tokens=int(value("waiting_tokens")),
        max_running_requests=engine.config.scheduler.max_seqs,
        used_kv_tokens=round(value("kv_used_bytes") / token_bytes) if token_bytes else 0,
        total_kv_tokens=int(value("kv_capacity_tokens")),
        kv_cache_usage=value("kv_usage_ratio"),
        finished_requests=int(value("requests_finished_total")),
    )


def list_buckets(metrics: Metrics) -> list[BucketUse]:
    """Returns the compiled programs, the slowest to compile first."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for family, kind, field in (
        (metrics.compile_seconds, "", "compile_s"),
        (metrics.steps, "forward", "steps"),
        (metrics.real_tokens, "forward", "real_tokens"),
        (metrics.padded_tokens, "forward", "padded_tokens"),
        (metrics.output_programs, "output", "steps"),
    ):
        for sample in (s for f in family.collect() for s in f.samples):
            if not sample.name.endswith("_total"):
                continue
            program = (sample.labels.get("kind", kind), sample.labels["bucket"])
            fields = found.setdefault(program, {})
            fields[field] = fields.get(field, 0.0) + sample.value
    uses = [
        BucketUse(
            program=program,
            shape=shape,
            steps=int(fields.get("steps", 0)),
            real_tokens=int(fields.get("real_tokens", 0)),
            padded_tokens=int(fields.get("padded_tokens", 0)),
            compile_s=fields.get("compile_s", 0.0),
        )
        for (program, shape), fields in found.items()
    ]
    return sorted(uses, key=lambda use: (-use.compile_s, use.program, use.shape))
