"""Paged attention alone on this machine's device: how wrong, and how fast against its memory.

Part of scripts/gpu_report.py and scripts/gpu_tune.py.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.errors import JaxserveError
from jaxserve.kernels.paged_attention import Impl, paged_attention, triton
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts, Launch, find_launch
from jaxserve.kernels.pool import LARGEST, Pool, QuantizedPool, quantize

PAGE: Final = 16
TILE: Final = 16
LONGEST_CHECKED: Final = 1100  # tokens: enough for the kernels to split, and a part of a page
SET_BYTES: Final = 512 << 20  # of all layers together: several times any cache
MAX_LAYERS: Final = 256
NUM_RUNS: Final = 12

# How a device, a compiler or a kernel says no; anything else is a fault of these scripts.
REFUSALS: Final = (JaxserveError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """What is the same of all a model's attention: query heads and KV heads, lanes, tokens of a
    page, dtypes of queries and pool."""

    heads: tuple[int, int]
    head_dim: int
    page: int = PAGE
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """The arguments of `paged_attention` but the pool."""

    q_TNH: jax.Array
    page_table_XP: jax.Array
    q_starts_X: jax.Array
    q_lens_X: jax.Array
    num_single_rows: int

    def attend(
        self,
        kv_C2KRH: Pool,
        impl: Impl,
        launch: Launch | None = None,
        cuts: Cuts = BY_FORMULA,
    ) -> jax.Array:
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
            num_single_rows=self.num_single_rows, tile=TILE, scale=scale, impl=impl, cuts=cuts,
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


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Workload:
    """Attention of many layers, each with K and V of its own, so that none finds the last one's in
    a cache of the device.

    Attributes:
      kv_bytes: of one layer.
    """

    call: Call
    pools: tuple[Pool, ...]
    kv_bytes: int

    def compile(
        self, impl: Impl, *, launch: Launch | None = None, cuts: Cuts = BY_FORMULA
    ) -> Callable[[], float]:
        """Returns what runs all layers once and returns the seconds of one."""

        @jax.jit
        def step(call: Call, pools: tuple[Pool, ...]) -> jax.Array:
            for kv_C2KRH in pools:  # each layer's queries are the last one's outputs
                out_TNH = call.attend(kv_C2KRH, impl, launch, cuts)
                call = dataclasses.replace(call, q_TNH=out_TNH)
            return call.q_TNH

        step(self.call, self.pools).block_until_ready()

        def run() -> float:
            start = time.perf_counter()
            step(self.call, self.pools).block_until_ready()
            return (time.perf_counter() - start) / len(self.pools)

        return run


def build_workload(shape: Shape, *, num_rows: int, kv_len: int, num_queries: int = 1) -> Workload:
    """Returns rows of so many tokens, each with one query, or with tiles of `TILE`."""
    rows = [kv_len] * num_rows
    call, num_pages = _build(
        shape,
        singles=rows if num_queries == 1 else [],
        tiles=[] if num_queries == 1 else [(num_queries, kv_len) for kv_len in rows],
        seed=0,
    )
    head_bytes = shape.head_dim * jnp.dtype(shape.kv_dtype).itemsize
    head_bytes += 4 if shape.kv_dtype in LARGEST else 0  # its scale
    kv_bytes = num_rows * kv_len * 2 * shape.heads[1] * head_bytes
    num_layers = min(max(-(-SET_BYTES // kv_bytes), 2), MAX_LAYERS)
    pools = tuple(_random_pool(layer, shape, num_pages) for layer in range(num_layers))
    return Workload(call=call, pools=pools, kv_bytes=kv_bytes)


def check(impl: Impl, shape: Shape, *, seed: int = 0, cuts: Cuts = BY_FORMULA) -> float:
    """Returns the largest error of a query of decode rows and of tiles, over its largest output.

    Beside the reference in float32 on the host's processor, which has a test suite of its own.
    """
    lengths = [1, 15, 16, 17, 64, 65, LONGEST_CHECKED]
    call, num_pages = _build(
        shape, singles=lengths, tiles=[(16, 16), (3, 40), (16, 199)], seed=seed
    )
    kv_C2KRH = _random_pool(seed + 1, shape, num_pages)
    attend = jax.jit(Call.attend, static_argnames=("impl", "launch", "cuts"))
    found_TNH = np.asarray(attend(call, kv_C2KRH, impl=impl, cuts=cuts), np.float64)
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
    workload = build_workload(shape, num_rows=num_rows, kv_len=kv_len)
    launch = None
    if num_splits is not None:
        call = workload.call
        q_X1NH = jax.ShapeDtypeStruct((num_rows, 1, *call.q_TNH.shape[1:]), call.q_TNH.dtype)
        launch = find_launch(q_X1NH, workload.pools[0], call.page_table_XP)
        launch = dataclasses.replace(launch, num_splits=num_splits)
    run, kv_bytes = workload.compile(impl, launch=launch), workload.kv_bytes
    layer_s = statistics.median(run() for _ in range(NUM_RUNS))
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
    """Prints and yields a line for each measurement. What is refused, or further off than
    `max_error`, says so in `failed` and is not timed; the others are."""
    right: list[Impl] = []
    for impl in impls:
        try:
            error = check(impl, shape)
        except REFUSALS as refusal:
            yield fail(refusal, impl=impl)
            continue
        print(f"  attention {impl:<7} error {error:.1e} of the largest output", flush=True)
        if not error <= max_error:
            yield fail(f"wrong by {error:.1e}; at most {max_error:.1e}", impl=impl)
            continue
        yield {"impl": impl, "error": error}
        right.append(impl)
    for num_rows in rows:
        for kv_len in kv_lens:
            chosen: list[tuple[Impl, int | None]] = [(impl, None) for impl in right]
            if "triton" in right:
                chosen += [("triton", number) for number in splits]
            for impl, num_splits in chosen:
                try:
                    found = measure(
                        impl, shape, num_rows=num_rows, kv_len=kv_len,
                        copy_bytes_per_s=copy_bytes_per_s, num_splits=num_splits,
                    )  # fmt: skip
                except REFUSALS as refusal:
                    yield fail(refusal, impl=impl, rows=num_rows, kv_len=kv_len, splits=num_splits)
                    continue
                size = "" if num_splits is None else f", {num_splits} splits"
                print(
                    f"  attention {impl:<7} rows={num_rows:<3} kv_len={kv_len:<6}"
                    f"{found.layer_us:9.1f} us a layer, {found.kv_mib:7.1f} MiB, "
                    f"{100 * found.share_of_copy:3.0f} % of copying{size}",
                    flush=True,
                )
                yield dataclasses.asdict(found)


def fail(reason: BaseException | str, **what: object) -> dict[str, object]:
    """Prints and returns what there is no result of, and why."""
    text = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    named = " ".join(f"{key}={value}" for key, value in what.items())
    print(f"  FAILED {named}: {text}", flush=True)
    return {**what, "failed": text}


def _build(
    shape: Shape, *, singles: Sequence[int], tiles: Sequence[tuple[int, int]], seed: int
) -> tuple[Call, int]:
    """Returns a call, and the pages of its pool; page 0 is nobody's.

    Args:
      singles: tokens of each decode row.
      tiles: queries and tokens of each tile.
    """
    rows = [(1, kv_len) for kv_len in singles] + list(tiles)
    width = max(-(-kv_len // shape.page) for _, kv_len in rows)
    num_pages = 1 + sum(-(-kv_len // shape.page) for _, kv_len in rows)
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))
    page_table_XP = np.zeros((len(rows), width), np.int32)
    for x, (_, kv_len) in enumerate(rows):
        for page in range(-(-kv_len // shape.page)):
            page_table_XP[x, page] = next(free)
    num_tokens = len(singles) + len(tiles) * TILE
    call = Call(
        q_TNH=_random(seed, (num_tokens, shape.heads[0], shape.head_dim), shape.dtype),
        page_table_XP=jnp.asarray(page_table_XP),
        q_starts_X=jnp.asarray([kv_len - q_len for q_len, kv_len in rows], jnp.int32),
        q_lens_X=jnp.asarray([q_len for q_len, _ in rows], jnp.int32),
        num_single_rows=len(singles),
    )
    return call, num_pages


def _random_pool(seed: int, shape: Shape, num_pages: int) -> Pool:
    size = (num_pages, 2, shape.heads[1], shape.page, shape.head_dim)
    if shape.kv_dtype not in LARGEST:
        return _random(seed, size, shape.kv_dtype)
    bytes_C2KRH, scales_C2KR = jax.jit(quantize, static_argnames="dtype")(
        _random(seed, size, "float32"), dtype=jnp.dtype(shape.kv_dtype)
    )
    return QuantizedPool(bytes_C2KRH=bytes_C2KRH, scales_C2KR=scales_C2KR)


def _random(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
