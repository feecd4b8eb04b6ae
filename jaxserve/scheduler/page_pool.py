"""Which pages of the KV pool are free, held, or waiting for a step in flight. No arrays here."""

import collections
import itertools
from collections.abc import Iterable, Sequence


class PagePool:
    """Every page but 0 is in exactly one place: free, held (a reference count ≥ 1), or pending.

    Page 0 is the padding page and is never handed out. A page whose last holder gave it up is
    *pending* until the last step that may touch it has retired: a step in flight still writes it.

    Attributes:
      num_repeated_tokens: tokens in shared pages, counted once for each holder but one.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_pending = 0
        self.num_repeated_tokens = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._shared_tokens = [0] * num_pages  # in a page, while it is shared
        self._last_step = [0] * num_pages  # the last step that any holder gave it up after
        self._pending: dict[int, list[int]] = {}  # step_id → pages free once it has retired
        self._retired_step = 0

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold: all but the padding page."""
        return self.num_pages - 1

    @property
    def capacity_tokens(self) -> int:
        return self.num_usable * self.page_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_usable - len(self._free) - self.num_pending

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages with one reference each; the caller has looked at `num_free`."""
        free = self._free
        assert num_pages <= len(free), f"{num_pages} pages wanted, {len(free)} free"
        pages = [free.pop() for _ in range(num_pages)]
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
            if waits_for > self._retired_step:
                self._pending.setdefault(waits_for, []).append(page)
                self.num_pending += 1
            else:
                self._free.append(page)

    def retire(self, step_id: int) -> None:
        """A step's result is on the host: pages that only waited for it become free."""
        self._retired_step = step_id
        for waited_for in [step for step in self._pending if step <= step_id]:
            pages = self._pending.pop(waited_for)
            self.num_pending -= len(pages)
            self._free.extend(pages)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts that no page is lost, twice anywhere, or free in a live table.

        Args:
          tables: the page tables of all live sequences; without them only the pool itself is
            checked.
        """
        pending = [page for pages in self._pending.values() for page in pages]
        held = [page for page, count in enumerate(self._references) if count]
        assert all(count >= 0 for count in self._references), "a negative reference count"
        repeated = sum(
            (count - 1) * self._shared_tokens[page]
            for page, count in enumerate(self._references)
            if count > 1
        )
        assert repeated == self.num_repeated_tokens, f"{repeated} tokens are shared"
        assert len(pending) == self.num_pending, f"{len(pending)} pages pend: {self.num_pending}"
        assert all(step > self._retired_step for step in self._pending), "a page pends for nothing"
        everywhere = sorted(self._free + pending + held)
        assert everywhere == list(range(1, self.num_pages)), (
            f"pages lost or twice: free {self._free}, pending {pending}, held {held}"
        )
        if tables is None:
            return
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        assert counts == self._references, (
            f"page tables use the pages {counts} times, the reference counts are {self._references}"
        )
