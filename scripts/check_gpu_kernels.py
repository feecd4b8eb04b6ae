"""Compiles every configuration of the GPU kernels for an H200 on a machine without a GPU.

    python -m scripts.check_gpu_kernels [--backend triton] [--only decode]

The venv is that of scripts/check_gpu_compile.py. Checked of each: it compiles, spills no register,
and as many of its programs fit on a processor as were planned: that is what hides the latency of
their loads. The table it prints stands in docs/gpu.md. No time is measured.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

from scripts import h200  # first: it sets jax up

import jax  # isort: skip
from jax import numpy as jnp  # isort: skip

from jaxserve.kernels.paged_attention import mosaic, triton
from jaxserve.kernels.paged_attention.launch import (
    MAX_ROWS,
    Launch,
    find_launch,
    find_mosaic_launch,
    find_mosaic_problem,
)

BACKENDS = ("triton", "mosaic")
CHUNK_TILE = 16
KERNELS = {1: "paged_attention_decode", CHUNK_TILE: "paged_attention_chunk"}
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


def all_calls(backend: str) -> Iterator[Call]:
    """Every head size with every sharing of heads, page and dtype; then the options."""
    heads = ((8, 8), (32, 8), (28, 4), (32, 2))
    sizes = (64, 96, 128, 256)
    for num_queries, head_dim in itertools.product(KERNELS, sizes):
        base = Call(backend=backend, num_queries=num_queries, heads=(32, 8), head_dim=head_dim)
        for shared, page in itertools.product(heads, (16, 32, 64, 128)):
            yield dataclasses.replace(base, heads=shared, page=page)
        for shared in heads:
            yield dataclasses.replace(base, heads=shared, dtype="float32", kv_dtype="float32")
        yield dataclasses.replace(base, dtype="float32")
        yield dataclasses.replace(base, window=1024)
        yield dataclasses.replace(base, soft_cap=30.0)
        yield dataclasses.replace(base, window=1024, soft_cap=30.0)
        yield dataclasses.replace(base, split_len=1024)


def is_refused(call: Call) -> bool:
    """Returns whether the backend has no kernel for it, and says so by name."""
    return call.backend == "mosaic" and None is not find_mosaic_problem(
        q_dtype=call.dtype,
        kv_dtype=call.kv_dtype,
        head_dim=call.head_dim,
        page_size=call.page,
    )


def compile_call(call: Call, mesh: jax.sharding.Mesh) -> tuple[Launch, h200.Resources]:
    (N, K), H, R = call.heads, call.head_dim, call.page
    X, P = (8 if call.num_queries == 1 else 32), NUM_TOKENS // call.page
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for shape, dtype in (
            ((X, call.num_queries, N, H), call.dtype),
            ((4 * P, 2, K, R, H), call.kv_dtype),
            ((X, P), "int32"),
            ((X,), "int32"),
            ((X,), "int32"),
        )
    ]
    is_mosaic = call.backend == "mosaic"
    attend = functools.partial(
        mosaic.attend if is_mosaic else triton.attend,
        scale=H**-0.5,
        window=call.window,
        soft_cap=call.soft_cap,
        split_len=call.split_len,
    )
    attend.__name__ = "attend"  # type: ignore[attr-defined]  # jax names the module by it
    h200.compile_for(mesh, jax.jit(attend), *arguments)
    find = find_mosaic_launch if is_mosaic else find_launch
    launch = find(*arguments[:3], split_len=call.split_len)
    return launch, h200.read_resources("attend", KERNELS[call.num_queries])


def planned_resident(launch: Launch, call: Call) -> int:
    """Returns how many programs shall fit on a processor.

    Of Mosaic's, each with 32 KiB on its way, two; of three-part queries one. Of Triton's: three of
    the small ones: each has 32 KiB of K and V on its way. Of the large ones, whose product
    is worth more than its loads, two; of those of 256 lanes, whose sums alone take a quarter of all
    registers, one.
    """
    if call.backend == "mosaic":
        return 2 if call.dtype == "bfloat16" else 1
    if launch.rows < MAX_ROWS:
        return 3
    return 2 if call.head_dim <= 128 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--only", choices=["decode", "chunk"])
    arguments = parser.parse_args()
    mesh, started_s = h200.make_mesh(), time.monotonic()
    rows: dict[tuple[str, str, int, str, int, int, int], list[h200.Resources]] = defaultdict(list)
    planned, faults = {}, 0
    backends = (arguments.backend,) if arguments.backend else BACKENDS
    for call in itertools.chain.from_iterable(map(all_calls, backends)):
        if arguments.only not in (None, call.kind) or is_refused(call):
            continue
        launch, resources = compile_call(call, mesh)
        wanted = planned_resident(launch, call)
        if resources.spill_bytes or resources.num_resident < wanted:
            faults += 1
            print(f"FAULT {call}: {resources}, {resources.num_resident} of {wanted} fit")
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
        planned[row] = wanted
    print(
        "| backend | kernel | head | q, pool | rows | block | warps | calls | registers "
        "| shared KiB | spills | fit, planned |\n|" + " --- |" * 12
    )
    for row, found in rows.items():
        registers = sorted({each.num_registers for each in found})
        print(
            f"| {' | '.join(map(str, row))} | {len(found)} | {registers[0]}–{registers[-1]} "
            f"| {max(each.shared_bytes for each in found) / 1024:.0f} "
            f"| {sum(each.spill_bytes for each in found)} "
            f"| {min(each.num_resident for each in found)}, {planned[row]} |"
        )
    num_calls = sum(map(len, rows.values()))
    print(f"{num_calls} calls, {faults} faults, {time.monotonic() - started_s:.0f} s")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
