"""The load of a replay: a workload that can be read again, and its entries as requests."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from jaxserve.errors import WorkloadError
from jaxserve.measure.targets.base import Ask, Sampling, TargetFacts
from jaxserve.measure.workload import (
    Header,
    Recipe,
    Workload,
    WorkloadEntry,
    materialize,
    open_workload,
)

Lengths = Literal["exact", "at_most"]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """A workload, read through once and found whole.

    Attributes:
      open_entries: opens its entries anew, from the first.
      span_s: when the last entry is sent.
      sampling_names: what its entries set of the sampling.
      classes: of its entries' prompts.
      num_texts: entries whose prompt is text.
      num_recipes: entries whose prompt is made up.
    """

    header: Header
    content_hash: str
    open_entries: Callable[[], AbstractContextManager[Iterator[WorkloadEntry]]]
    num_requests: int
    span_s: float
    sampling_names: frozenset[str]
    classes: frozenset[str]
    num_texts: int
    num_recipes: int

    @property
    def requests_per_s(self) -> float | None:
        """The rate of arrivals; None of a closed loop, and of requests that all come at once."""
        if self.header.arrivals == "closed" or not self.span_s:
            return None
        return self.num_requests / self.span_s


def load_file(path: Path) -> Load:
    """Returns the load of a workload file.

    Raises:
      WorkloadError: it cannot be read, or anything in it is wrong.
    """

    @contextlib.contextmanager
    def open_entries() -> Iterator[Iterator[WorkloadEntry]]:
        with open_workload(path) as opened:
            yield opened.entries

    with open_workload(path) as opened:
        assert opened.end is not None
        return _scan(opened.header, opened.end.content_hash, opened.entries, open_entries)


def load_memory(workload: Workload) -> Load:
    """Returns the load of a workload that was just made."""

    def open_entries() -> AbstractContextManager[Iterator[WorkloadEntry]]:
        return contextlib.nullcontext(iter(workload.entries))

    entries = iter(workload.entries)
    return _scan(workload.header, workload.content_hash, entries, open_entries)


def _scan(
    header: Header,
    content_hash: str,
    entries: Iterator[WorkloadEntry],
    open_entries: Callable[[], AbstractContextManager[Iterator[WorkloadEntry]]],
) -> Load:
    num_requests, num_texts, num_recipes, span_s = 0, 0, 0, 0.0
    names: set[str] = set()
    classes: set[str] = set()
    for entry in entries:
        num_requests += 1
        num_texts += isinstance(entry.prompt, str)
        num_recipes += isinstance(entry.prompt, Recipe)
        span_s = entry.at_s
        classes.add(entry.prompt_class)
        names |= entry.sampling.keys()
        names |= {"priority"} if entry.priority else set()
    if not num_requests:
        raise WorkloadError(f"workload {header.name!r} has no entries; there is nothing to replay")
    return Load(
        header=header,
        content_hash=content_hash,
        open_entries=open_entries,
        num_requests=num_requests,
        span_s=span_s,
        sampling_names=frozenset(names),
        classes=frozenset(classes),
        num_texts=num_texts,
        num_recipes=num_recipes,
    )


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class AskMaker:
    """Turns entries into requests for one target.

    Attributes:
      sampling: of all requests; an entry's own goes over it.
      lengths: exact asks for as many tokens as an entry wants, the model's end ignored; at_most
        only bounds the output, and whatever ends sooner is as good.
      ignores_end: whether the target can be told to ignore the model's end.
      decode: makes text of made-up prompts, for a target that takes text alone; None sends ids.
      rate_scale: 2 sends twice as fast.
    """

    header: Header
    facts: TargetFacts
    sampling: Sampling
    lengths: Lengths = "exact"
    ignores_end: bool = True
    decode: Callable[[tuple[int, ...]], str] | None = None
    rate_scale: float = 1.0

    def make(self, entry: WorkloadEntry, salt: str, *, is_warm_up: bool = False) -> Ask:
        """Returns the request.

        Args:
          salt: of the run: another one gives other prompts, seeds and ids.

        Raises:
          WorkloadError: the prompt cannot be made for this model.
        """
        return Ask(
            index=entry.index,
            request_id=f"bench-{_digest(salt)[:10]}-{entry.index}",
            at_s=entry.at_s / self.rate_scale,
            prompt=self._prompt(entry, salt),
            prompt_class=entry.prompt_class,
            wanted_tokens=entry.wanted_tokens if self.lengths == "exact" else None,
            deadline_s=None if is_warm_up else entry.deadline_s,
            priority=entry.priority,
            sampling=self._sampling(entry, salt),
            is_warm_up=is_warm_up,
        )

    def _prompt(self, entry: WorkloadEntry, salt: str) -> str | tuple[int, ...]:
        facts = self.facts
        if isinstance(entry.prompt, Recipe) and not facts.vocab_size:
            raise WorkloadError(
                "the workload's prompts are made of token ids, but this endpoint does not tell its "
                "vocabulary; name the model's files as MODEL, or give --vocab-size"
            )
        prompt = materialize(
            entry,
            vocab_size=facts.vocab_size or 1 << 31,
            special_ids=facts.special_ids,
            run_salt=self.header.salt_of(salt),
        )
        if self.decode is not None and not isinstance(prompt, str):
            return self.decode(prompt)
        return prompt

    def _sampling(self, entry: WorkloadEntry, salt: str) -> Sampling:
        chosen: dict[str, bool | int | float] = {**self.sampling, **entry.sampling}
        if chosen.get("temperature", 1.0) and "seed" not in chosen:
            chosen["seed"] = int(_digest(f"{salt}\0{entry.index}")[:8], 16)
        if entry.wanted_tokens is not None:
            chosen["max_tokens"] = entry.wanted_tokens
            if self.lengths == "exact" and self.ignores_end:
                chosen["ignore_eos"] = True
        return chosen

    def describe(self) -> Mapping[str, object]:
        """Returns what a result says of the sampling."""
        return {**self.sampling, "lengths": self.lengths, "ignore_eos": self.ignores_end}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
