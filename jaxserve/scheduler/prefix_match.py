"""What the prefix cache has of a sequence's tokens, and the counts of it."""

import dataclasses
from typing import Final

from jaxserve.identity import CacheIdentity, find_difference
from jaxserve.metrics import Metrics
from jaxserve.request import Sequence
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.prefix_cache import PrefixCache


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Match:
    """What the cache has of a sequence's tokens.

    Attributes:
      last: the last of the full pages that can be shared; None for none.
      source: the page behind them whose beginning can be copied; None for none.
      host: the pages behind them that come back from host memory.
      num_declined: tokens in host memory that are computed sooner than copied.
      num_tokens: that need not be computed.
    """

    last: CachedPage | None = None
    source: CachedPage | None = None
    host: tuple[CachedPage, ...] = ()
    num_tokens: int = 0
    num_declined: int = 0

    @property
    def num_pages(self) -> int:
        """Full pages that are shared."""
        return 0 if self.last is None else self.last.depth


NO_MATCH: Final = Match()


class MatchCounts:
    """Counts by namespace, whose names are a bounded number of words."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def count_start(
        self, sequence: Sequence, match: Match, identity: CacheIdentity, cache: PrefixCache
    ) -> None:
        """Counts what a start asked of the cache; what a preempted one gets back is no hit."""
        metrics, namespace = self._metrics, self._label(identity)
        if match.num_tokens:
            num_from_host = len(match.host) * cache.page_size
            num_shared = match.num_pages * cache.page_size
            num_copied = match.num_tokens - num_shared - num_from_host
            metrics.prefix_cache_reused_tokens.labels(namespace).inc(match.num_tokens)
            metrics.prefix_cache_copied_tokens.labels(namespace).inc(num_copied)
            if num_from_host:
                metrics.host_tier_hit_tokens.labels(namespace).inc(num_from_host)
        if match.num_declined:
            metrics.host_tier_declined_tokens.labels(namespace).inc(match.num_declined)
        request = sequence.request
        if sequence.num_preemptions or request.sampling.prompt_logprobs is not None:
            return
        metrics.prefix_cache_queries.labels(namespace).inc()
        metrics.prefix_cache_query_tokens.labels(namespace).inc(len(request.prompt))
        if match.num_tokens:
            metrics.prefix_cache_hits.labels(namespace).inc()
            metrics.prefix_cache_hit_tokens.labels(namespace).inc(match.num_tokens)
            return
        first = sequence.token_ids(0, min(cache.page_size, len(request.prompt)))
        for other in cache.find_others(identity, first):
            reason = find_difference(other, identity) or "none"
            metrics.prefix_cache_refusals.labels(namespace, reason).inc()
            return

    def count_wait(self, identity: CacheIdentity) -> None:
        self._metrics.prefix_cache_waits.labels(self._label(identity)).inc()

    def count_eviction(self, identity: CacheIdentity) -> None:
        self._metrics.prefix_cache_evictions.labels(self._label(identity)).inc()

    def _label(self, identity: CacheIdentity) -> str:
        """Returns the metrics' word for a namespace: one of a bounded number."""
        if identity.scope == "shared":
            return f"shared:{identity.owner}"
        return self._metrics.tenants.label(identity.owner)
