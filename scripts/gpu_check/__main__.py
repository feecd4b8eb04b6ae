"""Compiles the kernels and the programs of a step for an H200 that is not there, and judges them.

The tables it prints stand in docs/gpu.md. Without --all: the edges of the kernels, and of each
model some buckets of each kind.
"""

import argparse
import sys
import time
from collections.abc import Iterator

from scripts.gpu_check import h200  # first: it sets jax up

import jax  # isort: skip

from jaxserve.kernels.paged_attention import Impl
from scripts.gpu_check.kernels import all_calls, check_kernels, edge_calls
from scripts.gpu_check.plants import PLANTS, check_forward, check_output, find_planted
from scripts.gpu_check.programs import KV_DTYPES, check_programs, find_keys
from scripts.gpu_check.step import check_step

PARTS = ("kernels", "programs", "step", "plants")
MODELS = ("135m", "1b", "8b")
ATTENTIONS: tuple[Impl, ...] = ("triton", "xla")
ALL_ATTENTIONS: tuple[Impl, ...] = (*ATTENTIONS, "mosaic")


def find_faults(arguments: argparse.Namespace, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Checks the chosen parts, and yields what is wrong."""
    has_all = arguments.all
    if "kernels" in arguments.part:
        print("\n### Kernels\n")
        yield from map(str, check_kernels(all_calls() if has_all else edge_calls(), mesh))
    if "programs" in arguments.part:
        print("\n### Programs\n")
        faults = check_programs(arguments.model, arguments.attention, mesh, has_all=has_all)
        yield from map(str, faults)
    if "step" in arguments.part:
        print("\n### Programs of a step\n")
        yield from map(str, check_step())
    if "plants" in arguments.part:
        print("\n### Planted regressions\n\n| planted | found |\n| --- | --- |")
        yield from prove(mesh)


def prove(mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Prints what the check finds of each planted regression, and yields each that it misses."""
    jax.clear_caches()  # what was compiled before would not be again, and leave no dump
    for fault in (*check_forward(mesh), *check_output(mesh)):
        yield f"with nothing planted: {fault}"
    for name, plant in PLANTS.items():
        found = find_planted(name, mesh)
        print(f"| {name} | {'; '.join(map(str, found)) or 'nothing'} |", flush=True)
        if plant.reason not in {fault.kind for fault in found}:
            yield f"planted {name} was not found as {plant.reason.value!r}"


def tell_left_out() -> None:
    chosen, there = (
        sum(
            len(list(find_keys(model, attention, kv_dtype=kv_dtype, has_all=has_all)))
            for model in MODELS
            for attention in ATTENTIONS
            for kv_dtype in KV_DTYPES
        )
        for has_all in (False, True)
    )
    print(
        f"\nChecked: {len(list(edge_calls()))} calls of the kernels (--all: "
        f"{len(list(all_calls()))}), {chosen} of {there} programs; the rest are buckets between."
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu_compile", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--all", action="store_true", help="every call and bucket; half an hour")
    parser.add_argument("--part", nargs="+", choices=PARTS)
    parser.add_argument("--model", nargs="+", choices=MODELS)
    parser.add_argument("--attention", nargs="+", choices=ALL_ATTENTIONS)
    parser.add_argument(
        "--plant", choices=list(PLANTS), help="check with this regression put in, which must fail"
    )
    arguments = parser.parse_args()
    chosen = [name for name in ("all", "part", "model", "attention") if getattr(arguments, name)]
    if arguments.plant and chosen:
        parser.error(
            f"--plant has its own program to check: leave --{chosen[0]} out, or run it without "
            "--plant"
        )
    arguments.is_whole = chosen in ([], ["all"])
    arguments.part = arguments.part or PARTS
    arguments.model = arguments.model or MODELS
    arguments.attention = arguments.attention or ATTENTIONS
    return arguments


def main() -> int:
    arguments = read_options()
    started_s, mesh = time.monotonic(), h200.make_mesh()
    if arguments.plant:
        faults = list(map(str, find_planted(arguments.plant, mesh)))
    else:
        faults = list(find_faults(arguments, mesh))
        if arguments.is_whole and not arguments.all:
            tell_left_out()
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{len(faults)} faults, {time.monotonic() - started_s:.0f} s")
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
