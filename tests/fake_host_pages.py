"""Host memory for `FakeRunner`: what it holds of each page, and the ways in which it goes bad."""

from typing import Final

from jaxserve.host_pages import SwapCosts

Cell = tuple[int, int, int]  # token, position, mark of who wrote it

ALWAYS_WORTH_IT: Final = SwapCosts(run_pages=16, run_s=1e-9, token_s=1.0)


class FakeHostPages:
    """The cells of pages, each with what they were when they were stored."""

    def __init__(self, num_pages: int, *, costs: SwapCosts = ALWAYS_WORTH_IT) -> None:
        self.num_pages = num_pages
        self.page_bytes = 100
        self.costs = costs
        self._cells: dict[int, list[Cell]] = {}
        self._sums: dict[int, int] = {}

    @property
    def stored(self) -> list[int]:
        """Pages that something was put into."""
        return list(self._cells)

    def store(self, host_page: int, cells: list[Cell]) -> None:
        assert 0 <= host_page < self.num_pages
        self._cells[host_page] = list(cells)
        self._sums[host_page] = hash(tuple(cells))

    def read(self, host_page: int) -> list[Cell]:
        return list(self._cells[host_page])

    def is_intact(self, host_page: int) -> bool:
        cells = self._cells.get(host_page)
        return cells is not None and hash(tuple(cells)) == self._sums[host_page]

    def damage(self, host_page: int) -> None:
        """One of its tokens changes."""
        token, position, mark = self._cells[host_page][-1]
        self._cells[host_page][-1] = (token ^ 1, position, mark)

    def lose(self, host_page: int) -> None:
        """Nothing is left of it."""
        del self._cells[host_page]
