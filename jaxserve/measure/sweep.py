"""The highest load that still keeps its promise: a bracket by doubling, then bisection."""

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from jaxserve.measure.result import SCHEMA_VERSION, JsonObject

FACTOR: Final = 2.0
LOWEST: Final = 1 / 32  # of the start: where this fails, it is not for the load
METHOD: Final = (
    "the rate is doubled (or halved) until one point meets the attainment and one does not, then "
    "the geometric mean of the two is measured until they are within the resolution; nothing is "
    "tried below 1/32 of the start; a point is measured once, so the answer is as sure as that is"
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Search:
    """How to look for the highest load.

    Attributes:
      attainment: share of compliant requests that a point must have.
      start: first scale of the workload's rate.
      resolution: the answer's relative distance from the next higher load that failed, at most.
      max_points: measurements after which the search ends, wherever it is.
    """

    attainment: float
    start: float = 1.0
    resolution: float = 0.05
    max_points: int = 16


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
      best: highest scale that met the attainment; None where none did.
      above: lowest one that did not; None where all did.
    """

    best: float | None
    above: float | None

    def is_within(self, resolution: float) -> bool:
        """Returns whether the answer is as close as was asked."""
        if self.best is None or self.above is None:
            return False
        return self.above <= self.best * (1 + resolution) * (1 + 1e-9)


async def find_highest(measure: Callable[[float], Awaitable[float]], search: Search) -> Found:
    """Returns the bracket of the highest load.

    Args:
      measure: returns the attainment at a scale of the rate.
    """
    best: float | None = None
    above: float | None = None
    scale = search.start
    for _ in range(search.max_points):
        if await measure(scale) >= search.attainment:
            best = scale
        else:
            above = scale
        found = Found(best=best, above=above)
        if found.is_within(search.resolution):
            break
        scale = _next_scale(found)
        if scale < search.start * LOWEST:
            break
    return Found(best=best, above=above)


def _next_scale(found: Found) -> float:
    if found.best is None:
        assert found.above is not None
        return found.above / FACTOR
    if found.above is None:
        return found.best * FACTOR
    return math.sqrt(found.best * found.above)


def build_sweep(
    results: Sequence[JsonObject], files: Sequence[str], found: Found, search: Search
) -> JsonObject:
    """Returns the sweep's own result.

    Args:
      results: of the points, in the order of their measuring.
      files: where each is, beside this one.
    """
    points = [_describe(result, file) for result, file in zip(results, files, strict=True)]
    points.sort(key=lambda point: point["rate_scale"])
    best = None
    if found.best is not None:  # the nearest: a result's numbers are rounded
        best = min(points, key=lambda point: abs(point["rate_scale"] - (found.best or 0.0)))
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "sweep",
        "date": results[0]["date"],
        "definitions": {"method": METHOD, **results[0]["definitions"]},
        "manifest": results[0]["manifest"],
        "search": dataclasses.asdict(search),
        "is_within_resolution": found.is_within(search.resolution),
        "lowest_that_failed": found.above,
        "best": best,
        "highest_goodput": max(points, key=lambda point: point["goodput"]),
        "points": points,
    }


def _describe(result: JsonObject, file: str) -> dict[str, Any]:
    goodput, load = result["goodput"], result["manifest"]["offered_load"]
    return {
        "file": file,
        "rate_scale": load["rate_scale"],
        "requests_per_s": load["requests_per_s"],
        "concurrency": load["concurrency"],
        "attainment": goodput["attainment"],
        "goodput": goodput["tokens_per_s"],
        "raw_throughput": goodput["raw_tokens_per_s"],
        "outcomes": result["outcomes"],
        "latency": {
            name: {part: result["latency"][name][part] for part in ("p50", "p95", "p99")}
            for name in ("ttft", "itl", "tpot", "e2e", "send_lag")
        },
    }
