"""KV pages in host memory: the bytes, and whether they still are what was put there."""

import functools
import itertools
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxserve.host_pages import SwapCosts
from jaxserve.runner.batch import SWAP_WIDTH
from jaxserve.runner.spec import RunnerSpec
from jaxserve.runner.steps import KV, empty_pages


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
        self._pages = jax.eval_shape(functools.partial(empty_pages, SWAP_WIDTH, spec=spec))
        # where each array of a layer has its share of the layer's bytes
        arrays = jax.tree.leaves(self._pages[0])
        sizes = [array.size * array.dtype.itemsize // SWAP_WIDTH for array in arrays]
        ends = list(itertools.accumulate(sizes))
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        # the system gives the memory as it is written
        self._bytes = np.empty((num_pages, len(self._pages), ends[-1]), np.uint8)
        self._checksums: list[int | None] = [None] * num_pages

    def store(self, host_pages: Sequence[int], layers: KV) -> None:
        """Keeps the first pages of each layer's ``out_W2KRH`` under the given numbers; those after
        them are padding.

        Args:
          layers: in numpy's arrays.
        """
        places = list(host_pages)
        for layer, out_W2KRH in enumerate(layers):
            for part, array in zip(self._parts, jax.tree.leaves(out_W2KRH), strict=True):
                rows = array.reshape(len(array), -1).view(np.uint8)
                self._bytes[places, layer, part] = rows[: len(places)]
        for host_page in places:
            self._checksums[host_page] = zlib.crc32(self._bytes[host_page])

    def is_intact(self, host_page: int) -> bool:
        return zlib.crc32(self._bytes[host_page]) == self._checksums[host_page]

    def read(self, host_pages: Sequence[int]) -> KV:
        """Returns a copy of at most `SWAP_WIDTH` pages, each layer's ``in_W2KRH`` in arrays of
        numpy's; zeros are padding."""
        places = list(host_pages)
        layers: KV = jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), self._pages)
        for layer, in_W2KRH in enumerate(layers):
            for part, array in zip(self._parts, jax.tree.leaves(in_W2KRH), strict=True):
                rows = array.reshape(SWAP_WIDTH, -1).view(np.uint8)
                rows[: len(places)] = self._bytes[places, layer, part]
        return layers
