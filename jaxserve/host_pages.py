"""What scheduler and runner both know of KV pages in host memory: numbers, and what they cost."""

import dataclasses
import math
from typing import Final, Protocol

# What lies beside the pool on its way, so both are bounded: more than a step of prompts frees.
MAX_SWAP_OUT: Final = 128  # pages of one step
MAX_SWAP_IN: Final = 512


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class SwapCosts:
    """What it costs to bring pages back from host memory, and to compute their tokens instead.

    Attributes:
      run_pages: pages of one run of the program; a run of fewer costs as much.
      run_s: seconds of one run, from host memory to the pool.
      token_s: seconds of a token of a prompt.
    """

    run_pages: int
    run_s: float
    token_s: float

    def is_worth(self, num_pages: int, *, page_size: int) -> bool:
        """Whether so many pages come back sooner than they are computed."""
        num_runs = -(-num_pages // self.run_pages)
        return num_runs * self.run_s < num_pages * page_size * self.token_s

    def break_even_tokens(self, page_size: int) -> float:
        """Returns from how many tokens on it is worth it; infinity where it never is."""
        if not self.is_worth(self.run_pages, page_size=page_size):
            return math.inf
        return self.run_s / self.token_s


class HostPages(Protocol):
    """Pages of host memory, by number. Plans say what is copied to and from them."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def costs(self) -> SwapCosts: ...

    def is_intact(self, host_page: int) -> bool:
        """Whether a page still holds what was put there; it looks at all of its bytes."""
        ...
