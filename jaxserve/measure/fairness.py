"""What one tenant feels of another that floods, in the simulator."""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jaxserve.config import Config, TenantLimits, load_config
from jaxserve.engine.shapes import find_shapes
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.simulate import build_pool
from jaxserve.measure.simulation import Simulation
from jaxserve.measure.targets.base import Ask
from jaxserve.measure.virtual_device import VirtualDevice
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket
from jaxserve.scheduler.step_time import StepTimes, StepWork

FLOOD: Final = 10.0  # times its share
BACKLOG: Final = 120  # requests of each tenant, to find what its share is
DRAIN_S: Final = 20.0  # after the last request; the flood is cut then


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Tenant:
    """Who sends, and how much of its share.

    Attributes:
      load: by its share of the machine; 1 is all of it.
      prompt_tokens, output_tokens: means; each is drawn from half to one and a half of it.
    """

    name: str
    load: float
    weight: float = 1.0
    prompt_tokens: int = 100
    output_tokens: int = 30


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """Tenants that share a machine: the first is looked at, the last floods.

    Attributes:
      decode_s, row_s, chunk_token_s: of a step: without anything, for each row and prompt token of
        its program.
      num_requests: of the tenant that is looked at.
    """

    name: str
    tenants: tuple[Tenant, ...]
    decode_s: float = 0.008
    row_s: float = 0.0005
    chunk_token_s: float = 0.0003
    num_requests: int = 1000
    num_pages: int = 2048
    seed: int = 1


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
      ttft_s: 99th percentile of the tenant that is looked at.
      tokens_per_s: of all tenants, prompts and outputs, as long as it sent.
      preemptions: of all.
    """

    ttft_s: float
    tokens_per_s: float
    preemptions: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Comparison:
    """The run in which the last tenant sends its share, and the same with ten times that."""

    share: Outcome
    flood: Outcome

    @property
    def ratio(self) -> float:
        return self.flood.ttft_s / self.share.ttft_s


def build_machine(policy: str) -> Config:
    """Returns a small machine: 16 rows, chunks of up to 256 tokens, and a queue for any flood."""
    return load_config(
        flags={
            "scheduler.policy": policy,
            "scheduler.max_seqs": 16,
            "kv.page_size": 16,
            "buckets.decode_seqs": (2, 4, 8, 16),
            "buckets.chunk_tokens": (64, 128, 256),
            "buckets.chunk_decode_seqs": (8,),
            "model.max_model_tokens": 2048,
            "limits.max_waiting_requests": 100_000,
            "limits.max_waiting_tokens": 100_000_000,
            "prefix_cache.enabled": False,
        }
    )


def _first(load: float, weight: float = 1.0) -> Tenant:
    return Tenant(name="first", load=load, weight=weight)


_FLOOD: Final = Tenant(name="flood", load=1.0)
_LONG: Final = Tenant(name="flood", load=1.0, prompt_tokens=600)
_HEAVY: Final = Tenant(name="flood", load=1.0, weight=3.0)
_OTHERS: Final = (
    Tenant(name="second", load=0.8),
    Tenant(name="third", load=0.5, prompt_tokens=300),
)
_FAST: Final[dict[str, Any]] = {
    "row_s": 0.0001,
    "chunk_token_s": 0.00002,
}  # of a step; tokens cost little beside it

SCENARIOS: Final = (
    *(
        Scenario(name=f"two, {load:.0%}", tenants=(_first(load), _FLOOD))
        for load in (0.3, 0.5, 0.8)
    ),
    *(
        Scenario(name=f"long prompts, {load:.0%}", tenants=(_first(load), _LONG))
        for load in (0.3, 0.8)
    ),
    *(
        Scenario(name=f"weights 3 to 1, {load:.0%}", tenants=(_first(load, 3.0), _FLOOD))
        for load in (0.5, 0.8)
    ),
    Scenario(name="weights 1 to 3, 50%", tenants=(_first(0.5), _HEAVY)),
    *(
        Scenario(name=f"four, {load:.0%}", tenants=(_first(load), *_OTHERS, _FLOOD))
        for load in (0.5, 0.8)
    ),
    *(
        Scenario(name=f"fast device, {load:.0%}", tenants=(_first(load), _LONG), **_FAST)
        for load in (0.3, 0.8)
    ),
    Scenario(name="few pages, 50%", tenants=(_first(0.5), _LONG), num_pages=200),
)


def compare_flood(scenario: Scenario, config: Config) -> Comparison:
    """Returns what the first tenant feels of the last one's flood, by a configuration's policy.

    Shares are those of a machine on which everybody always has something waiting, under policy
    fair.
    """
    rates = _find_rates(scenario, config)
    flooder = scenario.tenants[-1].name
    share = _run(scenario, config, rates)
    flood = _run(scenario, config, {**rates, flooder: FLOOD * rates[flooder]})
    return Comparison(share=share, flood=flood)


def _find_rates(scenario: Scenario, config: Config) -> dict[str, float]:
    """Returns each tenant's requests a second: its load times those that it has of the machine
    when everybody has more to send."""
    scheduler = config.scheduler.model_copy(update={"policy": "fair"})
    config = config.model_copy(update={"scheduler": scheduler})
    weights = [tenant.weight for tenant in scenario.tenants]
    sources = [
        itertools.islice(_draw(tenant, scenario.seed, 1e9), round(BACKLOG * weight / min(weights)))
        for tenant, weight in zip(scenario.tenants, weights, strict=True)
    ]
    records = _simulate(scenario, config, heapq.merge(*sources, key=_sent_s))[0]
    tokens = {tenant.name: 0 for tenant in scenario.tenants}
    first_end_s = min(max(r.end_s for r in records if r.prompt_class == name) for name in tokens)
    for record in records:
        tokens[record.prompt_class] += _count_tokens(record, first_end_s)
    return {
        tenant.name: tenant.load
        * tokens[tenant.name]
        / first_end_s
        / (tenant.prompt_tokens + tenant.output_tokens)
        for tenant in scenario.tenants
    }


def _run(scenario: Scenario, config: Config, rates: Mapping[str, float]) -> Outcome:
    first = scenario.tenants[0]
    asked = list(
        itertools.islice(_draw(first, scenario.seed, rates[first.name]), scenario.num_requests)
    )
    span_s = asked[-1].at_s
    sources: list[Iterable[Ask]] = [asked]
    for tenant in scenario.tenants[1:]:
        asks = _draw(tenant, scenario.seed, rates[tenant.name])
        sources.append(itertools.takewhile(lambda ask: ask.at_s < span_s, asks))
    asks = heapq.merge(*sources, key=_sent_s)
    records, metrics = _simulate(scenario, config, asks, max_drain_s=DRAIN_S)
    ttfts_s = sorted(
        r.arrivals[0].time_s - r.intended_s if r.arrivals else float("inf")
        for r in records
        if r.prompt_class == first.name
    )
    return Outcome(
        ttft_s=ttfts_s[int(0.99 * len(ttfts_s))],
        tokens_per_s=sum(_count_tokens(record, span_s) for record in records) / span_s,
        preemptions=round(metrics.value("preemptions_total")),
    )


def _draw(tenant: Tenant, seed: int, rate: float) -> Iterator[Ask]:
    """Yields a tenant's requests: Poisson arrivals, the same lengths at any rate."""
    arrivals, lengths = (random.Random(f"{seed} {tenant.name} {what}") for what in "al")
    at_s = 0.0
    for number in itertools.count():
        at_s += arrivals.expovariate(rate)
        prompt_tokens, output_tokens = (
            lengths.randint(mean // 2, mean + mean // 2)
            for mean in (tenant.prompt_tokens, tenant.output_tokens)
        )
        name = f"{tenant.name} {number}"
        yield Ask(
            index=number,
            request_id=name,
            at_s=at_s,
            prompt=(number,) * prompt_tokens,
            prompt_class=tenant.name,
            wanted_tokens=output_tokens,
            sampling={"max_tokens": output_tokens, "ignore_eos": True},
        )


def _count_tokens(record: RequestRecord, until_s: float) -> int:
    """Returns tokens of prompt and output that were there by then."""
    num_arrived = sum(arrival.time_s <= until_s for arrival in record.arrivals)
    return num_arrived and num_arrived + (record.prompt_tokens or 0)


def _sent_s(ask: Ask) -> float:
    return ask.at_s


def _simulate(
    scenario: Scenario, config: Config, asks: Iterable[Ask], *, max_drain_s: float | None = None
) -> tuple[list[RequestRecord], Metrics]:
    records: list[RequestRecord] = []
    metrics = Metrics()
    max_model_tokens = config.model.max_model_tokens
    assert max_model_tokens is not None
    named = {tenant.name: TenantLimits(weight=tenant.weight) for tenant in scenario.tenants}
    tenants = config.tenants.model_copy(update={"named": named})
    config = config.model_copy(update={"tenants": tenants})
    limits, buckets = find_shapes(config, max_model_tokens=max_model_tokens, min_rows=2)
    simulation = Simulation(
        config,
        device=VirtualDevice(_build_times(scenario, buckets), limits=limits, buckets=buckets),
        pool=build_pool(config, scenario.num_pages),
        max_model_tokens=max_model_tokens,
        metrics=metrics,
        on_record=records.append,
        max_drain_s=max_drain_s,
        sample_s=1e9,
        tenant_of=lambda ask: ask.prompt_class,
    )
    simulation.run(iter(asks))
    return records, metrics


def _build_times(scenario: Scenario, buckets: Iterable[Bucket]) -> StepTimes:
    """Returns step times that know no K/V."""
    times = StepTimes()
    for bucket in buckets:
        seconds = (
            scenario.decode_s
            + scenario.row_s * bucket.decode_seqs
            + scenario.chunk_token_s * bucket.chunk_tokens
        )
        for kv in range(20):
            times.observe(bucket, StepWork(kv, kv), seconds)
    return times
