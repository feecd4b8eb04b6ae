"""Finds how this GPU's attention is best cut into programs, and writes that to the launch table.

    python -m scripts.gpu_tune --model 8b [--impl triton mosaic] [--page 16] [--output FILE]
    JAX_PLATFORMS=cpu python -m scripts.gpu_tune --model tiny --impl triton_interpret --rows 2 \\
        --kv-len 64 --max-cuts 3 --output /tmp/launches.json

For each shape, decode and chunks: every cut that the kernel takes is checked against the reference,
then timed beside the formula's, in turn, on pools larger than the device's cache. The best by the
geometric mean over rows and lengths is timed against the formula once more, and written where it is
still faster by 3 %. Entries of other shapes and devices stay. Needs no network. On a CPU it can be
tried; what it writes there is of device "cpu", which nothing reads.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import jax
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import (
    MAX_ROWS,
    MIN_ROWS,
    WANTED_PROGRAMS,
    Cut,
    Cuts,
    plan_cut,
    plan_mosaic_cut,
    power_of_two,
)
from jaxserve.kernels.pool import LARGEST
from jaxserve.runner.launch_table import (
    PACKAGED,
    CallKind,
    Entry,
    LaunchTable,
    TunedImpl,
    read_launch_table,
    write_launch_table,
)
from scripts import gpu_attention
from scripts.gpu_attention import REFUSALS, TILE, Shape, Workload, build_workload
from scripts.gpu_report import MAX_ERROR, MODELS, count

IMPLS: Final = ("triton", "mosaic", "triton_interpret", "mosaic_interpret")
NUM_RUNS: Final = 12  # of each cut, in turn with the others
NUM_LAST_RUNS: Final = 48  # of the best one and the formula's
MIN_GAIN: Final = 0.03  # less is not told from noise
# What is tried. The sizes of blocks are whole numbers of a split of one length.
ROWS: Final = (16, 32, 64, 128)
BLOCKS: Final = (16, 32, 64, 128)
WARPS: Final = (2, 4, 8)  # of triton
STAGES: Final = (2, 3, 4)  # of mosaic; triton's code is the same whatever its number
PROGRAMS: Final = (WANTED_PROGRAMS // 2, WANTED_PROGRAMS, 2 * WANTED_PROGRAMS, 4 * WANTED_PROGRAMS)


class FormulaError(Exception):
    """The formula's own cut is wrong, or the device refuses it."""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Job:
    """Calls whose cut is looked for."""

    impl: Impl
    kind: CallKind
    shape: Shape

    @property
    def num_queries(self) -> int:
        return 1 if self.kind == "decode" else TILE

    @property
    def backend(self) -> TunedImpl:
        return "triton" if self.impl.startswith("triton") else "mosaic"

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"{self.impl} {self.kind} heads={shape.heads} head_dim={shape.head_dim} "
            f"page={shape.page} {shape.dtype}/{shape.kv_dtype}"
        )

    def cuts_of(self, cut: Cut) -> Cuts:
        return Cuts(decode=cut) if self.kind == "decode" else Cuts(chunk=cut)


def plan(job: Job) -> Cut:
    """Returns the formula's cut."""
    shape = job.shape
    q_XQNH = jax.ShapeDtypeStruct(
        (1, job.num_queries, shape.heads[0], shape.head_dim), jnp.dtype(shape.dtype)
    )
    kv_C2KRH = jax.ShapeDtypeStruct(
        (1, 2, shape.heads[1], shape.page, shape.head_dim), jnp.dtype(shape.kv_dtype)
    )
    plan_for = plan_cut if job.backend == "triton" else plan_mosaic_cut
    return plan_for(q_XQNH, kv_C2KRH)


