"""A benchmark: warm-up, repeats of one replay, what the server did meanwhile, and the result."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jaxserve
from jaxserve.errors import WorkloadError
from jaxserve.measure.energy import EnergyMeter, start_meter
from jaxserve.measure.goodput import Tally, Totals
from jaxserve.measure.limits import Limits
from jaxserve.measure.load import AskMaker, Lengths, Load
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import TIMEOUT_S, Replay
from jaxserve.measure.result import JsonObject, Repeat, RequestWriter, build_result
from jaxserve.measure.server_metrics import Snapshot, describe_server, has_restarted
from jaxserve.measure.targets.base import Ask, Sampling, Target, TargetFacts
from jaxserve.measure.workload import WorkloadEntry

WARM_UP_CONCURRENCY: Final = 4
LAG_BOUND_S: Final = 0.05
DRAIN_BOUND: Final = 0.5  # of the duration

RESTARTED: Final = (
    "the server was started again meanwhile, or another one answered: its metrics are of two "
    "processes and left out"
)
METER_INTERVAL_S: Final = 10.0
ELSEWHERE: Final = {"all": "the server is elsewhere"}

CacheState = Literal["cold", "primed", "mixed", "unknown"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BenchOptions:
    """How to measure.

    Attributes:
      warm_up: requests sent before the measured ones, and left out of every figure.
      primes_cache: sends every prompt of the load once before the measured replays.
      seed: of prompts and sampling; another one gives other prompts of the same lengths.
      is_seed_chosen: the seed is somebody's word, so an earlier run may have sent the same prompts.
      rate_scale: 2 sends twice as fast, or keeps twice as many in flight in a closed loop.
      sampling: of all requests, by names of `SamplingParams`; an entry's own goes over it.
      cache_state: at the start; None is worked out where that is possible.
      lag_bound_s: a send lag whose 99th percentile is above this is warned about.
    """

    limits: Limits
    seed: int
    is_seed_chosen: bool = False
    repeats: int = 1
    warm_up: int = 0
    primes_cache: bool = False
    rate_scale: float = 1.0
    timeout_s: float = TIMEOUT_S
    max_drain_s: float | None = None
    sampling: Sampling = dataclasses.field(default_factory=dict)
    lengths: Lengths = "exact"
    cache_state: CacheState | None = None
    lag_bound_s: float = LAG_BOUND_S


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Served:
    """What is known of the server beside what it tells by itself; "" and {} are not known.

    Attributes:
      address: where requests go; "" is this process.
      ignores_end: whether it can be told to ignore the model's end.
      decode: see `AskMaker`.
      is_fresh: it has served nothing before.
      is_local: it runs on this machine, whose energy counters are its own.
      stated: which of the other fields somebody only said.
    """

    address: str = ""
    bundle_digest: str = ""
    hardware: Mapping[str, object] = dataclasses.field(default_factory=dict)
    jax_version: str = ""
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ignores_end: bool = True
    decode: Callable[[tuple[int, ...]], str] | None = None
    is_fresh: bool = False
    is_local: bool = False
    stated: Sequence[str] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Progress:
    """How far a benchmark is.

    Attributes:
      phase: what is going on: warm-up, or the number of the repeat.
      num_bad: of those that ended, the ones that were not ok.
    """

    phase: str
    num_ended: int
    num_all: int
    num_bad: int
    num_tokens: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench:
    """One benchmark of one load against one target.

    Attributes:
      writer: gets every request's record; None keeps none.
      on_progress: called at each end of a request.
    """

    target: Target
    load: Load
    options: BenchOptions
    served: Served
    writer: RequestWriter | None = None
    on_progress: Callable[[Progress], None] | None = None
    _num_dropped: int = 0

    async def run(self, *, date: str, kind: str = "bench") -> JsonObject:
        """Returns the result.

        Raises:
          TargetError: nobody answers.
          JaxserveError: the load cannot be sent to this target.
        """
        facts = await self.target.describe()
        maker = AskMaker(
            header=self.load.header,
            facts=facts,
            sampling=self.options.sampling,
            lengths=self.options.lengths,
            ignores_end=self.served.ignores_end,
            decode=self.served.decode,
            rate_scale=1.0 if self.is_closed_loop else self.options.rate_scale,
        )
        self._num_dropped = self._count_too_long(facts)
        await self._warm_up(maker)
        before = await self.target.read_metrics()
        meter = start_meter() if self.served.is_local else EnergyMeter({}, ELSEWHERE)
        async with _reading(meter):
            repeats = [await self._repeat(maker, number) for number in range(self.options.repeats)]
        energy = meter.read()
        after = await self.target.read_metrics()
        manifest = self._build_manifest(facts, maker, after)
        return build_result(
            repeats,
            manifest=manifest,
            server=_describe(before, after, repeats),
            energy=energy,
            date=date,
            warnings=[
                *self._find_warnings(repeats, manifest),
                *([RESTARTED] if has_restarted(before, after) else []),
            ],
            kind=kind,
        )

    @property
    def is_closed_loop(self) -> bool:
        return self.load.header.arrivals == "closed"

    @property
    def _num_sent(self) -> int:
        return self.load.num_requests - self._num_dropped

    @property
    def concurrency(self) -> int | None:
        """Requests in flight of a closed loop; None of an open one."""
        concurrency = self.load.header.concurrency
        if concurrency is None:
            return None
        return max(1, round(concurrency * self.options.rate_scale))

    def _count_too_long(self, facts: TargetFacts) -> int:
        """Returns how many entries the served context cannot hold; they are not sent.

        Raises:
          WorkloadError: it is all of them.
        """
        with self.load.open_entries() as entries:
            num_dropped = sum(is_too_long(entry, facts) for entry in entries)
        if num_dropped == self.load.num_requests:
            raise WorkloadError(
                f"every request of workload {self.load.header.name!r} is longer than the served "
                f"context of {facts.max_model_tokens} tokens; `jaxserve workload scale --lengths` "
                "makes them shorter"
            )
        return num_dropped

    async def _warm_up(self, maker: AskMaker) -> None:
        """Sends requests like those of the load, a few at a time, with prompts of their own."""
        options = self.options
        if options.warm_up:
            salt = f"{options.seed} warm-up"
            await self._replay(
                maker, salt, phase="warm-up", num_requests=options.warm_up, is_warm_up=True
            )
        if options.primes_cache:
            await self._replay(
                maker,
                f"{options.seed} repeat 0",
                phase="priming",
                num_requests=self._num_sent,
                is_warm_up=True,
            )

    async def _repeat(self, maker: AskMaker, number: int) -> Repeat:
        return await self._replay(
            maker,
            f"{self.options.seed} repeat {number}",
            phase=f"repeat {number + 1} of {self.options.repeats}",
            num_requests=self._num_sent,
            repeat=number,
        )

    async def _replay(
        self,
        maker: AskMaker,
        salt: str,
        *,
        phase: str,
        num_requests: int,
        repeat: int | None = None,
        is_warm_up: bool = False,
    ) -> Repeat:
        tally = Tally(self.options.limits)
        counts = [0, 0, 0]  # ended, bad, tokens

        def take(record: RequestRecord) -> None:
            tally.add(record)
            if self.writer is not None:
                self.writer.write(record, repeat)
            counts[0] += 1
            counts[1] += record.outcome != "ok"
            counts[2] += record.output_tokens or 0
            if self.on_progress is not None:
                self.on_progress(
                    Progress(
                        phase=phase,
                        num_ended=counts[0],
                        num_all=num_requests,
                        num_bad=counts[1],
                        num_tokens=counts[2],
                    )
                )

        def make(entries: Iterator[WorkloadEntry]) -> Iterator[Ask]:
            fitting = (entry for entry in entries if not is_too_long(entry, maker.facts))
            for entry in itertools.islice(fitting, num_requests):
                yield maker.make(entry, salt, is_warm_up=is_warm_up)

        with self.load.open_entries() as entries:
            replay = Replay(
                target=self.target,
                asks=make(entries),
                on_record=take,
                concurrency=WARM_UP_CONCURRENCY if is_warm_up else self.concurrency,
                timeout_s=self.options.timeout_s,
                max_drain_s=self.options.max_drain_s,
            )
            await replay.run()
        return Repeat(totals=tally.close(), timeline=replay.timeline)

    def _build_manifest(
        self, facts: TargetFacts, maker: AskMaker, snapshot: Snapshot | None
    ) -> JsonObject:
        options, load, served = self.options, self.load, self.served
        build = snapshot.info("build") if snapshot else {}
        told = {key: build[key] for key in ("platform", "device") if key in build}
        rate = load.requests_per_s
        burstiness = load.header.parameters.get("burstiness")
        return {
            "workload": {
                "name": load.header.name,
                "hash": load.content_hash,
                "num_requests": load.num_requests,
                "span_s": load.span_s,
                "source": load.header.source,
                "licence": load.header.licence,
                "lineage": [dict(step) for step in load.header.lineage],
            },
            "bundle_digest": served.bundle_digest,
            "hardware": {**told, **served.hardware},
            "jax_version": served.jax_version or build.get("jax", ""),
            "jaxserve_version": jaxserve.__version__,
            "server_version": build.get("version", ""),
            "target": {
                "backend": facts.backend,
                "address": served.address,
                "model": facts.model,
                "max_model_tokens": facts.max_model_tokens,
            },
            "config": dict(served.config) or (snapshot.info("config") if snapshot else {}),
            "limits": options.limits.as_json(),
            "sampling": dict(maker.describe()),
            "offered_load": {
                "arrivals": load.header.arrivals,
                "rate_scale": options.rate_scale,
                "requests_per_s": None if rate is None else rate * options.rate_scale,
                "burstiness": burstiness if isinstance(burstiness, int | float) else None,
                "concurrency": self.concurrency,
                "dropped_over_context": self._num_dropped,
            },
            "cache_state": self._find_cache_state(),
            "seed": options.seed,
            "repeats": options.repeats,
            "warm_up": options.warm_up,
            "timeout_s": options.timeout_s,
            "max_drain_s": options.max_drain_s,
            "stated": list(served.stated),
        }

    def _find_cache_state(self) -> CacheState:
        """Returns what a cache held of these prompts when each repeat began.

        Prompts that are new in every run are in no cache, whatever the server did before; with a
        chosen seed they are new to a fresh server alone.
        """
        if self.options.cache_state is not None:
            return self.options.cache_state
        if self.load.header.prompts == "unique" and not self.options.primes_cache:
            is_new = self.served.is_fresh or not self.options.is_seed_chosen
            return "cold" if is_new else "unknown"
        if self.options.primes_cache:
            is_same = self.load.header.prompts == "fixed" or self.options.repeats == 1
            return "primed" if is_same else "mixed"
        if not self.served.is_fresh or self.options.warm_up:
            return "unknown"
        return "cold" if self.options.repeats == 1 else "mixed"

    def _find_warnings(self, repeats: Sequence[Repeat], manifest: Mapping[str, Any]) -> list[str]:
        """Returns what a reader of the figures must know, in sentences."""
        return list(find_warnings([repeat.totals for repeat in repeats], manifest, self.options))


def is_too_long(entry: WorkloadEntry, facts: TargetFacts) -> bool:
    """Returns whether the served context cannot hold it; a text is the server's to judge."""
    if not facts.max_model_tokens or entry.prompt_tokens is None:
        return False
    return entry.prompt_tokens + (entry.wanted_tokens or 1) > facts.max_model_tokens


