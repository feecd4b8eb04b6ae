"""Makes workloads: arrivals, lengths, classes and shared prefixes out of a seed."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxserve.measure.workload.draws import Draws
from jaxserve.measure.workload.entry import Recipe, WorkloadEntry
from jaxserve.measure.workload.lengths import Lengths, Weighted, zipf_weights

NS_PER_S = 10**9
NS_PER_US = 1000
US_PER_S = 10**6


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class OpenLoop:
    """Requests come at this rate, whatever the server does.

    Gaps follow a gamma distribution of shape `burstiness`, as in `vllm bench serve`.

    Attributes:
      rate: requests a second.
      burstiness: 1 is a Poisson process, below 1 comes in bursts, above 1 is more even, and
        infinity is a constant rate.
    """

    rate: float
    burstiness: float = 1.0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ClosedLoop:
    """So many requests are in the server at any time; a slow server is asked less."""

    concurrency: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PrefixGroups:
    """Groups of requests that begin with the same tokens.

    Attributes:
      num_tokens: of each group's prefix; a request's own tokens come after it.
      zipf: group r is drawn in proportion to 1/r^zipf; 0 draws all alike.
    """

    num_groups: int
    num_tokens: int
    zipf: float = 0.0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PromptClass:
    """One kind of request.

    Attributes:
      name: "" where there is but one.
      weight: its share is this over the sum of all.
      prompt: tokens of the prompt, without a group's prefix.
    """

    prompt: Lengths
    output: Lengths
    name: str = ""
    weight: float = 1.0
    prefix: PrefixGroups | None = None
    deadline_s: float | None = None
    priority: int = 0


def make_entries(
    arrivals: OpenLoop | ClosedLoop,
    classes: Sequence[PromptClass],
    *,
    seed: int,
    num_requests: int | None = None,
    duration_s: float = math.inf,
) -> Iterator[WorkloadEntry]:
    """Yields the entries; the same arguments give the same ones everywhere.

    Args:
      num_requests: None makes as many as come within the duration.
      duration_s: of an open loop.
    """
    which, choices = Weighted([one.weight for one in classes]), Draws(seed, "class")
    makers = [_ClassMaker(one, seed) for one in classes]
    for index, at_s in enumerate(itertools.islice(arrival_times(arrivals, seed), num_requests)):
        if at_s >= duration_s:
            return
        yield makers[which.draw(choices)].make(index, at_s)


def arrival_times(arrivals: OpenLoop | ClosedLoop, seed: int) -> Iterator[float]:
    """Yields seconds, rising, in whole microseconds, without end."""
    if isinstance(arrivals, ClosedLoop):
        yield from itertools.repeat(0.0)
    elif math.isinf(arrivals.burstiness):
        for index in itertools.count():
            yield round(index / arrivals.rate, 6)
    else:
        draws, at_ns = Draws(seed, "arrivals"), 0
        scale_ns = NS_PER_S / (arrivals.rate * arrivals.burstiness)
        is_poisson = arrivals.burstiness == 1
        while True:  # summed as integers: rounding does not pile up
            gap = draws.exponential() if is_poisson else draws.gamma(arrivals.burstiness)
            at_ns += int(gap * scale_ns + 0.5)
            yield at_ns // NS_PER_US / US_PER_S


class _ClassMaker:
    """Makes entries of one class, out of streams of its own."""

    def __init__(self, one: PromptClass, seed: int) -> None:
        self._class = one
        self._prompts = Draws(seed, f"prompt\0{one.name}")
        self._outputs = Draws(seed, f"output\0{one.name}")
        self._groups = Draws(seed, f"group\0{one.name}")
        prefix = one.prefix
        self._which = Weighted(zipf_weights(prefix.num_groups, prefix.zipf)) if prefix else None

    def make(self, index: int, at_s: float) -> WorkloadEntry:
        one = self._class
        group, recipe = self._draw_prompt()
        return WorkloadEntry(
            index=index,
            at_s=at_s,
            prompt=recipe,
            prompt_class=one.name,
            wanted_tokens=one.output.draw(self._outputs),
            deadline_s=one.deadline_s,
            priority=one.priority,
            group=group,
        )

    def _draw_prompt(self) -> tuple[str, Recipe]:
        num_tokens = self._class.prompt.draw(self._prompts)
        prefix = self._class.prefix
        if prefix is None or self._which is None:
            return "", Recipe(num_tokens=num_tokens)
        key = f"{self._class.name}/{self._which.draw(self._groups)}"
        recipe = Recipe(
            num_tokens=prefix.num_tokens + num_tokens,
            block_tokens=prefix.num_tokens,
            blocks=(key,),
        )
        return key, recipe