def find_candidates(job: Job) -> list[Cut]:
    """Returns the cuts to try, the formula's first, the likest to it next."""
    planned = plan(job)
    rows, warps, stages = [MAX_ROWS], [planned.num_warps], list(STAGES)
    if job.backend == "triton":
        num_pairs = job.shape.heads[0] // job.shape.heads[1] * job.num_queries
        most = max(power_of_two(num_pairs), MIN_ROWS)
        rows = [number for number in ROWS if number <= most]
        warps, stages = list(WARPS), [planned.num_stages]
    tried = (
        Cut(rows=r, block_tokens=b, num_warps=w, num_stages=s, wanted_programs=p)
        for r, b, w, s, p in itertools.product(rows, BLOCKS, warps, stages, PROGRAMS)
    )

    def difference(cut: Cut) -> int:
        mine, theirs = dataclasses.astuple(cut), dataclasses.astuple(planned)
        return sum(one != other for one, other in zip(mine, theirs, strict=True))

    return sorted({planned, *tried}, key=lambda cut: (difference(cut), dataclasses.astuple(cut)))


def sift(job: Job, cuts: Iterable[Cut]) -> Iterator[Cut]:
    """Yields the cuts that the kernel takes and that give what the reference does; tells the
    others."""
    for cut in cuts:
        try:
            error = gpu_attention.check(job.impl, job.shape, cuts=job.cuts_of(cut))
        except REFUSALS as refusal:
            gpu_attention.fail(refusal, cut=cut)
            continue
        if error <= MAX_ERROR:
            yield cut
        else:
            gpu_attention.fail(f"wrong by {error:.1e}; at most {MAX_ERROR:.1e}", cut=cut)


def find_ratios(
    job: Job, cuts: Sequence[Cut], points: Sequence[tuple[int, int]], *, num_runs: int
) -> list[float]:
    """Returns each cut's time over the first one's: of the medians, the geometric mean over rows
    and lengths."""
    logs = [0.0] * len(cuts)
    for num_rows, kv_len in points:
        workload = build_workload(
            job.shape, num_rows=num_rows, kv_len=kv_len, num_queries=job.num_queries
        )
        medians = time_in_turn(job, cuts, workload, num_runs=num_runs)
        best = min(range(len(cuts)), key=medians.__getitem__)
        print(
            f"  rows={num_rows} kv_len={kv_len}: formula {1e6 * medians[0]:.1f} us, "
            f"best {1e6 * medians[best]:.1f} us by {cuts[best]}",
            flush=True,
        )
        for i, median in enumerate(medians):
            logs[i] += math.log(median / medians[0]) / len(points)
    return [math.exp(log) for log in logs]


def time_in_turn(
    job: Job, cuts: Sequence[Cut], workload: Workload, *, num_runs: int
) -> list[float]:
    """Returns each cut's median seconds of a layer. One run of each, again and again: what slows
    the device for a while slows all of them."""
    runs = [workload.compile(job.impl, cuts=job.cuts_of(cut)) for cut in cuts]
    seconds = [[run() for run in runs] for _ in range(num_runs)]
    return [statistics.median(of_one) for of_one in zip(*seconds, strict=True)]


def tune(job: Job, points: Sequence[tuple[int, int]], *, max_cuts: int | None) -> Entry | None:
    """Returns the table's entry; None where the formula's cut is as fast as any.

    Raises:
      FormulaError: there is nothing to compare with.
    """
    print(job, flush=True)
    cuts = list(sift(job, find_candidates(job)[:max_cuts]))
    if not cuts or cuts[0] != plan(job):
        raise FormulaError("the formula's own cut is wrong or refused")
    ratios = find_ratios(job, cuts, points, num_runs=NUM_RUNS)
    best = min(range(len(cuts)), key=ratios.__getitem__)
    ratio = 1.0
    if ratios[best] <= 1 - MIN_GAIN:
        # The least of many measurements is low by chance too: once more, without the others.
        _, ratio = find_ratios(job, [cuts[0], cuts[best]], points, num_runs=NUM_LAST_RUNS)
    if ratio > 1 - MIN_GAIN:
        print(f"  the formula stays, of {len(cuts)} cuts: {cuts[0]}", flush=True)
        return None
    print(f"  {100 * (1 - ratio):.0f} % faster than the formula: {cuts[best]}", flush=True)
    return build_entry(job, cuts[best], ratio)


