"""The results that are committed for whoever reads results: made here, in virtual time.

    python -m tests.measure.sample

writes them anew; a test holds that they are what this makes.
"""

import math
from pathlib import Path

from jaxserve.measure.bench import Bench
from jaxserve.measure.bench_options import BenchOptions, Served
from jaxserve.measure.limits import read_limits
from jaxserve.measure.load import Load, load_memory
from jaxserve.measure.request_lines import RequestWriter
from jaxserve.measure.result import JsonObject, write_result
from jaxserve.measure.sweep import Search, build_sweep, find_highest
from jaxserve.measure.workload import Header, Recipe, WorkloadEntry
from jaxserve.measure.workload.entry import build_workload
from tests.measure.simulated import SimulatedTarget
from tests.measure.virtual import run_virtual

FOLDER = Path(__file__).parent
RESULT = FOLDER / "sample_result.json"
REQUESTS = FOLDER / "sample_requests.jsonl"
SWEEP = FOLDER / "sample_sweep.json"
DATE = "2026-01-31T12:00:00+00:00"
SERVED = Served(
    bundle_digest="ab" * 32,
    hardware={"cpu": "simulated", "cores": 2},
    config={"scheduler": {"max_seqs": 2}},
    is_fresh=True,
)
LIMITS = ("ttft=0.3", "itl_p95=0.03", "chat:ttft=0.2")


def build_load(num_requests: int = 24) -> Load:
    """Returns a load of two classes, with pauses and bursts."""
    entries = [
        WorkloadEntry(
            index=index,
            at_s=round(0.12 * index + 0.1 * math.sin(index), 6) if index else 0.0,
            prompt=Recipe(num_tokens=20 + 7 * (index % 5)),
            prompt_class="chat" if index % 3 else "code",
            wanted_tokens=4 + index % 4,
        )
        for index in range(num_requests)
    ]
    entries.sort(key=lambda entry: entry.at_s)
    header = Header(name="sample", source="made by hand", parameters={"burstiness": 1.0})
    return load_memory(build_workload(header, entries))


def build_bench(target: SimulatedTarget, **options: object) -> Bench:
    chosen: dict[str, object] = {
        "limits": read_limits(LIMITS),
        "seed": 7,
        "sampling": {"temperature": 0.0},
    }
    return Bench(
        target=target,
        load=build_load(),
        options=BenchOptions(**{**chosen, **options}),  # type: ignore[arg-type]
        served=SERVED,
    )


def make_result(requests: Path) -> JsonObject:
    """Returns the sample's result; writes its requests."""
    with RequestWriter(requests) as writer:
        target = SimulatedTarget(faults={10: "failed", 17: "refused"})
        bench = build_bench(target, repeats=3, warm_up=2)
        bench.writer = writer
        return run_virtual(bench.run(date=DATE))


def make_sweep() -> JsonObject:
    results: list[JsonObject] = []

    async def measure(scale: float) -> float:
        bench = build_bench(SimulatedTarget(), rate_scale=scale)
        results.append(await bench.run(date=DATE))
        return float(results[-1]["goodput"]["attainment"])

    async def sweep() -> JsonObject:
        search = Search(attainment=0.8, start=1.0, resolution=0.1)
        found = await find_highest(measure, search)
        files = [f"point-{number + 1:02d}.json" for number in range(len(results))]
        return build_sweep(results, files, found, search)

    return run_virtual(sweep())


def main() -> None:
    write_result(make_result(REQUESTS), RESULT)
    write_result(make_sweep(), SWEEP)


if __name__ == "__main__":
    main()
