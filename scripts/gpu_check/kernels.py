"""Every configuration of the GPU kernels: it compiles, spills no register, and as many of its
programs fit on a processor as were planned, which is what hides the latency of their loads."""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import jax
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import mosaic, triton
from jaxserve.kernels.paged_attention.launch import (
    MAX_ROWS,
    Launch,
    find_launch,
    find_mosaic_launch,
    find_mosaic_problem,
)
from jaxserve.kernels.pool import LARGEST, empty_pool
from scripts.gpu_check import h200
from scripts.gpu_check.dump import Resources, read_launch
from scripts.gpu_check.faults import Fault, find_kernel_faults

BACKENDS = ("triton", "mosaic")
CHUNK_TILE = 16
KERNELS = {1: "paged_attention_decode", CHUNK_TILE: "paged_attention_chunk"}
SIZES = (64, 96, 128, 256)
HEADS = ((8, 8), (32, 8), (28, 4), (32, 2))
NUM_TOKENS = 8192  # of a page table


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """One configuration of a kernel."""

    backend: str
    num_queries: int
    heads: tuple[int, int]
    head_dim: int
    page: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    split_len: int | None = None

    @property
    def kind(self) -> str:
        return "decode" if self.num_queries == 1 else "chunk"


def all_calls() -> Iterator[Call]:
    """Every head size with every sharing of heads, page and dtype; then the options."""
    return itertools.filterfalse(
        is_refused, itertools.chain.from_iterable(map(_all_calls, BACKENDS))
    )


def _all_calls(backend: str) -> Iterator[Call]:
    for num_queries, head_dim in itertools.product(KERNELS, SIZES):
        base = Call(backend=backend, num_queries=num_queries, heads=(32, 8), head_dim=head_dim)
        for shared, page in itertools.product(HEADS, (16, 32, 64, 128)):
            yield dataclasses.replace(base, heads=shared, page=page)
        for shared in HEADS:
            yield dataclasses.replace(base, heads=shared, dtype="float32", kv_dtype="float32")
        yield dataclasses.replace(base, dtype="float32")
        yield dataclasses.replace(base, window=1024)
        yield dataclasses.replace(base, soft_cap=30.0)
        yield dataclasses.replace(base, window=1024, soft_cap=30.0)
        yield dataclasses.replace(base, split_len=1024)
        for kv_dtype in LARGEST:
            yield from _quantized_calls(dataclasses.replace(base, kv_dtype=kv_dtype))


def _quantized_calls(base: Call) -> Iterator[Call]:
    for shared in HEADS:
        yield dataclasses.replace(base, heads=shared)
    yield dataclasses.replace(base, page=128)
    yield dataclasses.replace(base, window=1024, soft_cap=30.0)
    yield dataclasses.replace(base, split_len=1024)
    yield dataclasses.replace(base, dtype="float32")


def edge_calls() -> Iterator[Call]:
    """Of each row of the table the plain call or the most intricate one: all launches there are."""
    return itertools.filterfalse(
        is_refused, itertools.chain.from_iterable(map(_edge_calls, BACKENDS))
    )


def _edge_calls(backend: str) -> Iterator[Call]:
    for num_queries, head_dim in itertools.product(KERNELS, SIZES):
        base = Call(backend=backend, num_queries=num_queries, heads=(28, 4), head_dim=head_dim)
        yield dataclasses.replace(base, window=1024, soft_cap=30.0)
        yield dataclasses.replace(base, dtype="float32", kv_dtype="float32")
        yield dataclasses.replace(base, dtype="float32")
        # The two are read alike but for one conversion: each has one of the two.
        yield dataclasses.replace(base, kv_dtype="int8", window=1024, soft_cap=30.0)
        yield dataclasses.replace(base, kv_dtype="float8_e4m3fn", dtype="float32")
        if num_queries > 1 and backend == "triton":
            yield dataclasses.replace(base, heads=(8, 8), page=128)  # fewer rows


def is_refused(call: Call) -> bool:
    """Returns whether the backend has no kernel for it, and says so by name."""
    return call.backend == "mosaic" and None is not find_mosaic_problem(
        q_dtype=call.dtype,
        kv_dtype=call.kv_dtype,
        head_dim=call.head_dim,
        page_size=call.page,
    )


