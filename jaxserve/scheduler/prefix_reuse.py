"""What of a sequence the prefix cache spares, and what of it is kept for others."""

import dataclasses
from collections.abc import Callable
from typing import Final

from jaxserve.identity import CacheIdentity, find_difference
from jaxserve.metrics import Metrics
from jaxserve.request import Sequence
from jaxserve.scheduler.fills import Fills
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import CachedPage

MIN_COPIED_SHARE: Final = 4  # a page is copied if a quarter of its tokens are spared


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Match:
    """What the cache has of a sequence's tokens.

    Attributes:
      last: the last of the full pages that can be shared; None for none.
      source: the page behind them whose beginning can be copied; None for none.
      num_tokens: that need not be computed.
    """

    last: CachedPage | None = None
    source: CachedPage | None = None
    num_tokens: int = 0

    @property
    def num_pages(self) -> int:
        """Full pages."""
        return 0 if self.last is None else self.last.depth


NO_MATCH: Final = Match()


class PrefixReuse:
    """Between the scheduler and the cache: who may read, who publishes, and when.

    A page is published at the commit of the step that filled it, by a sequence that still holds it
    then. At least the last token is always computed. A request that wants its prompt scored reads
    nothing, for it needs the hidden states; it publishes.

    The cache's place of a sequence is remembered, so that no page is hashed twice for it.
    """

    def __init__(self, pool: PagePool, metrics: Metrics, *, chunk_tokens: int) -> None:
        """Args:
        chunk_tokens: most prompt tokens of a step.
        """
        self._fills = Fills(pool.page_size, chunk_tokens=chunk_tokens)
        self._pool = pool
        self._cache = pool.cache
        self._metrics = metrics
        if pool.cache is not None:
            pool.cache.on_evicted = self._count_eviction
        self._tails: dict[int, CachedPage] = {}  # by sequence id: the last page known of its tokens
        self._leaving: dict[int, int] = {}  # ended sequences with results to come → the last step

    def find(self, sequence: Sequence) -> Match:
        """Returns what the cache has for a sequence that is to start; takes nothing."""
        cache, request = self._cache, sequence.request
        if cache is None or request.cache_identity is None:
            return NO_MATCH
        if request.sampling.prompt_logprobs is not None:
            return NO_MATCH
        node = self._find_tail(sequence) or cache.find_identity(request.cache_identity)
        if node is None:
            return NO_MATCH
        page_size, num_wanted = cache.page_size, sequence.num_tokens - 1
        while node.depth * page_size > num_wanted:
            assert node.parent is not None
            node = node.parent
        while (end := (node.depth + 1) * page_size) <= num_wanted:
            found = cache.find(node, sequence.token_ids(end - page_size, end))
            if found is None:
                break
            node = found
        last = node if node.depth else None
        if last is not None:
            self._tails[sequence.id] = last
        start = node.depth * page_size
        rest = sequence.token_ids(start, min(start + page_size, num_wanted))
        beginning = cache.find_beginning(node, rest) if rest else None
        if beginning is None or beginning[1] * MIN_COPIED_SHARE < page_size:
            return Match(last=last, num_tokens=start)
        source, num_copied = beginning
        return Match(last=last, source=source, num_tokens=start + num_copied)

    def find_affordable(self, sequence: Sequence, *, num_pages: int, num_free: int) -> Match | None:
        """Returns as much of a match as fits into the free pages; None where the sequence cannot
        start with any.

        Args:
          num_pages: that it would take without the cache.
        """
        match = self.find(sequence)
        if num_pages < num_free:  # even if all of it is idle, and a page to copy from
            return match
        if num_pages - match.num_pages + self._num_taken(match) <= num_free:
            return match
        if match.source is None:
            return None
        match = Match(last=match.last, num_tokens=match.num_pages * self._pool.page_size)
        num_pages += self._num_taken(match) - match.num_pages
        return match if num_pages <= num_free else None

    def should_wait(
        self,
        sequence: Sequence,
        match: Match,
        *,
        step_id: int,
        is_in_flight: Callable[[Sequence], bool],
    ) -> bool:
        """Returns whether a sequence that could start waits for another that is filling its next
        page; as `Fills.should_wait`."""
        identity = sequence.request.cache_identity
        if self._cache is None or identity is None:
            return False
        if sequence.request.sampling.prompt_logprobs is not None:
            return False
        had_waited = self._fills.has_waited(sequence)
        waits = self._fills.should_wait(
            sequence, match.last, step_id=step_id, is_in_flight=is_in_flight
        )
        if waits and not had_waited:
            self._metrics.prefix_cache_waits.labels(self._label(identity)).inc()
        return waits

    def num_held(self, sequence: Sequence) -> int:
        """Returns how many of a waiting sequence's pages are held by others already."""
        match = self.find(sequence)
        return match.num_pages - self._num_taken(Match(last=match.last))

    def take(self, sequence: Sequence, match: Match) -> None:
        """Gives a sequence that starts what matched; the page to copy from is held too, until
        `release_source`."""
        request, pool = sequence.request, self._pool
        if request.cache_identity is not None and self._cache is not None:
            self._count(sequence, match, request.cache_identity)
        path = [] if match.last is None else match.last.path()
        for node in path:
            node.num_uses += 1
            pool.hold(node.page)
        if match.source is not None:
            match.source.num_uses += 1
            pool.hold(match.source.page)
        sequence.pages += [node.page for node in path]
        sequence.num_computed = match.num_tokens
        if not (sequence.num_preemptions or sequence.output):
            request.num_cached = match.num_tokens
        if request.cache_identity is not None and self._cache is not None:
            self._fills.start(sequence)

    def release_source(self, match: Match, *, step_id: int) -> None:
        """The copy is planned with a step: until that has retired the page stays what it is."""
        if match.source is not None:
            self._pool.release([match.source.page], last_step=step_id)

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Keeps the full pages of a running sequence's first tokens, which a retired step wrote."""
        cache, identity = self._cache, sequence.request.cache_identity
        if cache is None or identity is None:
            return
        page_size = cache.page_size
        node = self._find_tail(sequence)
        depth = 0 if node is None else node.depth
        num_full = num_written // page_size
        if depth >= num_full:
            return
        parent = node or cache.add_identity(identity)
        for index in range(depth, num_full):
            token_ids = sequence.token_ids(index * page_size, (index + 1) * page_size)
            added = cache.add(parent, token_ids, sequence.pages[index])
            if added is None:
                break
            self._tails[sequence.id] = parent = added

    @property
    def is_on(self) -> bool:
        """Whether there is a cache."""
        return self._cache is not None

    def prove(self, sequence_id: int) -> None:
        """A finite token was sampled behind all that is known of a sequence."""
        node = self._tails.get(sequence_id)
        while node is not None and not node.is_proven:
            node.is_proven = True
            node = node.parent

    def forget(self, sequence_id: int, sequence: Sequence | None) -> None:
        """What was computed from a sequence's K/V was not finite: what nobody has had a good token
        from is dropped, or all of it where all were good once.

        Args:
          sequence: None where it has ended.
        """
        if self._cache is None:
            return
        tail = self._tails.pop(sequence_id, None)
        path = [] if tail is None else [node for node in tail.path() if node.is_live]
        bad = [node for node in path if not node.is_proven] or path
        self._cache.ban([node.page for node in bad])
        if sequence is not None:
            self._cache.ban(sequence.pages[bad[0].depth - 1 if bad else 0 :])
        if bad:
            self._pool.drop(bad[0])

    def leave(self, sequence: Sequence, *, is_in_flight: bool) -> None:
        """A sequence has ended; what is in flight may still tell that it was not finite."""
        self._fills.leave(sequence)
        if is_in_flight:
            self._leaving[sequence.id] = sequence.last_step
        else:
            self._tails.pop(sequence.id, None)

    def retire(self, step_id: int) -> None:
        """All results up to a step's are in."""
        for sequence_id in [id_ for id_, step in self._leaving.items() if step <= step_id]:
            del self._leaving[sequence_id]
            self._tails.pop(sequence_id, None)

    def check(self, live: set[int]) -> None:
        """Asserts that only live sequences, and those in flight, are remembered."""
        assert self._tails.keys() <= live | self._leaving.keys(), "an ended sequence is remembered"
        self._fills.check(live)

    def _num_taken(self, match: Match) -> int:
        """Returns how many pages are no longer to be had once a match is taken."""
        path = [] if match.last is None else match.last.path()
        if match.source is not None:
            path.append(match.source)
        return self._pool.num_taken_by(node.page for node in path)

    def _find_tail(self, sequence: Sequence) -> CachedPage | None:
        """Returns the last page that is still known of a sequence's tokens: its own, or another
        choice's as far as the prompt goes."""
        node = self._tails.get(sequence.id)
        if node is None and len(sequence.request.sequences) > 1:
            tails = (self._tails.get(other.id) for other in sequence.request.sequences)
            node = next((tail for tail in tails if tail is not None), None)
            num_full = len(sequence.request.prompt) // self._pool.page_size
            while node is not None and node.depth > num_full:
                node = node.parent
        while node is not None and not node.is_live:
            node = node.parent
        return node if node is not None and node.depth else None

    def _count(self, sequence: Sequence, match: Match, identity: CacheIdentity) -> None:
        """Counts what a start asked of the cache; what a preempted one gets back is no hit."""
        metrics, cache = self._metrics, self._cache
        namespace = self._label(identity)
        if match.num_tokens:
            num_copied = match.num_tokens - match.num_pages * self._pool.page_size
            metrics.prefix_cache_reused_tokens.labels(namespace).inc(match.num_tokens)
            metrics.prefix_cache_copied_tokens.labels(namespace).inc(num_copied)
        request = sequence.request
        if sequence.num_preemptions or request.sampling.prompt_logprobs is not None:
            return
        metrics.prefix_cache_queries.labels(namespace).inc()
        metrics.prefix_cache_query_tokens.labels(namespace).inc(len(request.prompt))
        if match.num_tokens:
            metrics.prefix_cache_hits.labels(namespace).inc()
            metrics.prefix_cache_hit_tokens.labels(namespace).inc(match.num_tokens)
            return
        assert cache is not None
        first = sequence.token_ids(0, min(cache.page_size, len(request.prompt)))
        for other in cache.find_others(identity, first):
            reason = find_difference(other, identity) or "none"
            metrics.prefix_cache_refusals.labels(namespace, reason).inc()
            return

    def _count_eviction(self, identity: CacheIdentity) -> None:
        self._metrics.prefix_cache_evictions.labels(self._label(identity)).inc()

    def _label(self, identity: CacheIdentity) -> str:
        """Returns the metrics' word for a namespace: one of a bounded number."""
        if identity.scope == "shared":
            return f"shared:{identity.owner}"
        return self._metrics.tenants.label(identity.owner)