def build_entry(job: Job, cut: Cut, ratio: float) -> Entry:
    shape = job.shape
    return Entry.model_validate(
        {
            "device": jax.devices()[0].device_kind,
            "impl": job.backend,
            "kind": job.kind,
            "head_dim": shape.head_dim,
            "num_shared": shape.heads[0] // shape.heads[1],
            "page_size": shape.page,
            "q_dtype": shape.dtype,
            "kv_dtype": shape.kv_dtype,
            "time_ratio": ratio,
            "jax": jax.__version__,
            **dataclasses.asdict(cut),
        }
    )


def replace(table: LaunchTable, job: Job, found: Entry | None) -> LaunchTable:
    """Returns the table with what was found in place of what it had of the job."""
    place = build_entry(job, plan(job), 0.5).place
    kept = [entry for entry in table.entries if entry.place != place]
    return LaunchTable(entries=(*kept, found) if found else tuple(kept))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    is_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["8b"],
                        help="shapes (default: 8b)")  # fmt: skip
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=["triton", "mosaic"])
    parser.add_argument(
        "--kind", nargs="+", choices=["decode", "chunk"], default=["decode", "chunk"]
    )
    parser.add_argument(
        "--page", type=count, nargs="+", default=[16], help="page sizes (default: 16)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16",
                        help="of the queries: the wider one of weights and pool")  # fmt: skip
    parser.add_argument("--kv-dtype", choices=["float32", "bfloat16", *LARGEST], default="bfloat16",
                        help="of the pool (kv.dtype)")  # fmt: skip
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 16, 64],
                        help=f"decode rows, or tiles of {TILE} tokens of a chunk")  # fmt: skip
    parser.add_argument("--kv-len", type=count, nargs="+", default=[1024, 8192])
    parser.add_argument(
        "--max-cuts", type=count, help="try only so many, the likest to the formula's"
    )
    parser.add_argument("--output", type=Path, default=PACKAGED if is_gpu else None,
                        help="table to read and write (default: the package's own)")  # fmt: skip
    options = parser.parse_args()
    if options.output is None:
        parser.error("there is no GPU here: name the table to write, --output FILE")
    if not is_gpu and any(not impl.endswith("_interpret") for impl in options.impl):
        parser.error("there is no GPU here: --impl triton_interpret or mosaic_interpret")
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.parent}")
    return options


def find_jobs(options: argparse.Namespace) -> Iterator[Job]:
    for name, impl, kind, page in itertools.product(
        options.model, options.impl, options.kind, options.page
    ):
        heads, kv_heads, head_dim = MODELS[name][3:6]
        shape = Shape(
            heads=(heads, kv_heads),
            head_dim=head_dim,
            page=page,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
        )
        yield Job(impl=impl, kind=kind, shape=shape)


def main() -> int:
    options = read_options()
    table = read_launch_table(options.output) if options.output.exists() else LaunchTable()
    points = list(itertools.product(options.rows, options.kv_len))
    num_jobs, num_improved, num_failed = 0, 0, 0
    for job in find_jobs(options):
        num_jobs += 1
        try:
            entry = tune(job, points, max_cuts=options.max_cuts)
        except (FormulaError, *REFUSALS) as error:
            gpu_attention.fail(error, job=job)
            num_failed += 1
            continue
        num_improved += entry is not None
        table = replace(table, job, entry)
        write_launch_table(table, options.output)  # each at once: a later one may be interrupted
    print(
        f"{options.output}: of {num_jobs} shapes {num_improved} improved and {num_failed} failed; "
        f"{len(table.entries)} entries"
    )
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