def compile_call(call: Call, mesh: jax.sharding.Mesh) -> tuple[Launch, Resources]:
    (N, K), H, R = call.heads, call.head_dim, call.page
    X, P = (8 if call.num_queries == 1 else 32), NUM_TOKENS // call.page
    place = functools.partial(jax.ShapeDtypeStruct, sharding=h200.place_on(mesh))
    pool = jax.eval_shape(functools.partial(empty_pool, (4 * P, 2, K, R, H), call.kv_dtype))
    arguments = (
        place((X, call.num_queries, N, H), jnp.dtype(call.dtype)),
        jax.tree.map(lambda array: place(array.shape, array.dtype), pool),
        place((X, P), jnp.int32),
        place((X,), jnp.int32),
        place((X,), jnp.int32),
    )
    is_mosaic = call.backend == "mosaic"
    attend = functools.partial(
        mosaic.attend if is_mosaic else triton.attend,
        scale=H**-0.5,
        window=call.window,
        soft_cap=call.soft_cap,
        split_len=call.split_len,
    )
    compiled = h200.compile_for(lambda: jax.jit(attend).lower(*arguments), mesh, {})
    name = KERNELS[call.num_queries]
    num_threads, shared_bytes = read_launch(compiled, name)
    find = find_mosaic_launch if is_mosaic else find_launch
    launch = find(*arguments[:3], split_len=call.split_len)
    assembled = compiled.kernels[f"{name}_mosaic_gpu_kernel" if is_mosaic else name]
    return launch, Resources(
        num_threads=num_threads,
        num_registers=assembled.num_registers,
        spill_bytes=assembled.spill_bytes,
        shared_bytes=shared_bytes,
    )


def planned_resident(launch: Launch, call: Call) -> int:
    """Returns how many programs shall fit on a processor.

    Of Mosaic's, each with 32 KiB of K and V on its way, two; of three-part queries one. Of
    Triton's: three of the small ones, each with 32 KiB too. Of the large ones, whose product is
    worth more than its loads, two; of those of 256 lanes, whose sums alone take a quarter of all
    registers, one. A small one over a pool of one byte has registers to widen it in: of 256 lanes,
    or with three-part queries, two fit.
    """
    if call.backend == "mosaic":
        return 2 if call.dtype == "bfloat16" else 1
    if launch.rows < MAX_ROWS:
        is_wide = call.head_dim > 128 or call.dtype == "float32"
        return 2 if call.kv_dtype in LARGEST and is_wide else 3
    return 2 if call.head_dim <= 128 else 1


def check_kernels(calls: Iterable[Call], mesh: jax.sharding.Mesh) -> Iterator[Fault]:
    """Prints a table of the calls, and yields what is wrong with them."""
    rows: dict[tuple[str | int, ...], list[Resources]] = defaultdict(list)
    planned: dict[tuple[str | int, ...], int] = {}
    for call in calls:
        launch, resources = compile_call(call, mesh)
        row = (
            call.backend,
            call.kind,
            call.head_dim,
            f"{call.dtype}, {call.kv_dtype}",
            launch.rows,
            launch.block_tokens,
            launch.num_warps,
        )
        rows[row].append(resources)
        planned[row] = planned_resident(launch, call)
        for fault in find_kernel_faults(resources, planned_resident=planned[row]):
            yield dataclasses.replace(fault, text=f"{call}: {fault.text}")
    print(
        "| backend | kernel | head | q, pool | rows | block | warps | calls | registers "
        "| shared KiB | spills | fit, planned |\n|" + " --- |" * 12
    )
    for cells, found in rows.items():
        registers = sorted({each.num_registers for each in found})
        print(
            f"| {' | '.join(map(str, cells))} | {len(found)} | {registers[0]}–{registers[-1]} "
            f"| {max(each.shared_bytes for each in found) / 1024:.0f} "
            f"| {sum(each.spill_bytes for each in found)} "
            f"| {min(each.num_resident for each in found)}, {planned[cells]} |"
        )
