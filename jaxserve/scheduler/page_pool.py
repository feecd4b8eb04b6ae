"""Which pages of the KV pool are free, held, or waiting for a step in flight. No arrays here."""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence

from jaxserve.identity import CacheIdentity
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.prefix_cache import PrefixCache


class PagePool:
    """Every page but 0 is in exactly one place: free, held (a reference count ≥ 1), pending, or
    cached.

    Page 0 is the padding page and is never handed out. A page whose last holder gave it up is
    *pending* until the last step that may touch it has retired: a step in flight still writes it.
    Then it is *cached* where the prefix cache knows it, and free where not. What is cached can be
    had like what is free: the cache drops it when it is needed.

    Attributes:
      cache: what is known of full pages, held ones too; None where nothing is kept.
      retired_step: the last step whose result is on the host.
      num_repeated_tokens: tokens in shared pages, counted once for each holder but one.
    """

    def __init__(self, num_pages: int, page_size: int, *, cache: PrefixCache | None = None) -> None:
        self.cache = cache
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_pending = 0
        self.num_repeated_tokens = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._shared_tokens = [0] * num_pages  # in a page, while it is shared
        self._last_step = [0] * num_pages  # the last step that any holder gave it up after
        self._pending: dict[int, list[int]] = {}  # step_id → pages that wait for it, or did
        self._waits_for = [0] * num_pages  # the step that a pending page waits for
        self.retired_step = 0

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold: all but the padding page."""
        return self.num_pages - 1

    @property
    def capacity_tokens(self) -> int:
        return self.num_usable * self.page_size

    @property
    def num_free(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody holds."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and the cache keeps."""
        return 0 if self.cache is None else self.cache.num_idle

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_free - self.num_pending

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes pages with one reference each; the caller has looked at `num_free`."""
        free, cache = self._free, self.cache
        assert num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        while cache is not None and num_pages > len(free):
            free += cache.evict()
        pages = [free.pop() for _ in range(num_pages)]
        if cache is not None:
            cache.hand_out(pages)
        for page in pages:
            self._references[page] = 1
            self._last_step[page] = 0
        return pages

    def share(self, pages: Sequence[int], num_tokens: int) -> None:
        """Adds a holder to each page of a table's beginning; what is shared is written by nobody.

        Args:
          num_tokens: in the pages; the last may be part-filled.
        """
        assert len(pages) == self.pages_for(num_tokens), f"{pages} for {num_tokens} tokens"
        for index, page in enumerate(pages):
            assert self._references[page] > 0, f"page {page} is shared but not held"
            self._references[page] += 1
            num_in_page = min(num_tokens - index * self.page_size, self.page_size)
            self._shared_tokens[page] = num_in_page
            self.num_repeated_tokens += num_in_page

    def hold(self, page: int) -> None:
        """Adds a holder to a full page of the cache, whether anybody holds it or not."""
        assert self.cache is not None
        assert page in self.cache, f"page {page} is not in the cache"
        if self._references[page]:
            self.num_repeated_tokens += self.page_size
        elif self._waits_for[page]:
            self._waits_for[page] = 0
            self.num_pending -= 1
        else:
            self.cache.take(page)
        self._references[page] += 1
        self._shared_tokens[page] = self.page_size

    def num_taken_by(self, pages: Iterable[int]) -> int:
        """Returns by how many `num_free` falls when these cached pages are held."""
        waits_for = self._waits_for
        return sum(not (self._references[page] or waits_for[page]) for page in pages)

    def drop(self, node: CachedPage) -> None:
        """Has the cache forget a page and all behind it; who holds one of them keeps it."""
        assert self.cache is not None
        self._free += self.cache.remove(node)

    def flush(self, matches: Callable[[CacheIdentity], bool]) -> int:
        """Has the cache forget all pages of some identities; returns how many are free for it.
        Those that are held are free once their holders are done."""
        freed = [] if self.cache is None else self.cache.flush(matches)
        self._free += freed
        return len(freed)

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Returns how many pages nobody would hold any more without these tables."""
        if not self.num_repeated_tokens:
            return sum(map(len, tables))
        counts = collections.Counter(itertools.chain.from_iterable(tables))
        return sum(self._references[page] == count for page, count in counts.items())

    def release(self, pages: Iterable[int], *, last_step: int) -> None:
        """Drops one reference of each page.

        Args:
          last_step: the holder's last planned step; until it has retired nobody gets the pages.
        """
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released but not held"
            self._references[page] -= 1
            waits_for = self._last_step[page] = max(last_step, self._last_step[page])
            if self._references[page]:
                self.num_repeated_tokens -= self._shared_tokens[page]
                continue
            if waits_for > self.retired_step:
                self._pending.setdefault(waits_for, []).append(page)
                self._waits_for[page] = waits_for
                self.num_pending += 1
            else:
                self._put_back(page)

    def retire(self, step_id: int) -> None:
        """A step's result is on the host: pages that only waited for it become free."""
        self.retired_step = step_id
        for waited_for in [step for step in self._pending if step <= step_id]:
            for page in self._pending.pop(waited_for):
                if self._waits_for[page] == waited_for:  # else the cache gave it to somebody
                    self._waits_for[page] = 0
                    self.num_pending -= 1
                    self._put_back(page)
        if self.cache is not None:
            self.cache.retire(step_id)

    def _put_back(self, page: int) -> None:
        if self.cache is not None and page in self.cache:
            self.cache.set_idle(page)
        else:
            self._free.append(page)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts that no page is lost, twice anywhere, or free in a live table.

        Args:
          tables: the page tables of all live sequences; without them only the pool itself is
            checked.
        """
        pending = [page for page, step in enumerate(self._waits_for) if step]
        cached = [] if self.cache is None else [node.page for node in self.cache if node.is_idle]
        held = [page for page, count in enumerate(self._references) if count]
        assert all(count >= 0 for count in self._references), "a negative reference count"
        repeated = sum(
            (count - 1) * self._shared_tokens[page]
            for page, count in enumerate(self._references)
            if count > 1
        )
        assert repeated == self.num_repeated_tokens, f"{repeated} tokens are shared"
        assert len(pending) == self.num_pending, f"{len(pending)} pages pend: {self.num_pending}"
        assert all(step > self.retired_step for step in self._pending), "a page pends for nothing"
        assert all(page in self._pending[self._waits_for[page]] for page in pending)
        everywhere = sorted(self._free + pending + held + cached)
        assert everywhere == list(range(1, self.num_pages)), (
            f"pages lost or twice: free {self._free}, pending {pending}, held {held}, "
            f"cached {cached}"
        )
        if self.cache is not None:
            self.cache.check()
            known = [page for page in self._free if page in self.cache]
            assert not known, f"free pages {known} can be found by their tokens"
        if tables is None:
            return
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        assert counts == self._references, (
            f"page tables use the pages {counts} times, the reference counts are {self._references}"
        )
