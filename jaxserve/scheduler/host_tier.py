"""Which pages of the prefix cache are in host memory, on their way there, and which goes first."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from jaxserve.host_pages import MAX_SWAP_IN, MAX_SWAP_OUT, HostPages
from jaxserve.identity import Digest, page_key
from jaxserve.metrics import Metrics
from jaxserve.plan import PageOut
from jaxserve.scheduler.cached_page import CachedPage

_Entry = tuple[float, int, int]  # rank, stamp, host page


class HostTier:
    """Accounts for the host pages: each is free, some cached page's, or given up on its way.

    A page that the pool drops is copied by the step that is being planned, which reads it before
    anything is written. It can be found once that step has retired. It is found by its tokens,
    behind the page they follow: the tree is the prefix cache's, so a digest that collides cannot
    mislead. What is looked up is checked against its checksum before it is used.

    Copies are made so many at a time however few are wanted, so pages that would be dropped next
    ride along, where host pages are free.

    When there is no room the page goes that is worth the least, by the rule of the prefix cache on
    a clock of its own, and nothing goes before what follows it.
    """

    def __init__(self, pages: HostPages, metrics: Metrics, *, page_size: int) -> None:
        self._pages = pages
        self._metrics = metrics
        self._page_size = page_size
        self._is_worth_it = pages.costs.break_even_tokens(page_size) < math.inf
        self._free = list(range(pages.num_pages - 1, -1, -1))
        self._nodes: dict[int, CachedPage] = {}  # by host page
        self._stamps: dict[int, int] = {}  # of those that are stored
        self._ranks: dict[int, float] = {}
        self._heap: list[_Entry] = []  # some are out of date
        self._clock = 0.0
        self._next_stamp = itertools.count(1)
        self._unstored: set[int] = set()  # host pages that a step is to fill
        self._abandoned: set[int] = set()  # of those, what nobody wants any more
        self._queued: list[PageOut] = []  # for the step that is being planned
        self._storing: dict[int, list[int]] = {}  # step id → host pages that it fills
        self._worth_of: Callable[[CachedPage], float]
        self._remove: Callable[[CachedPage], object]

    def __iter__(self) -> Iterator[CachedPage]:
        """Yields what is in host memory, in the pool too or not."""
        for host_page in self._stamps:
            yield self._nodes[host_page]

    def attach(
        self,
        *,
        worth_of: Callable[[CachedPage], float],
        remove: Callable[[CachedPage], object],
    ) -> None:
        """Tells it of the prefix cache: what a page is worth, and how one leaves the tree."""
        self._worth_of = worth_of
        self._remove = remove

    def find(self, parent: CachedPage, token_ids: tuple[int, ...]) -> CachedPage | None:
        """Returns the page of these tokens behind `parent` that is in host memory alone."""
        node = parent.host_children.get(token_ids)
        return None if node is None or node.host_page in self._unstored else node

    def choose(self, path: list[CachedPage]) -> tuple[CachedPage, ...]:
        """Returns as many of a path's pages as are to be copied back at once; none where they are
        computed sooner."""
        some = path[:MAX_SWAP_IN]
        is_worth = self._pages.costs.is_worth(len(some), page_size=self._page_size)
        return tuple(some) if is_worth else ()

    def verify(self, node: CachedPage) -> bool:
        """Returns whether a page still is what was stored; if not, nobody finds it any more."""
        assert node.host_page is not None
        if self._pages.is_intact(node.host_page):
            return True
        self._remove(node)
        self._metrics.host_tier_dropped_pages.labels("damaged").inc()
        return False

    def take(self, node: CachedPage) -> None:
        """A page is copied back; it stays here too."""
        node.num_uses += 1
        assert node.host_page is not None
        self._stamp(node.host_page)

    def keep(self, node: CachedPage) -> bool:
        """Returns whether a page that is about to leave the pool is in host memory from now on."""
        if node.host_page is not None:
            return True
        if not self._is_worth_it:
            return False
        if len(self._queued) < MAX_SWAP_OUT and (self._free or self._drop_least()):
            self._queue(node)
            return True
        self._metrics.host_tier_dropped_pages.labels("budget").inc()
        return False

    def forget(self, node: CachedPage) -> None:
        """A page's place in host memory is free; if a step is to fill it, once that has retired."""
        host_page = node.host_page
        assert host_page is not None
        node.host_page = None
        del self._nodes[host_page]
        self._show_level()
        if host_page in self._unstored:
            self._abandoned.add(host_page)
            return
        del self._stamps[host_page], self._ranks[host_page]
        self._free.append(host_page)

    def offer(self, node: CachedPage) -> None:
        """A page may go, as far as it is for others: nothing follows it here, or the pool has it
        too."""
        host_page = node.host_page
        if host_page is None or host_page in self._unstored:
            return
        if node.is_live or not node.host_children:
            if len(self._heap) > 4 * len(self._stamps) + 64:  # most are out of date
                self._heap = [entry for entry in self._heap if self._is_current(entry)]
                heapq.heapify(self._heap)
            entry = self._ranks[host_page], self._stamps[host_page], host_page
            heapq.heappush(self._heap, entry)

    def pop_moves(self, step_id: int) -> tuple[PageOut, ...]:
        """Returns what the step that has been planned copies to host memory."""
        if not self._queued:
            return ()
        queued, self._queued = self._queued, []
        moves = [move for move in queued if move.host_page not in self._abandoned]
        for move in queued:
            if move.host_page in self._abandoned:  # dropped while the step was planned
                self._abandoned.remove(move.host_page)
                self._unstored.remove(move.host_page)
                self._free.append(move.host_page)
        moves += self._find_riders(moves)
        self._storing[step_id] = [move.host_page for move in moves]
        return tuple(moves)

    def retire(self, step_id: int) -> None:
        """What a step copied is there."""
        for host_page in self._storing.pop(step_id, ()):
            self._unstored.remove(host_page)
            if host_page in self._abandoned:
                self._abandoned.remove(host_page)
                self._free.append(host_page)
            else:
                self._stamp(host_page)
        self._show_level()

    def check(self, roots: Iterable[CachedPage], *, digest: Digest) -> None:
        """Asserts that each host page is in one place, and all in host memory alone is in the tree,
        under its key, and can go some day."""
        everywhere = sorted([*self._free, *self._nodes, *self._abandoned])
        assert everywhere == list(range(self._pages.num_pages)), f"host pages: {everywhere}"
        assert self._abandoned <= self._unstored
        assert self._unstored.isdisjoint(self._stamps)
        assert self._nodes.keys() - self._unstored == self._stamps.keys() == self._ranks.keys()
        planned = [host_page for pages in self._storing.values() for host_page in pages]
        planned += [move.host_page for move in self._queued]
        assert sorted(planned) == sorted(self._unstored), "a host page is filled by no step"
        in_heap = {(stamp, host_page) for _, stamp, host_page in self._heap}
        for host_page, node in self._nodes.items():
            assert node.host_page == host_page
            if host_page in self._stamps and (node.is_live or not node.host_children):
                entry = self._stamps[host_page], host_page
                assert entry in in_heap, f"host page {host_page} can never go"
        alone: set[int] = set()
        rest = list(roots)
        while rest:
            parent = rest.pop()
            rest += parent.children
            for token_ids, node in parent.host_children.items():
                assert node.parent is parent
                assert node.token_ids == token_ids
                assert node.key == page_key(parent.key, token_ids, digest=digest)
                assert (node.depth, node.identity) == (parent.depth + 1, parent.identity)
                assert node.host_page is not None
                assert not any((node.is_live, node.is_idle, node.page, node.children))
                alone.add(node.host_page)
                rest.append(node)
        assert alone == {page for page, node in self._nodes.items() if not node.is_live}

    def _show_level(self) -> None:
        num_bytes = len(self._nodes) * self._pages.page_bytes
        self._metrics.host_tier_used_bytes.set(num_bytes)

    def _queue(self, node: CachedPage) -> None:
        host_page = self._free.pop()
        node.host_page = host_page
        self._nodes[host_page] = node
        self._unstored.add(host_page)
        self._queued.append(PageOut(page=node.page, host_page=host_page))

    def _find_riders(self, moves: list[PageOut]) -> list[PageOut]:
        """Returns pages before those that leave, which are the next to leave, until a run of the
        copy is full."""
        room = min(-len(moves) % self._pages.costs.run_pages, len(self._free))
        for move in moves:
            node = self._nodes[move.host_page].parent
            while room and node is not None and node.depth:
                if node.is_idle and node.host_page is None:
                    self._queue(node)
                    room -= 1
                node = node.parent
        riders, self._queued = self._queued, []
        return riders

    def _stamp(self, host_page: int) -> None:
        """A page was used, or has come."""
        node = self._nodes[host_page]
        self._stamps[host_page] = next(self._next_stamp)
        self._ranks[host_page] = self._clock + self._worth_of(node)
        self.offer(node)

    def _drop_least(self) -> bool:
        """Makes room for a page; returns whether it could."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            rank, _, host_page = entry
            node = self._nodes[host_page]
            if node.host_children and not node.is_live:
                continue  # offered again when the last of them has gone
            self._clock = max(self._clock, rank)
            if node.is_live:
                self.forget(node)
            else:
                self._remove(node)
            self._metrics.host_tier_dropped_pages.labels("budget").inc()
            return True
        return False

    def _is_current(self, entry: _Entry) -> bool:
        _, stamp, host_page = entry
        return self._stamps.get(host_page) == stamp
