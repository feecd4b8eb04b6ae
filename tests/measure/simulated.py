"""A server in virtual time with rows, a queue and metrics, whose capacity is known."""

import asyncio
import dataclasses
import zlib
from collections.abc import AsyncGenerator, Mapping
from typing import Literal

from jaxserve.measure.records import ServerPhases
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import Ask, End, Levels, Message, TargetError, TargetFacts
from jaxserve.metrics import Metrics

GIB = 1 << 30


@dataclasses.dataclass(slots=True)
class SimulatedTarget:
    """So many rows; each prompt token takes a while, and each output token.

    Every sixth request takes twice as long, and each a little more by its id.

    Attributes:
      rows: requests that run at once.
      faults: by index, how requests go wrong: at once, or after their first token.
    """

    rows: int = 2
    prompt_token_s: float = 0.001
    output_token_s: float = 0.02
    max_model_tokens: int = 0
    faults: Mapping[int, Literal["refused", "failed"]] = dataclasses.field(default_factory=dict)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    free: asyncio.Semaphore | None = None
    num_running: int = 0
    num_waiting: int = 0

    def __post_init__(self) -> None:
        self.metrics.build.info({"version": "1", "jax": "0.12.0", "device": "sim"})
        self.metrics.config.info({"model": "tiny", "max_seqs": str(self.rows)})
        self.metrics.kv_capacity_tokens.set(4096)

    async def describe(self) -> TargetFacts:
        return TargetFacts(
            backend="simulated",
            model="tiny",
            vocab_size=1000,
            special_ids=frozenset({0, 1}),
            max_model_tokens=self.max_model_tokens,
        )

    async def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        loop, metrics = asyncio.get_running_loop(), self.metrics
        self.free = self.free or asyncio.Semaphore(self.rows)
        arrival_s, num_tokens = loop.time(), int(ask.sampling["max_tokens"])
        if self.faults.get(ask.index) == "refused":
            raise TargetError("the queue is full", outcome="refused")
        self.num_waiting += 1
        await self.free.acquire()
        self.num_waiting -= 1
        self.num_running += 1
        try:
            start_s = loop.time()
            slow = 2.0 if ask.index % 6 == 5 else 1.0
            slow += zlib.crc32(ask.request_id.encode()) % 64 / 640
            await asyncio.sleep(slow * self.prompt_token_s * len(ask.prompt))
            first_s = loop.time()
            self._count(f"{self.rows}x1+64", real=len(ask.prompt), padded=64)
            yield Message(num_tokens=1)
            if self.faults.get(ask.index) == "failed":
                raise TargetError("the server broke", outcome="failed")
            for _ in range(num_tokens - 1):
                await asyncio.sleep(slow * self.output_token_s)
                self._count(f"{self.rows}x1+0", real=1, padded=self.rows)
                yield Message(num_tokens=1)
            end_s = loop.time()
        finally:
            self.num_running -= 1
            self.free.release()
        metrics.output_tokens.inc(num_tokens)
        phases = ServerPhases(
            queue_s=start_s - arrival_s,
            prefill_s=first_s - start_s,
            decode_s=end_s - first_s,
            delivery_s=0.001,
        )
        await asyncio.sleep(0.001)
        yield End(
            finish_reason="max_tokens",
            prompt_tokens=len(ask.prompt),
            output_tokens=num_tokens,
            cached_prompt_tokens=0,
            phases=phases,
        )

    def _count(self, bucket: str, *, real: int, padded: int) -> None:
        metrics = self.metrics
        metrics.steps.labels(bucket).inc()
        metrics.real_tokens.labels(bucket).inc(real)
        metrics.padded_tokens.labels(bucket).inc(max(0, padded - real))
        metrics.useful_rows.inc()
        metrics.offered_rows.inc(self.rows)
        metrics.step_device_seconds.labels(bucket).inc(0.009)
        metrics.step_gap_seconds.inc(0.001)

    async def read_metrics(self) -> Snapshot:
        return Snapshot.of_registry(self.metrics.registry)

    async def read_levels(self) -> Levels:
        return Levels(
            running=self.num_running,
            waiting=self.num_waiting,
            kv_usage=self.num_running / self.rows / 2,
            memory_bytes=1.5 * GIB,
        )

    async def close(self) -> None:
        return None
