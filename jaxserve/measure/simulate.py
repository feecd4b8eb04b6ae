"""A benchmark without a device: simulations of one load, and the same result as of a live run."""

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Final

from jaxserve.config import Config
from jaxserve.engine.shapes import find_shapes
from jaxserve.errors import ConfigError
from jaxserve.measure.bench import Progress, count_too_long, is_too_long
from jaxserve.measure.bench_options import BenchOptions, Served
from jaxserve.measure.cautions import find_warnings
from jaxserve.measure.energy import EnergyMeter
from jaxserve.measure.goodput import Tally
from jaxserve.measure.load import AskMaker, Load
from jaxserve.measure.manifest import build_manifest
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.result import JsonObject, Repeat, build_result
from jaxserve.measure.server_metrics import Snapshot, describe_server
from jaxserve.measure.simulation import Simulation
from jaxserve.measure.step_times import ServedTimes
from jaxserve.measure.targets.base import Ask, TargetFacts
from jaxserve.measure.virtual_device import VirtualDevice
from jaxserve.measure.workload import Recipe, WorkloadEntry
from jaxserve.metrics import Metrics
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache

NUM_SAMPLES: Final = 3600  # of a timeline, at most about
PROGRESS_EVERY: Final = 1000  # requests
NO_ENERGY: Final = {"all": "nothing was computed"}


