"""What a result was measured on and with: what two results must share to be compared."""

from typing import Any

import jaxserve
from jaxserve.measure.bench_options import BenchOptions, CacheState, Served
from jaxserve.measure.load import AskMaker, Load
from jaxserve.measure.server_metrics import Snapshot


def build_manifest(
    load: Load,
    options: BenchOptions,
    served: Served,
    *,
    maker: AskMaker,
    snapshot: Snapshot | None,
    concurrency: int | None,
    num_dropped: int,
) -> dict[str, Any]:
    """Returns the facts of a benchmark, as JSON.

    Args:
      snapshot: of the server's metrics, which tell some of them.
      concurrency: that was kept, of a closed loop.
      num_dropped: entries that were not sent.
    """
    facts = maker.facts
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
            "concurrency": concurrency,
            "dropped_over_context": num_dropped,
        },
        "cache_state": find_cache_state(load, options, served),
        "seed": options.seed,
        "repeats": options.repeats,
        "warm_up": options.warm_up,
        "timeout_s": options.timeout_s,
        "max_drain_s": options.max_drain_s,
        "stated": list(served.stated),
    }


def find_cache_state(load: Load, options: BenchOptions, served: Served) -> CacheState:
    """Returns what a cache held of these prompts when each repeat began.

    Prompts that are new in every run are in no cache, whatever the server did before; with a
    chosen seed they are new to a fresh server alone.
    """
    if options.cache_state is not None:
        return options.cache_state
    if load.header.prompts == "unique" and not options.primes_cache:
        is_new = served.is_fresh or not options.is_seed_chosen
        return "cold" if is_new else "unknown"
    if options.primes_cache:
        is_same = load.header.prompts == "fixed" or options.repeats == 1
        return "primed" if is_same else "mixed"
    if not served.is_fresh or options.warm_up:
        return "unknown"
    return "cold" if options.repeats == 1 else "mixed"
