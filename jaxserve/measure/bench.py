"""A benchmark: warm-up, repeats of one replay, what the server did meanwhile, and the result."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from jaxserve.errors import WorkloadError
from jaxserve.measure.bench_options import BenchOptions, Served
from jaxserve.measure.cautions import RESTARTED, find_warnings
from jaxserve.measure.energy import EnergyMeter, start_meter
from jaxserve.measure.goodput import Tally
from jaxserve.measure.load import AskMaker, Load
from jaxserve.measure.manifest import build_manifest
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import Replay
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.result import JsonObject, Repeat, build_result
from jaxserve.measure.server_metrics import Snapshot, describe_server, has_restarted
from jaxserve.measure.targets.base import Ask, Target, TargetFacts
from jaxserve.measure.workload import WorkloadEntry

WARM_UP_CONCURRENCY: Final = 4
METER_INTERVAL_S: Final = 10.0
ELSEWHERE: Final = {"all": "the server is elsewhere"}


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
        self._num_dropped = count_too_long(self.load, facts)
        await self._warm_up(maker)
        before = await self.target.read_metrics()
        meter = start_meter() if self.served.is_local else EnergyMeter({}, ELSEWHERE)
        async with _reading(meter):
            repeats = [await self._repeat(maker, number) for number in range(self.options.repeats)]
        energy = meter.read()
        after = await self.target.read_metrics()
        manifest = build_manifest(
            self.load,
            self.options,
            self.served,
            maker=maker,
            snapshot=after,
            concurrency=self.concurrency,
            num_dropped=self._num_dropped,
        )
        return build_result(
            repeats,
            manifest=manifest,
            server=_describe(before, after, repeats),
            energy=energy,
            date=date,
            warnings=[
                *find_warnings([repeat.totals for repeat in repeats], manifest, self.options),
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


def count_too_long(load: Load, facts: TargetFacts) -> int:
    """Returns how many entries the served context cannot hold; they are not sent.

    Raises:
      WorkloadError: it is all of them.
    """
    with load.open_entries() as entries:
        num_dropped = sum(is_too_long(entry, facts) for entry in entries)
    if num_dropped == load.num_requests:
        raise WorkloadError(
            f"every request of workload {load.header.name!r} is longer than the served context of "
            f"{facts.max_model_tokens} tokens; `jaxserve workload scale --lengths` makes them "
            "shorter"
        )
    return num_dropped


def is_too_long(entry: WorkloadEntry, facts: TargetFacts) -> bool:
    """Returns whether the served context cannot hold it; a text is the server's to judge."""
    if not facts.max_model_tokens or entry.prompt_tokens is None:
        return False
    return entry.prompt_tokens + (entry.wanted_tokens or 1) > facts.max_model_tokens


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