@dataclasses.dataclass(slots=True, kw_only=True)
class Simulator:
    """Simulations of one load on one model's step times.

    Attributes:
      has_jitter: steps deviate from the model as the measured ones did; without it a replay has no
        chance in it but that of its arrivals.
      tenant_of: whose a request is; None has no tenants.
    """

    load: Load
    config: Config
    served: ServedTimes
    options: BenchOptions
    has_jitter: bool = True
    tenant_of: Callable[[Ask], str] | None = None
    writer: RequestWriter | None = None
    on_progress: Callable[[Progress], None] | None = None

    def run(self, *, date: str) -> JsonObject:
        """Returns the result.

        Raises:
          JaxserveError: the load or the configuration cannot be simulated.
        """
        metrics = Metrics()
        facts = TargetFacts(
            backend="jaxserve simulated",
            model=self.served.model,
            vocab_size=self.served.vocab_size,
            max_model_tokens=self._max_model_tokens(),
        )
        num_dropped = count_too_long(self.load, facts)
        maker = AskMaker(
            header=self.load.header,
            facts=facts,
            sampling=self.options.sampling,
            lengths=self.options.lengths,
            rate_scale=1.0 if self._is_closed_loop else self.options.rate_scale,
        )
        before = Snapshot.of_registry(metrics.registry)
        repeats = [
            self._repeat(maker, number, metrics=metrics) for number in range(self.options.repeats)
        ]
        after = Snapshot.of_registry(metrics.registry)
        known = Served(
            config=self.config.model_dump(mode="json"),
            hardware={"simulated": self.served.platform},
            is_fresh=True,
        )
        manifest = build_manifest(
            self.load,
            self.options,
            known,
            maker=maker,
            snapshot=after,
            concurrency=self._concurrency,
            num_dropped=num_dropped,
        )
        usage = [
            sample.levels.kv_usage
            for repeat in repeats
            for sample in repeat.timeline
            if sample.levels.kv_usage is not None
        ]
        return build_result(
            repeats,
            manifest=manifest,
            server=describe_server(
                before, after, peak_kv_usage=max(usage, default=None), peak_memory_bytes=None
            ),
            energy=EnergyMeter({}, NO_ENERGY).read(),
            date=date,
            warnings=list(
                find_warnings([repeat.totals for repeat in repeats], manifest, self.options)
            ),
        )

    @property
    def _is_closed_loop(self) -> bool:
        return self.load.header.arrivals == "closed"

    @property
    def _concurrency(self) -> int | None:
        concurrency = self.load.header.concurrency
        if concurrency is None:
            return None
        return max(1, round(concurrency * self.options.rate_scale))

    def _num_pages(self) -> int:
        """Returns the pool's pages: as configured, or as many as were there when it was timed."""
        kv, served = self.config.kv, self.served
        if kv.num_pages is not None:
            return kv.num_pages
        token_bytes = served.page_bytes / served.page_size
        if kv.pool_bytes is not None and token_bytes:
            return int(kv.pool_bytes / (token_bytes * kv.page_size))
        return served.num_pages * served.page_size // kv.page_size

    def _max_model_tokens(self) -> int:
        chosen = self.config.model.max_model_tokens or self.served.max_model_tokens
        return min(chosen, (self._num_pages() - 1) * self.config.kv.page_size)

    def _repeat(self, maker: AskMaker, number: int, *, metrics: Metrics) -> Repeat:
        max_model_tokens = self._max_model_tokens()
        limits, buckets = find_shapes(
            self.config, max_model_tokens=max_model_tokens, min_rows=self.served.min_rows
        )
        if not self.served.times:
            raise ConfigError("the step times have no program; measure a longer run")
        salt = f"{self.options.seed} repeat {number}"
        tally = Tally(self.options.limits)
        take = self._taker(tally, number)
        span_s = self.load.span_s / maker.rate_scale
        simulation = Simulation(
            self.config,
            device=VirtualDevice(
                self.served.times,
                limits=limits,
                buckets=buckets,
                jitter=random.Random(salt) if self.has_jitter else None,
            ),
            pool=build_pool(self.config, self._num_pages()),
            max_model_tokens=max_model_tokens,
            metrics=metrics,
            on_record=take,
            concurrency=self._concurrency,
            timeout_s=self.options.timeout_s,
            max_drain_s=self.options.max_drain_s,
            sample_s=max(1.0, span_s / NUM_SAMPLES),
            tenant_of=self.tenant_of,
            step_times=copy.deepcopy(self.served.times),
        )
        with self.load.open_entries() as entries:
            simulation.run(self._asks(entries, maker, salt))
        return Repeat(totals=tally.close(), timeline=simulation.timeline)

    def _taker(self, tally: Tally, number: int) -> Callable[[RequestRecord], None]:
        counts = [0, 0, 0]  # ended, bad, tokens

        def take(record: RequestRecord) -> None:
            tally.add(record)
            if self.writer is not None:
                self.writer.write(record, number)
            counts[0] += 1
            counts[1] += record.outcome != "ok"
            counts[2] += record.output_tokens or 0
            if self.on_progress is not None and counts[0] % PROGRESS_EVERY == 0:
                self.on_progress(
                    Progress(
                        phase=f"repeat {number + 1} of {self.options.repeats}",
                        num_ended=counts[0],
                        num_all=self.load.num_requests,
                        num_bad=counts[1],
                        num_tokens=counts[2],
                    )
                )

        return take

    def _asks(self, entries: Iterator[WorkloadEntry], maker: AskMaker, salt: str) -> Iterator[Ask]:
        for entry in entries:
            if not is_too_long(entry, maker.facts):
                yield maker.make(_simplify(entry, maker.facts.vocab_size), salt)


def build_pool(config: Config, num_pages: int) -> PagePool:
    """Returns a pool as an engine would have it.

    Raises:
      ConfigError: it would have a host tier, whose copies have no model here.
    """
    if config.host_tier.enabled:
        raise ConfigError("the host tier is not simulated; set host_tier.enabled = false")
    page_size = config.kv.page_size
    cache = PrefixCache(page_size) if config.prefix_cache.enabled else None
    return PagePool(num_pages, page_size, cache=cache)


def _simplify(entry: WorkloadEntry, vocab_size: int) -> WorkloadEntry:
    """Returns the entry with a prompt that is quick to make where it shares nothing: of its length,
    and different from all others by its first two tokens."""
    recipe = entry.prompt
    if not isinstance(recipe, Recipe) or recipe.blocks:
        return entry
    rest, first = divmod(entry.index, vocab_size)
    prompt = (first, rest % vocab_size, *(0,) * recipe.num_tokens)[: recipe.num_tokens]
    return dataclasses.replace(entry, prompt=prompt)
