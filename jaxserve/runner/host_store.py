"""KV pages in host memory: the bytes, and whether they still are what was put there."""

import zlib
from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from jaxserve.host_pages import SwapCosts
from jaxserve.runner.batch import SWAP_WIDTH
from jaxserve.runner.spec import RunnerSpec


class HostStore:
    """A fixed number of pages; the real side of `HostPages`.

    Each page has a checksum, made when it is stored. What is handed out is a copy: a page may be
    overwritten while the copy is on its way to the device.

    Attributes:
      costs: measured once, by whoever has the programs.
    """

    def __init__(self, num_pages: int, spec: RunnerSpec) -> None:
        self.num_pages = num_pages
        self.page_bytes = spec.page_bytes
        self.costs = SwapCosts(run_pages=SWAP_WIDTH, run_s=0.0, token_s=0.0)
        self._dtype = jnp.dtype(spec.kv_dtype)
        self._page_shape = spec.page_shape
        # the system gives the memory as it is written
        self._bytes = np.empty((num_pages, spec.page_bytes), np.uint8)
        self._checksums: list[int | None] = [None] * num_pages

    def store(self, host_pages: Sequence[int], pages_WL2KRH: np.ndarray) -> None:
        """Keeps the first of these pages under the given numbers; those after them are padding."""
        for host_page, page_L2KRH in zip(host_pages, pages_WL2KRH, strict=False):
            kept = self._bytes[host_page]
            kept[:] = page_L2KRH.reshape(-1).view(np.uint8)
            self._checksums[host_page] = zlib.crc32(kept)

    def is_intact(self, host_page: int) -> bool:
        return zlib.crc32(self._bytes[host_page]) == self._checksums[host_page]

    def read(self, host_pages: Sequence[int]) -> np.ndarray:
        """Returns a copy of at most `SWAP_WIDTH` pages, ``in_WL2KRH``; zeros are padding."""
        in_WL2KRH = np.zeros((SWAP_WIDTH, *self._page_shape), self._dtype)
        for page_L2KRH, host_page in zip(in_WL2KRH, host_pages, strict=False):
            page_L2KRH.reshape(-1).view(np.uint8)[:] = self._bytes[host_page]
        return in_WL2KRH
