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
        self._shape = (SWAP_WIDTH, *spec.kv_shape[1:])
        self._num_layers = spec.model.num_layers
        # the system gives the memory as it is written
        layer_bytes = spec.page_bytes // self._num_layers
        self._bytes = np.empty((num_pages, self._num_layers, layer_bytes), np.uint8)
        self._checksums: list[int | None] = [None] * num_pages

    def store(self, host_pages: Sequence[int], layers: Sequence[np.ndarray]) -> None:
        """Keeps the first pages of each layer's ``out_W2KRH`` under the given numbers; those after
        them are padding."""
        places = list(host_pages)
        for layer, out_W2KRH in enumerate(layers):
            rows = out_W2KRH.reshape(len(out_W2KRH), -1).view(np.uint8)
            self._bytes[places, layer] = rows[: len(places)]
        for host_page in places:
            self._checksums[host_page] = zlib.crc32(self._bytes[host_page])

    def is_intact(self, host_page: int) -> bool:
        return zlib.crc32(self._bytes[host_page]) == self._checksums[host_page]

    def read(self, host_pages: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Returns a copy of at most `SWAP_WIDTH` pages, each layer's ``in_W2KRH``; zeros are
        padding."""
        places = list(host_pages)
        layers = []
        for layer in range(self._num_layers):
            in_W2KRH = np.zeros(self._shape, self._dtype)
            rows = in_W2KRH.reshape(SWAP_WIDTH, -1).view(np.uint8)
            rows[: len(places)] = self._bytes[places, layer]
            layers.append(in_W2KRH)
        return tuple(layers)
