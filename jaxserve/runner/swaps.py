"""Moves of whole pages between the pool and host memory, and what they cost."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import jax

from jaxserve.host_pages import SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.plan import PageIn, PageOut
from jaxserve.runner.batch import SWAP_WIDTH, build_swap_pages
from jaxserve.runner.host_store import HostStore
from jaxserve.runner.spec import RunnerSpec
from jaxserve.runner.steps import KV

logger = logging.getLogger(__name__)

NUM_TIMED = 3  # runs, of which the fastest counts: others are disturbed
Program = Callable[..., KV]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PageReads:
    """Pages on their way to host memory.

    Attributes:
      layers: one run's ``out_W2KRH``, layer by layer.
      host_pages: where they go.
    """

    layers: KV
    host_pages: tuple[int, ...]


class Swaps:
    """Runs the two programs, `SWAP_WIDTH` pages at a time; the host never waits for them."""

    def __init__(
        self,
        store: HostStore,
        spec: RunnerSpec,
        *,
        page_out: Program,
        page_in: Program,
        metrics: Metrics,
    ) -> None:
        self.store = store
        self._spec = spec
        self._page_out = page_out
        self._page_in = page_in
        self._metrics = metrics

    def take_out(self, kv: KV, moves: Sequence[PageOut]) -> list[PageReads]:
        """Starts to read pages as they are now, whatever is launched next."""
        reads = []
        for some in itertools.batched(moves, SWAP_WIDTH):
            layers = self._read([move.page for move in some], kv)
            host_pages = tuple(move.host_page for move in some)
            reads.append(PageReads(layers=layers, host_pages=host_pages))
        return reads

    def keep(self, reads: Sequence[PageReads]) -> None:
        """Puts into host memory what was read, now that the step has retired."""
        for read in reads:
            self.store.store(read.host_pages, jax.device_get(read.layers))
            self._metrics.host_tier_pages_out.inc(len(read.host_pages))
            self._metrics.host_tier_bytes_out.inc(len(read.host_pages) * self.store.page_bytes)

    def put_in(self, kv: KV, moves: Sequence[PageIn]) -> KV:
        """Returns the pool, which is donated, with pages of host memory in it."""
        for some in itertools.batched(moves, SWAP_WIDTH):
            layers = self.store.read([move.host_page for move in some])
            kv = self._write([move.page for move in some], layers, kv)
        self._metrics.host_tier_pages_in.inc(len(moves))
        self._metrics.host_tier_bytes_in.inc(len(moves) * self.store.page_bytes)
        return kv

    def measure(self, kv: KV, *, token_s: float) -> KV:
        """Finds out what the moves cost, says it, and returns the pool, which nobody may use yet.

        Args:
          token_s: seconds of a token of a prompt.
        """
        num_pages = min(SWAP_WIDTH, self._spec.num_pages - 1, self.store.num_pages)
        pages = list(range(1, 1 + num_pages))
        out_s: list[float] = []
        in_s: list[float] = []
        for _ in range(NUM_TIMED + 1):  # the first warms up
            started_s = time.monotonic()
            self.store.store(range(num_pages), jax.device_get(self._read(pages, kv)))
            out_s.append(time.monotonic() - started_s)
            started_s = time.monotonic()
            for host_page in range(num_pages):
                self.store.is_intact(host_page)
            kv = jax.block_until_ready(self._write(pages, self.store.read(range(num_pages)), kv))
            in_s.append(time.monotonic() - started_s)
        run_s = min(in_s[1:])
        costs = SwapCosts(run_pages=SWAP_WIDTH, run_s=run_s, token_s=token_s)
        break_even = costs.break_even_tokens(self._spec.page_size)
        num_bytes = num_pages * self.store.page_bytes
        self.store.costs = costs
        self._metrics.host_tier_break_even_tokens.set(break_even)
        logger.info(
            "host tier pages=%d bytes=%d out_bytes_per_s=%.3g in_bytes_per_s=%.3g "
            "prefill_tokens_per_s=%.0f break_even_tokens=%.1f",
            self.store.num_pages,
            self.store.num_pages * self.store.page_bytes,
            num_bytes / min(out_s[1:]),
            num_bytes / run_s,
            1 / token_s,
            break_even,
        )
        return kv

    def _read(self, pages: Sequence[int], kv: KV) -> KV:
        pages_W = jax.device_put(build_swap_pages(pages, self._spec))
        layers = self._page_out(kv, pages_W)
        with jax.transfer_guard_device_to_host("allow"):  # on a GPU this counts as implicit
            for array in jax.tree.leaves(layers):
                array.copy_to_host_async()
        return layers

    def _write(self, pages: Sequence[int], layers: KV, kv: KV) -> KV:
        arguments = jax.device_put((build_swap_pages(pages, self._spec), layers))
        return self._page_in(kv, *arguments)
