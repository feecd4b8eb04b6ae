"""Two results side by side: whether they are of the same thing, and by how much they differ."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.errors import ResultError
from jaxserve.measure.statistics import Interval, ratio_interval

# What must be the same, by its place in the manifest.
IDENTITY: Final[Mapping[str, tuple[str, ...]]] = {
    "workload hash": ("workload", "hash"),
    "bundle digest": ("bundle_digest",),
    "hardware": ("hardware",),
    "jax version": ("jax_version",),
    "limits": ("limits",),
    "sampling": ("sampling",),
    "offered load": ("offered_load",),
    "cache state at the start": ("cache_state",),
    "timeout": ("timeout_s",),
    "longest drain": ("max_drain_s",),
}
NONE_IS_KNOWN: Final = frozenset({"longest drain"})  # None: as long as it takes
# What a server's metrics tell of its hardware; no two machines can be told apart by it.
KIND_OF_DEVICE: Final = frozenset({"platform", "device"})
# What else of a run is shown where it differs.
CIRCUMSTANCES: Final[Mapping[str, tuple[str, ...]]] = {
    "target": ("target", "backend"),
    "model": ("target", "model"),
    "context": ("target", "max_model_tokens"),
    "jaxserve version of the tool": ("jaxserve_version",),
    "version of the server": ("server_version",),
    "warm-up requests": ("warm_up",),
    "facts that were only stated": ("stated",),
}
NOT_KNOWN: Final[tuple[object, ...]] = ("", {}, None, "unknown", "mixed")
# What is told of a change, with whether more is better.
FIGURES: Final[Mapping[str, bool]] = {
    "goodput": True,
    "raw_throughput": True,
    "attainment": True,
    **{
        f"{name}_{part}": False
        for name in ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode", "delivery")
        for part in ("p50", "p95", "p99")
    },
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Difference:
    """A fact in which two results differ, or that one of them does not know."""

    name: str
    old: object
    new: object

    def __str__(self) -> str:
        old, new = self.old, self.new
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old and new:
            unlike = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            old, new = ({key: side[key] for key in unlike if key in side} for side in (old, new))
        return f"{self.name}: {_say(old)} against {_say(new)}"

    @property
    def is_unknown(self) -> bool:
        """Whether a side does not know it; two may be alike in that."""
        return any(side in NOT_KNOWN for side in (self.old, self.new))


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Change:
    """A figure of two results; the interval is of new / old."""

    name: str
    old: float
    new: float
    ratio: Interval
    is_more_better: bool

    @property
    def verdict(self) -> str:
        """Returns better or worse where the interval leaves 1 out, else unclear."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None or low <= 1 <= high:
            return "unclear"
        return "better" if (low > 1) == self.is_more_better else "worse"


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Returns why two results are not of the same thing; empty where they can be compared.

    What either does not know counts as different.
    """
    found = []
    for name, path in IDENTITY.items():
        sides = [_look_up(result, path) for result in (old, new)]
        if name == "hardware":
            sides = [_machine(side) for side in sides]
        is_unknown = name not in NONE_IS_KNOWN and any(side in NOT_KNOWN for side in sides)
        if sides[0] != sides[1] or is_unknown:
            found.append(Difference(name=name, old=sides[0], new=sides[1]))
    return found


def find_config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Returns the settings that differ: what the comparison is usually about; and in what else the
    two runs were not alike."""
    sides = [
        {name: _look_up(result, path) for name, path in CIRCUMSTANCES.items()}
        | dict(_flatten(result["manifest"].get("config") or {}))
        for result in (old, new)
    ]
    return [
        Difference(name=key, old=sides[0].get(key), new=sides[1].get(key))
        for key in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(key) != sides[1].get(key)
    ]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the change of each figure that both have, by their repeats.

    Raises:
      ResultError: one is not a benchmark's result.
    """
    for result in (old, new):
        if result.get("kind") != "bench" or "repeats" not in result:
            raise ResultError(f"a result of kind {result.get('kind')!r} cannot be compared so")
    changes = []
    for name, is_more_better in FIGURES.items():
        sides = [
            [each[name] for each in result["repeats"]["each"] if each.get(name) is not None]
            for result in (old, new)
        ]
        if not all(sides):
            continue
        means = [sum(side) / len(side) for side in sides]
        changes.append(
            Change(
                name=name,
                old=means[0],
                new=means[1],
                ratio=ratio_interval(sides[1], sides[0]) or _plain_ratio(means, sides),
                is_more_better=is_more_better,
            )
        )
    return changes


def _plain_ratio(means: Sequence[float], sides: Sequence[Sequence[float]]) -> Interval:
    """Returns the ratio where a value is not above 0, so that there is no interval: a goodput that
    fell to nothing must not go unsaid."""
    old, new = means
    value = new / old if old else (math.inf if new > 0 else math.nan)
    return Interval(value=value, low=None, high=None, num_repeats=min(map(len, sides)))


def _machine(hardware: object) -> object:
    """Returns the hardware, or None where it is only a kind of device."""
    if isinstance(hardware, Mapping) and hardware.keys() <= KIND_OF_DEVICE:
        return None
    return hardware


def _look_up(result: Mapping[str, Any], path: tuple[str, ...]) -> object:
    value: Any = result.get("manifest") or {}
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield from _flatten(part, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", part


def _say(value: object) -> str:
    if value in NOT_KNOWN[:3]:
        return "not known"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} {'none' if part is None else _say(part)}" for key, part in value.items()
        )
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
