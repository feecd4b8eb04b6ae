"""Which pages of the KV pool are free, held, or waiting for a step in flight. No arrays here."""

from collections.abc import Iterable, Sequence


class PagePool:
    """Every page but 0 is in exactly one place: free, held (a reference count ≥ 1), or pending.

    Page 0 is the padding page and is never handed out. A page whose last holder gave it up is
    *pending* until the last step that may touch it has retired: a step in flight still writes it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_pending = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
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

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page; a shared page is full and is written by nobody."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is shared but not held"
            self._references[page] += 1

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