def find_warnings(
    repeats: Sequence[Totals], manifest: Mapping[str, Any], options: BenchOptions
) -> Iterator[str]:
    pooled = Totals()
    for totals in repeats:
        pooled.extend(totals)
    lag = pooled.samples["send_lag"].describe()
    if lag.p99 is not None and lag.p99 > options.lag_bound_s:
        yield (
            f"send lag: p99 is {lag.p99:.3f} s, above {options.lag_bound_s:g} s, so this tool was "
            "late; the load was another than asked for, and latencies hold the lag"
        )
    if manifest["offered_load"]["arrivals"] == "closed":
        yield (
            "closed loop: the server sets the pace, so waiting for it is in no latency; do not "
            "compare with an open loop"
        )
    if num_dropped := manifest["offered_load"]["dropped_over_context"]:
        yield (
            f"{num_dropped} requests of the workload are longer than the served context and were "
            "not sent"
        )
    if pooled.drain_s > DRAIN_BOUND * pooled.duration_s:
        yield (
            f"drain: {pooled.drain_s:.1f} of {pooled.duration_s:.1f} s passed after the last send; "
            "rates are lower than in a steady state"
        )
    if pooled.num_unequal:
        yield (
            f"usage: of {pooled.num_unequal} requests the server's usage is another number than "
            "the tokens of their messages; all rates count the usage"
        )
    if pooled.num_assumed:
        yield (
            f"tokens per message were assumed for {pooled.num_assumed} requests: the server told "
            "their sum alone, so inter-token latencies are approximate"
        )
    if manifest["cache_state"] in ("mixed", "unknown"):
        yield (
            f"cache state at the start: {manifest['cache_state']}; state it with --cache-state, or "
            "this result cannot be compared"
        )


@contextlib.asynccontextmanager
async def _reading(meter: EnergyMeter) -> AsyncIterator[None]:
    """Reads the meter often enough while the block runs."""

    async def read() -> None:
        while True:
            await asyncio.sleep(METER_INTERVAL_S)
            meter.read()

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()


def _describe(
    before: Snapshot | None, after: Snapshot | None, repeats: Sequence[Repeat]
) -> dict[str, object] | None:
    samples = [sample.levels for repeat in repeats for sample in repeat.timeline]
    usage = [levels.kv_usage for levels in samples if levels.kv_usage is not None]
    memory = [levels.memory_bytes for levels in samples if levels.memory_bytes is not None]
    return describe_server(
        before,
        after,
        peak_kv_usage=max(usage, default=None),
        peak_memory_bytes=max(memory, default=None),
    )
