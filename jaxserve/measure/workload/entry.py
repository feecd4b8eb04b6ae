"""A workload in memory: its header, its entries, and the hash of the load that they mean."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final, Literal

FORMAT_VERSION: Final = 1

Sampling = Mapping[str, bool | int | float]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Recipe:
    """A prompt by its length and by what it shares; its tokens are made when it is sent.

    Equal keys are equal tokens within a run; what no block covers is this entry's alone.

        num_tokens 10, block_tokens 4, blocks (a, b)    aaaabbbb##

    Attributes:
      num_tokens: at least 1.
      block_tokens: 0 where there are no blocks; else any number above 0, as 512 / 3 where lengths
        were divided by 3: blocks then differ in length by one token.
      blocks: keys, from the prompt's start; a key stands for the text before it as well.
    """

    num_tokens: int
    block_tokens: float = 0.0
    blocks: tuple[str, ...] = ()

    def edge(self, num_blocks: int) -> int:
        """Returns the tokens that this many blocks cover, cut at the prompt's end."""
        return min(int(num_blocks * self.block_tokens), self.num_tokens)


# A recipe, token ids, or a text.
Prompt = Recipe | tuple[int, ...] | str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class WorkloadEntry:
    """One request.

    Attributes:
      index: place in the workload, from 0.
      at_s: when to send it, seconds since the start; never falls; 0 in a closed loop.
      prompt_class: a word for its kind; "" is none.
      wanted_tokens: output tokens it is to have, the model's own end ignored; None leaves the end
        to the model and to `sampling`.
      deadline_s: limit of the whole request from its intended start; None is none.
      priority: higher runs first.
      sampling: what differs from the replay's sampling, by names of `SamplingParams`.
      group: a word for what it belongs to, such as a session; changes nothing in a replay.
    """

    index: int
    at_s: float
    prompt: Prompt
    prompt_class: str = ""
    wanted_tokens: int | None = None
    deadline_s: float | None = None
    priority: int = 0
    sampling: Sampling = dataclasses.field(default_factory=dict)
    group: str = ""

    @property
    def prompt_tokens(self) -> int | None:
        """Length of the prompt; None for a text, which only a tokenizer can tell."""
        match self.prompt:
            case str():
                return None
            case Recipe():
                return self.prompt.num_tokens
            case _:
                return len(self.prompt)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Header:
    """What holds for all entries, and where they come from.

    Attributes:
      arrivals: open: at `at_s`, whatever the server does. closed: `concurrency` requests at any
        time, the next one when one ends; the server then sets the pace.
      prompts: unique: recipes give other tokens in each run. fixed: the same in every run.
      seed: of the recipes of fixed prompts, and of whatever made the file.
      source: where the arrivals and lengths come from.
      licence: what their licence asks; "" is not stated.
      parameters: of the maker or importer.
      lineage: what was done to it since, oldest first: each step with the hash before it.
      limits: the latencies promised to a prompt class, as `ttft=0.5`. They judge a replay and do
        not change its load, so that they are no part of the hash.
    """

    name: str
    arrivals: Literal["open", "closed"] = "open"
    concurrency: int | None = None
    prompts: Literal["unique", "fixed"] = "unique"
    seed: int = 0
    source: str = ""
    licence: str = ""
    parameters: Mapping[str, object] = dataclasses.field(default_factory=dict)
    lineage: tuple[Mapping[str, object], ...] = ()
    limits: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def salt_of(self, run_salt: str) -> str:
        """Returns the salt to materialize with: the run's own, unless the prompts are fixed."""
        return run_salt if self.prompts == "unique" else f"fixed {self.seed}"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Workload:
    """All of it, in memory.

    Attributes:
      content_hash: of the load, hexadecimal SHA-256; see `ContentHash`.
    """

    header: Header
    entries: tuple[WorkloadEntry, ...]
    content_hash: str

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def is_closed_loop(self) -> bool:
        return self.header.arrivals == "closed"


def build_workload(header: Header, entries: Iterable[WorkloadEntry]) -> Workload:
    """Returns the workload, its entries numbered and hashed."""
    numbered = tuple(dataclasses.replace(entry, index=index) for index, entry in enumerate(entries))
    content_hash = ContentHash(header)
    for entry in numbered:
        content_hash.add(entry)
    return Workload(header=header, entries=numbered, content_hash=content_hash.hexdigest())


class ContentHash:
    """SHA-256 over the header's facts that change the load and over all facts of each entry.

    It is taken of the values and not of the file's spelling: order of keys, white space and the
    spelling of numbers do not change it; nor do name, source, licence, parameters, lineage, limits.
    """

    def __init__(self, header: Header) -> None:
        facts = {
            "format": FORMAT_VERSION,
            "arrivals": header.arrivals,
            "concurrency": header.concurrency,
            "prompts": header.prompts,
        }
        if header.prompts == "fixed":
            facts["seed"] = header.seed
        self._sha = hashlib.sha256(dump_line(facts))

    def add(self, entry: WorkloadEntry) -> None:
        self.add_line(dump_line(entry_facts(entry)))

    def add_line(self, line: bytes) -> None:
        """Adds an entry as `dump_line` of its `entry_facts`."""
        self._sha.update(line)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def entry_facts(entry: WorkloadEntry) -> dict[str, object]:
    """Returns the entry's object in the file; what has its default is left out."""
    facts: dict[str, object] = {"at_s": float(entry.at_s)}
    match entry.prompt:
        case str():
            facts["text"] = entry.prompt
        case Recipe():
            facts["prompt_tokens"] = entry.prompt.num_tokens
            if entry.prompt.blocks:
                facts["block_tokens"] = float(entry.prompt.block_tokens)
                facts["blocks"] = entry.prompt.blocks
        case _:
            facts["token_ids"] = entry.prompt
    if entry.prompt_class:
        facts["prompt_class"] = entry.prompt_class
    if entry.wanted_tokens is not None:
        facts["wanted_tokens"] = entry.wanted_tokens
    if entry.deadline_s is not None:
        facts["deadline_s"] = float(entry.deadline_s)
    if entry.priority:
        facts["priority"] = entry.priority
    if entry.sampling:
        facts["sampling"] = dict(entry.sampling)
    if entry.group:
        facts["group"] = entry.group
    return facts


def dump_line(facts: Mapping[str, object]) -> bytes:
    """Returns the one spelling of an object that is written and hashed."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
