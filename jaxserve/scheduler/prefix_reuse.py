"""What of a sequence the prefix cache spares, and what of it is kept for others."""

import dataclasses
from collections.abc import Callable
from typing import Final

from jaxserve.metrics import Metrics
from jaxserve.plan import PageOut
from jaxserve.request import Sequence
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.fills import Fills
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_match import NO_MATCH, Match, MatchCounts

MIN_COPIED_SHARE: Final = 4  # a page is copied if a quarter of its tokens are spared


class PrefixReuse:
    """Between the scheduler and the cache: who may read, who publishes, and when.

    A page is published at the commit of the step that filled it, by a sequence that still holds it
    then. At least the last token is always computed. A request that wants its prompt scored reads
    nothing, for it needs the hidden states; it publishes.

    The cache's place of a sequence is remembered, so that no page is hashed twice for it.

    Attributes:
      returning: ids of sequences whose first pages come from host memory with a step in flight;
        they are to be published at its commit, whether it fills a page or not.
    """

    def __init__(self, pool: PagePool, metrics: Metrics, *, chunk_tokens: int) -> None:
        """Args:
        chunk_tokens: most prompt tokens of a step.
        """
        self._fills = Fills(pool.page_size, chunk_tokens=chunk_tokens)
        self._pool = pool
        self._cache = pool.cache
        self._counts = MatchCounts(metrics)
        self._host = None if pool.cache is None else pool.cache.host
        if pool.cache is not None:
            pool.cache.on_evicted = self._counts.count_eviction
        self._tails: dict[int, CachedPage] = {}  # by sequence id: the last page known of its tokens
        self._leaving: dict[int, int] = {}  # ended sequences with results to come → the last step
        self.returning: set[int] = set()

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
        path = self._find_in_host(node, sequence, num_wanted)
        if host := self._choose(path):
            return Match(last=last, host=host, num_tokens=start + len(host) * page_size)
        num_declined = len(path) * page_size
        rest = sequence.token_ids(start, min(start + page_size, num_wanted))
        beginning = cache.find_beginning(node, rest) if rest else None
        if beginning is None or beginning[1] * MIN_COPIED_SHARE < page_size:
            return Match(last=last, num_tokens=start, num_declined=num_declined)
        source, num_copied = beginning
        num_tokens = start + num_copied
        return Match(last=last, source=source, num_tokens=num_tokens, num_declined=num_declined)

    def _find_in_host(
        self, node: CachedPage, sequence: Sequence, num_wanted: int
    ) -> list[CachedPage]:
        """Returns the pages that go on behind `node` in host memory."""
        path: list[CachedPage] = []
        if self._host is None:
            return path
        page_size = self._pool.page_size
        while node.host_children and (end := (node.depth + 1) * page_size) <= num_wanted:
            found = self._host.find(node, sequence.token_ids(end - page_size, end))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def _choose(self, path: list[CachedPage]) -> tuple[CachedPage, ...]:
        return () if self._host is None or not path else self._host.choose(path)

    def verify(self, match: Match) -> Match:
        """Returns a match without the pages of host memory that are not what they were, and those
        behind them; to be asked of a sequence that starts now, as it reads all of their bytes."""
        if self._host is None:
            return match
        for index, node in enumerate(match.host):
            if not self._host.verify(node):
                num_tokens = (match.num_pages + index) * self._pool.page_size
                return dataclasses.replace(match, host=match.host[:index], num_tokens=num_tokens)
        return match

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
            self._counts.count_wait(identity)
        return waits

    def num_held(self, sequence: Sequence) -> int:
        """Returns how many of a waiting sequence's pages are held by others already."""
        match = self.find(sequence)
        return match.num_pages - self._num_taken(Match(last=match.last))

    def take(self, sequence: Sequence, match: Match) -> tuple[int, ...]:
        """Gives a sequence that starts what matched; the page to copy from is held too, until
        `release_source`. Returns the host pages whose content its first new pages get."""
        request, pool, cache = sequence.request, self._pool, self._cache
        if request.cache_identity is not None and cache is not None:
            self._counts.count_start(sequence, match, request.cache_identity, cache)
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
        if request.cache_identity is not None and cache is not None:
            num_from_host = len(match.host) * pool.page_size
            self._fills.start(sequence, num_kept=match.num_tokens - num_from_host)
        return self._take_from_host(sequence, match)

    def _take_from_host(self, sequence: Sequence, match: Match) -> tuple[int, ...]:
        if self._host is None or not match.host:
            return ()
        for node in match.host:
            self._host.take(node)
        self._tails[sequence.id] = match.host[-1]
        self.returning.add(sequence.id)
        return tuple(node.host_page for node in match.host if node.host_page is not None)

    def pop_moves(self, step_id: int) -> tuple[PageOut, ...]:
        """Returns the pages that the step just planned copies to host memory: it is about to be
        written over some of them."""
        return () if self._host is None else self._host.pop_moves(step_id)

    def release_source(self, match: Match, *, step_id: int) -> None:
        """The copy is planned with a step: until that has retired the page stays what it is."""
        if match.source is not None:
            self._pool.release([match.source.page], last_step=step_id)

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Keeps the full pages of a running sequence's first tokens, which a retired step wrote."""
        cache, identity = self._cache, sequence.request.cache_identity
        if cache is None or identity is None:
            return
        self.returning.discard(sequence.id)
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
        path = [] if tail is None else [node for node in tail.path() if _is_kept(node)]
        bad = [node for node in path if not node.is_proven] or path
        self.returning.discard(sequence_id)
        self._cache.ban([node.page for node in bad if node.is_live])
        if sequence is not None:
            self._cache.ban(sequence.pages[bad[0].depth - 1 if bad else 0 :])
        if bad:
            self._pool.drop(bad[0])

    def leave(self, sequence: Sequence, *, is_in_flight: bool) -> None:
        """A sequence has ended; what is in flight may still tell that it was not finite."""
        self._fills.leave(sequence)
        self.returning.discard(sequence.id)
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


def _is_kept(node: CachedPage) -> bool:
    """Whether a page is in the pool or in host memory."""
    return node.is_live or node.host_page is not None
