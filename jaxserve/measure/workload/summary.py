"""What is in a workload, in numbers: rates, lengths, classes, and how much a cache could share."""

import collections
import dataclasses
import hashlib
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from jaxserve.measure.statistics import Distribution, Sample
from jaxserve.measure.workload.entry import Header, Recipe, WorkloadEntry

BUSY_S: Final = 10.0
ID_BYTES: Final = 4


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Rates:
    """Of an open loop; None is what too few requests do not tell.

    Attributes:
      duration_s: from the start to the last request.
      requests_per_s: requests but the first, by the time from the first to the last.
      burstiness: 1 / (deviation / mean)² of the gaps, the shape that a gamma distribution of this
        spread has: 1 is a Poisson process, below 1 comes in bursts.
      busiest_requests: most that come within any `BUSY_S` seconds.
    """

    duration_s: float
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    burstiness: float | None
    busiest_requests: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Sharing:
    """What a prefix cache could save at most: one that forgets nothing and is never too late.

    Pages are shared whole, and a prompt's last token is always computed.

    Attributes:
      hit_rate: tokens that need not be computed, by all tokens of prompts of known length.
      num_sharing: requests that find something.
    """

    page_size: int
    hit_rate: float | None
    shared_tokens: int
    num_sharing: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ClassSummary:
    """One prompt class.

    Attributes:
      deadlines_s: the deadlines that come up, rising; None among them is none.
    """

    num_requests: int
    prompt_tokens: Distribution
    output_tokens: Distribution
    deadlines_s: tuple[float | None, ...]
    priorities: tuple[int, ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Summary:
    """All of it.

    Attributes:
      num_texts: prompts whose length only a tokenizer knows; they are in no length.
      num_open_ended: requests whose end is left to the model; they are in no output length.
      rates: None in a closed loop.
      classes: by name, "" among them where a request has none.
    """

    num_requests: int
    num_texts: int
    num_open_ended: int
    prompt_tokens: Distribution
    output_tokens: Distribution
    total_prompt_tokens: int
    total_output_tokens: int
    rates: Rates | None
    sharing: Sharing
    classes: Mapping[str, ClassSummary]


def summarize(header: Header, entries: Iterable[WorkloadEntry], *, page_size: int) -> Summary:
    """Returns the summary; reads the entries once, and keeps their numbers alone."""
    cache, times = _EndlessCache(page_size), array("d")
    classes: dict[str, _ClassCount] = collections.defaultdict(_ClassCount)
    all_of = _ClassCount()
    num_texts = num_open_ended = num_requests = 0
    for entry in entries:
        num_requests += 1
        num_texts += entry.prompt_tokens is None
        num_open_ended += entry.wanted_tokens is None
        times.append(entry.at_s)
        cache.ask(entry)
        all_of.add(entry)
        classes[entry.prompt_class].add(entry)
    is_open = header.arrivals == "open"
    return Summary(
        num_requests=num_requests,
        num_texts=num_texts,
        num_open_ended=num_open_ended,
        prompt_tokens=all_of.prompts.describe(),
        output_tokens=all_of.outputs.describe(),
        total_prompt_tokens=all_of.num_prompt_tokens,
        total_output_tokens=all_of.num_output_tokens,
        rates=_find_rates(times, all_of) if is_open and num_requests else None,
        sharing=cache.sharing(all_of.num_prompt_tokens),
        classes={name: classes[name].summary() for name in sorted(classes)},
    )


class _ClassCount:
    """The numbers of some entries."""

    def __init__(self) -> None:
        self.prompts, self.outputs = Sample(), Sample()
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._num = 0
        self._deadlines: set[float | None] = set()
        self._priorities: set[int] = set()

    def add(self, entry: WorkloadEntry) -> None:
        self._num += 1
        self._deadlines.add(entry.deadline_s)
        self._priorities.add(entry.priority)
        if entry.prompt_tokens is not None:
            self.prompts.add(entry.prompt_tokens)
            self.num_prompt_tokens += entry.prompt_tokens
        if entry.wanted_tokens is not None:
            self.outputs.add(entry.wanted_tokens)
            self.num_output_tokens += entry.wanted_tokens

    def summary(self) -> ClassSummary:
        return ClassSummary(
            num_requests=self._num,
            prompt_tokens=self.prompts.describe(),
            output_tokens=self.outputs.describe(),
            deadlines_s=tuple(sorted(self._deadlines, key=lambda one: (one is None, one))),
            priorities=tuple(sorted(self._priorities)),
        )


class _EndlessCache:
    """Finds what of each prompt came before it; a block's key stands for all text before it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._seen: dict[str, int] = {}  # tokens of the block that were there
        self._num_shared = self._num_sharing = 0

    def ask(self, entry: WorkloadEntry) -> None:
        num_tokens = entry.prompt_tokens
        if num_tokens is None:
            return
        num_found, is_prefix = 0, True
        for key, length in self._blocks(entry):
            before = self._seen.get(key, 0)
            if is_prefix:
                num_found += min(before, length)
                is_prefix = before >= length
            self._seen[key] = max(before, length)
        num_pages = min(num_found, num_tokens - 1) // self._page_size
        self._num_shared += num_pages * self._page_size
        self._num_sharing += num_pages > 0

    def sharing(self, num_tokens: int) -> Sharing:
        return Sharing(
            page_size=self._page_size,
            hit_rate=self._num_shared / num_tokens if num_tokens else None,
            shared_tokens=self._num_shared,
            num_sharing=self._num_sharing,
        )

    def _blocks(self, entry: WorkloadEntry) -> Iterator[tuple[str, int]]:
        match entry.prompt:
            case str():
                return
            case Recipe() as recipe:
                for place, key in enumerate(recipe.blocks):
                    yield key, recipe.edge(place + 1) - recipe.edge(place)
            case ids:
                chain = hashlib.sha256()
                for start in range(0, len(ids) - self._page_size + 1, self._page_size):
                    for id in ids[start : start + self._page_size]:
                        chain.update(id.to_bytes(ID_BYTES, "little"))
                    yield f"ids {chain.hexdigest()}", self._page_size


def _find_rates(times: "array[float]", all_of: _ClassCount) -> Rates:
    between_s = times[-1] - times[0]
    num_gaps = len(times) - 1
    per_s = num_gaps / between_s if between_s else None
    share = num_gaps / len(times)  # as of the rate, the first request is not counted

    def tokens_per_s(num_tokens: int) -> float | None:
        return num_tokens * share / between_s if between_s else None

    return Rates(
        duration_s=times[-1],
        requests_per_s=per_s,
        prompt_tokens_per_s=tokens_per_s(all_of.num_prompt_tokens),
        output_tokens_per_s=tokens_per_s(all_of.num_output_tokens),
        burstiness=_burstiness(times),
        busiest_requests=_busiest(times),
    )


def _burstiness(times: "array[float]") -> float | None:
    gaps = [after - before for before, after in itertools.pairwise(times)]
    if len(gaps) < 2 or not sum(gaps):
        return None
    mean = math.fsum(gaps) / len(gaps)
    square = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    spread = square / mean**2
    return 1.0 / spread if spread > 1e-9 else None


def _busiest(times: "array[float]") -> int:
    most = first = 0
    for last, at_s in enumerate(times):
        while times[first] <= at_s - BUSY_S:
            first += 1
        most = max(most, last - first + 1)
    return most
