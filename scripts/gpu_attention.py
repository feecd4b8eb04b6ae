"""Paged attention alone on this machine's device: how wrong, and how fast against its memory.

Part of scripts/gpu_report.py. Times are of steps of many layers, each with its own K/V, so that no
layer finds the last one's keys in a cache of the device.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import Impl, paged_attention, triton
from jaxserve.kernels.paged_attention.launch import Launch, find_launch
from jaxserve.kernels.pool import LARGEST, Pool, QuantizedPool, quantize

PAGE: Final = 16
TILE: Final = 16
LONGEST_CHECKED: Final = 1100  # tokens: enough for the kernels to split, and a part of a page
SET_BYTES: Final = 512 << 20  # of all layers together: several times any cache
MAX_LAYERS: Final = 256
NUM_RUNS: Final = 12


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """Of the heads: query heads, KV heads, lanes; and what the pool is made of."""

    heads: tuple[int, int]
    head_dim: int
    kv_dtype: str = "bfloat16"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """The arguments of `paged_attention` but the pool."""

    q_TNH: jax.Array
    page_table_XP: jax.Array
    q_starts_X: jax.Array
    q_lens_X: jax.Array
    num_single_rows: int

    def attend(self, kv_C2KRH: Pool, impl: Impl, launch: Launch | None = None) -> jax.Array:
        scale = self.q_TNH.shape[-1] ** -0.5
        if launch is not None:
            assert self.num_single_rows == len(self.q_TNH), "launches are given for decode alone"
            out_X1NH = triton.attend(
                self.q_TNH[:, None], kv_C2KRH, self.page_table_XP, self.q_starts_X, self.q_lens_X,
                scale=scale, window=None, soft_cap=None, launch=launch,
            )  # fmt: skip
            return out_X1NH[:, 0]
        return paged_attention(
            self.q_TNH, kv_C2KRH, self.page_table_XP, self.q_starts_X, self.q_lens_X,
            num_single_rows=self.num_single_rows, tile=TILE, scale=scale, impl=impl,
        )  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class LayerTime:
    """Of one layer's decode attention.

    Attributes:
      splits: of the Triton kernel, where it did not choose itself.
      share_of_copy: of the bytes a second that a copy moves, which counts reads and writes.
    """

    impl: Impl
    rows: int
    kv_len: int
    splits: int | None
    layer_us: float
    kv_mib: float
    bytes_per_s: float
    share_of_copy: float


jax.tree_util.register_dataclass(
    Call,
    data_fields=["q_TNH", "page_table_XP", "q_starts_X", "q_lens_X"],
    meta_fields=["num_single_rows"],
)


def check(impl: Impl, shape: Shape, *, seed: int = 0) -> float:
    """Returns the largest error of a query of decode rows and of tiles, over its largest output.

    Beside the reference in float32 on the host's processor, which has a test suite of its own.
    """
    lengths = [1, 15, 16, 17, 64, 65, LONGEST_CHECKED]
    call, num_pages = _build(
        shape, singles=lengths, tiles=[(16, 16), (3, 40), (16, 199)], seed=seed
    )
    kv_C2KRH = _random_pool(seed + 1, num_pages, shape)
    found_TNH = np.asarray(jax.jit(Call.attend, static_argnums=2)(call, kv_C2KRH, impl), np.float64)
    host = jax.devices("cpu")[0]
    with jax.default_device(host):
        wanted_TNH = np.asarray(
            jax.tree.map(_widen, jax.device_put(call, host)).attend(
                jax.tree.map(_widen, jax.device_put(kv_C2KRH, host)), "reference"
            ),
            np.float64,
        )
    error_T = np.abs(found_TNH - wanted_TNH).max((1, 2))
    largest_T = np.abs(wanted_TNH).max((1, 2))
    is_query_T = largest_T > 0  # padding of a tile is 0 in both
    return float((error_T / np.where(is_query_T, largest_T, 1.0)).max())


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def measure(
    impl: Impl,
    shape: Shape,
    *,
    num_rows: int,
    kv_len: int,
    copy_bytes_per_s: float,
    num_splits: int | None = None,
) -> LayerTime:
    """Returns how long a layer's decode attention takes, and what of copying's speed that is.

    Args:
      num_splits: of the Triton kernel, in place of what the shape would get.
    """
    call, num_pages = _build(shape, singles=[kv_len] * num_rows, tiles=[], seed=0)
    first = _random_pool(0, num_pages, shape)
    page_bytes = sum(array.nbytes for array in jax.tree.leaves(first)) / num_pages
    kv_bytes = num_rows * kv_len * page_bytes / PAGE
    num_layers = min(max(math.ceil(SET_BYTES / kv_bytes), 2), MAX_LAYERS)
    others = (_random_pool(layer, num_pages, shape) for layer in range(1, num_layers))
    pools = [first, *others]
    launch = None
    if num_splits is not None:
        q_X1NH = jax.ShapeDtypeStruct((num_rows, 1, *call.q_TNH.shape[1:]), jnp.bfloat16)
        launch = find_launch(q_X1NH, pools[0], call.page_table_XP)
        launch = dataclasses.replace(launch, num_splits=num_splits)

    @jax.jit
    def step(call: Call, pools: Sequence[Pool]) -> jax.Array:
        for kv_C2KRH in pools:  # each layer's queries are the last one's outputs
            call = dataclasses.replace(call, q_TNH=call.attend(kv_C2KRH, impl, launch))
        return call.q_TNH

    step(call, pools).block_until_ready()
    seconds = [_time(step, call, pools) for _ in range(NUM_RUNS)]
    layer_s = statistics.median(seconds) / num_layers
    return LayerTime(
        impl=impl,
        rows=num_rows,
        kv_len=kv_len,
        splits=num_splits,
        layer_us=1e6 * layer_s,
        kv_mib=kv_bytes / 2**20,
        bytes_per_s=kv_bytes / layer_s,
        share_of_copy=kv_bytes / layer_s / copy_bytes_per_s,
    )


def _time(step: jax.stages.Wrapped, call: Call, pools: Sequence[Pool]) -> float:
    start = time.perf_counter()
    step(call, pools).block_until_ready()
    return time.perf_counter() - start


def report(
    impls: Sequence[Impl],
    shape: Shape,
    *,
    rows: Sequence[int],
    kv_lens: Sequence[int],
    splits: Sequence[int],
    copy_bytes_per_s: float,
    max_error: float,
) -> Iterator[dict[str, object]]:
    """Prints and yields a line for each measurement; what is wrong is not timed.

    Raises:
      SystemExit: an implementation is further off than `max_error`.
    """
    for impl in impls:
        error = check(impl, shape)
        print(f"  attention {impl:<7} error {error:.1e} of the largest output", flush=True)
        if not error <= max_error:
            raise SystemExit(f"attention {impl} is wrong by {error:.1e}; at most {max_error:.1e}")
        yield {"impl": impl, "error": error}
    for num_rows in rows:
        for kv_len in kv_lens:
            chosen: list[tuple[Impl, int | None]] = [(impl, None) for impl in impls]
            if "triton" in impls:
                chosen += [("triton", number) for number in splits]
            for impl, num_splits in chosen:
                found = measure(
                    impl, shape, num_rows=num_rows, kv_len=kv_len,
                    copy_bytes_per_s=copy_bytes_per_s, num_splits=num_splits,
                )  # fmt: skip
                size = "" if num_splits is None else f", {num_splits} splits"
                print(
                    f"  attention {impl:<7} rows={num_rows:<3} kv_len={kv_len:<6}"
                    f"{found.layer_us:9.1f} us a layer, {found.kv_mib:7.1f} MiB, "
                    f"{100 * found.share_of_copy:3.0f} % of copying{size}",
                    flush=True,
                )
                yield dataclasses.asdict(found)


def _build(
    shape: Shape, *, singles: Sequence[int], tiles: Sequence[tuple[int, int]], seed: int
) -> tuple[Call, int]:
    """Returns a call, and the pages of its pool; page 0 is nobody's.

    Args:
      singles: tokens of each decode row.
      tiles: queries and tokens of each tile.
    """
    rows = [(1, kv_len) for kv_len in singles] + list(tiles)
    width = max(-(-kv_len // PAGE) for _, kv_len in rows)
    num_pages = 1 + sum(-(-kv_len // PAGE) for _, kv_len in rows)
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))
    page_table_XP = np.zeros((len(rows), width), np.int32)
    for x, (_, kv_len) in enumerate(rows):
        for page in range(-(-kv_len // PAGE)):
            page_table_XP[x, page] = next(free)
    num_tokens = len(singles) + len(tiles) * TILE
    call = Call(
        q_TNH=_random(seed, (num_tokens, shape.heads[0], shape.head_dim)),
        page_table_XP=jnp.asarray(page_table_XP),
        q_starts_X=jnp.asarray([kv_len - q_len for q_len, kv_len in rows], jnp.int32),
        q_lens_X=jnp.asarray([q_len for q_len, _ in rows], jnp.int32),
        num_single_rows=len(singles),
    )
    return call, num_pages


def _random_pool(seed: int, num_pages: int, shape: Shape) -> Pool:
    kv_C2KRH = _random(seed, (num_pages, 2, shape.heads[1], PAGE, shape.head_dim))
    if shape.kv_dtype not in LARGEST:
        return kv_C2KRH
    bytes_C2KRH, scales_C2KR = jax.jit(quantize, static_argnames="dtype")(
        kv_C2KRH.astype(jnp.float32), dtype=jnp.dtype(shape.kv_dtype)
    )
    return QuantizedPool(bytes_C2KRH=bytes_C2KRH, scales_C2KR=scales_C2KR)


def _random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
