"""How a benchmark measures, and what is known of the server that it measures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from jaxserve.measure.limits import Limits
from jaxserve.measure.load import Lengths
from jaxserve.measure.replay import TIMEOUT_S
from jaxserve.measure.targets.base import Sampling

LAG_BOUND_S: Final = 0.05

CacheState = Literal["cold", "primed", "mixed", "unknown"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BenchOptions:
    """How to measure.

    Attributes:
      warm_up: requests sent before the measured ones, and left out of every figure.
      primes_cache: sends every prompt of the load once before the measured replays.
      seed: of prompts and sampling; another one gives other prompts of the same lengths.
      is_seed_chosen: the seed is somebody's word, so an earlier run may have sent the same prompts.
      rate_scale: 2 sends twice as fast, or keeps twice as many in flight in a closed loop.
      sampling: of all requests, by names of `SamplingParams`; an entry's own goes over it.
      cache_state: at the start; None is worked out where that is possible.
      lag_bound_s: a send lag whose 99th percentile is above this is warned about.
    """

    limits: Limits
    seed: int
    is_seed_chosen: bool = False
    repeats: int = 1
    warm_up: int = 0
    primes_cache: bool = False
    rate_scale: float = 1.0
    timeout_s: float = TIMEOUT_S
    max_drain_s: float | None = None
    sampling: Sampling = dataclasses.field(default_factory=dict)
    lengths: Lengths = "exact"
    cache_state: CacheState | None = None
    lag_bound_s: float = LAG_BOUND_S


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Served:
    """What is known of the server beside what it tells by itself; "" and {} are not known.

    Attributes:
      address: where requests go; "" is this process.
      ignores_end: whether it can be told to ignore the model's end.
      decode: see `AskMaker`.
      is_fresh: it has served nothing before.
      is_local: it runs on this machine, whose energy counters are its own.
      stated: which of the other fields somebody only said.
    """

    address: str = ""
    bundle_digest: str = ""
    hardware: Mapping[str, object] = dataclasses.field(default_factory=dict)
    jax_version: str = ""
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ignores_end: bool = True
    decode: Callable[[tuple[int, ...]], str] | None = None
    is_fresh: bool = False
    is_local: bool = False
    stated: Sequence[str] = ()
