"""The one table of mechanisms: the switch of each, what proves that it ran, and what it meets.

A mechanism is anything that can be taken away to see what it gave. Each can be switched off alone,
its counters rise only when it really ran, and two that are on together must be a pair of `PAIRS`:
a pair nobody has looked at is refused when a configuration is checked, never tried.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxserve.config import Config
from jaxserve.errors import ConfigError


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Mechanism:
    """One row of the table.

    Attributes:
      key: the switch, a dotted configuration key.
      on: its value that turns the mechanism on.
      off: its value that takes the mechanism away.
      also_on: further values that turn it on.
      counters: samples of `metrics.py`: each above 0 after a run that could use it, 0 while off.
      in_baseline: kept on by configs/baseline.toml, because serving is not sane without it.
      needs: the mechanism without which it does nothing.
      platform: the kind of device without which it does nothing; None is any.
    """

    name: str
    purpose: str
    key: str
    on: str | bool
    off: str | bool
    counters: tuple[str, ...]
    in_baseline: bool = False
    needs: str | None = None
    platform: Literal["gpu"] | None = None
    also_on: tuple[str, ...] = ()

    def is_on(self, config: Config) -> bool:
        """Whether `config` turns it on."""
        section, _, field = self.key.partition(".")
        return self.is_turned_on_by(getattr(getattr(config, section), field))

    def is_turned_on_by(self, value: object) -> bool:
        """Whether a value of its key turns it on."""
        return value == self.on or value in self.also_on


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Pair:
    """What is known of two mechanisms that are on together.

    Attributes:
      verdict: refused raises when a configuration is checked.
      note: where they touch and why that is sound, or why it is refused.
    """

    verdict: Literal["works", "refused"]
    note: str


MECHANISMS = (
    Mechanism(
        name="continuous_batching",
        purpose="A waiting request joins as soon as a row and its pages are free.",
        key="scheduler.batching",
        on="continuous",
        off="static",
        counters=("joined_running_total",),
        in_baseline=True,
    ),
    Mechanism(
        name="on_demand_pages",
        purpose="A sequence takes KV pages as it grows, not its longest length at admission.",
        key="kv.reserve",
        on="on_demand",
        off="max_length",
        counters=("kv_grown_pages_total",),
        in_baseline=True,
    ),
    Mechanism(
        name="chunked_prefill",
        purpose="A long prompt is computed over several steps, so that decoding rows go on.",
        key="scheduler.chunked_prefill",
        on=True,
        off=False,
        counters=("chunked_prompts_total",),
    ),
    Mechanism(
        name="overlap",
        purpose="A step is launched before the result of the one before is read.",
        key="runner.overlap",
        on=True,
        off=False,
        counters=("overlapped_steps_total",),
    ),
    Mechanism(
        name="buckets",
        purpose="A small step runs a program of a small shape, compiled ahead of time.",
        key="buckets.capture",
        on=True,
        off=False,
        counters=("bucketed_steps_total",),
    ),
    Mechanism(
        name="prefix_cache",
        purpose="Computed prompts are kept while there is room, and reused by those that follow.",
        key="prefix_cache.enabled",
        on=True,
        off=False,
        counters=("prefix_cache_queries_total", "prefix_cache_reused_tokens_total"),
    ),
    Mechanism(
        name="prefix_order",
        purpose="Who waits and has more of its prompt in the prefix cache starts first.",
        key="scheduler.prefix_order",
        on=True,
        off=False,
        counters=("reordered_starts_total",),
        needs="prefix_cache",
    ),
    Mechanism(
        name="host_tier",
        purpose="Pages that the prefix cache drops go to host memory, and come back by copy.",
        key="host_tier.enabled",
        on=True,
        off=False,
        counters=("host_tier_pages_out_total", "host_tier_pages_in_total"),
        needs="prefix_cache",
    ),
    Mechanism(
        name="command_buffers",
        purpose="A program is replayed as one CUDA graph, not launched kernel by kernel.",
        key="runner.command_buffers",
        on="auto",
        off="off",
        counters=("captured_steps_total",),
        platform="gpu",
    ),
    Mechanism(
        name="batch_invariant",
        purpose="A token's numbers depend on nothing but its own sequence, bit for bit.",
        key="runner.batch_invariant",
        on=True,
        off=False,
        counters=("batch_invariant_steps_total",),
    ),
    Mechanism(
        name="kv_quantization",
        purpose="A number of K/V takes one byte, so that the pool holds more tokens.",
        key="kv.dtype",
        on="int8",
        off="auto",
        also_on=("float8_e4m3fn",),
        counters=("quantized_kv_tokens_total",),
    ),
)


def _works(first: str, second: str, note: str) -> tuple[frozenset[str], Pair]:
    return frozenset((first, second)), Pair(verdict="works", note=note)


def _works_with(name: str, **notes: str) -> Iterator[tuple[frozenset[str], Pair]]:
    """Yields the pairs of a mechanism with others, by their names."""
    for other, note in notes.items():
        yield _works(name, other, note)


PAIRS: Mapping[frozenset[str], Pair] = dict(
    [
        _works(
            "continuous_batching",
            "on_demand_pages",
            "Rows that joined may outgrow the pool: the youngest is preempted and recomputed.",
        ),
        _works(
            "continuous_batching",
            "chunked_prefill",
            "A prompt that joins is cut, so that it does not stall the rows that decode.",
        ),
        _works(
            "continuous_batching",
            "overlap",
            "An end is seen late: the row and its pages are reused only after the steps in flight.",
        ),
        _works(
            "continuous_batching", "buckets", "The bucket follows the number of rows as they join."
        ),
        _works(
            "on_demand_pages",
            "chunked_prefill",
            "Each chunk takes its own pages; a prompt may be preempted between two chunks.",
        ),
        _works(
            "on_demand_pages",
            "overlap",
            "Pages given up wait until the steps that may still write them have retired.",
        ),
        _works(
            "on_demand_pages", "buckets", "The width of the page table is in no program's shape."
        ),
        _works(
            "chunked_prefill",
            "overlap",
            "The next chunk needs no sampled token, so it is launched at once.",
        ),
        _works(
            "chunked_prefill",
            "buckets",
            "Chunk sizes are bucketed, beside a few sizes of decoding rows only.",
        ),
        _works("overlap", "buckets", "Every shape is compiled before the first step."),
        _works(
            "prefix_cache",
            "continuous_batching",
            "Who joins takes the pages that are there, before it takes new ones.",
        ),
        _works(
            "prefix_cache",
            "on_demand_pages",
            "A kept page that nobody holds counts as free; whoever needs it drops it. With pages "
            "reserved ahead, what is taken from the cache is not reserved.",
        ),
        _works(
            "prefix_cache",
            "chunked_prefill",
            "Each chunk's full pages are kept when its step has retired; the first chunk begins "
            "behind what was found.",
        ),
        _works(
            "prefix_cache",
            "overlap",
            "Nothing is found before the step that writes it has retired.",
        ),
        _works(
            "prefix_cache", "buckets", "The rest of a prompt runs in the bucket of its own length."
        ),
        _works(
            "prefix_order",
            "continuous_batching",
            "Who joins is chosen among the first that wait; with static batching, each member.",
        ),
        _works(
            "prefix_order",
            "on_demand_pages",
            "Who is chosen waits for its pages like the first; who gave pages up is not overtaken.",
        ),
        _works("prefix_order", "chunked_prefill", "Only the order of first chunks is another."),
        _works("prefix_order", "overlap", "What steps in flight will leave does not count yet."),
        _works("prefix_order", "buckets", "The order is in no program's shape."),
        _works("prefix_order", "prefix_cache", "It asks the cache what a start would be spared."),
        _works(
            "prefix_order", "host_tier", "What would come back from host memory counts as cached."
        ),
        _works(
            "host_tier",
            "continuous_batching",
            "Who joins has its pages copied back in its first step, before anything is computed.",
        ),
        _works(
            "host_tier",
            "on_demand_pages",
            "What comes back is copied into pages that are taken as for tokens to compute.",
        ),
        _works(
            "host_tier",
            "chunked_prefill",
            "The first chunk begins behind what is copied back.",
        ),
        _works(
            "host_tier",
            "overlap",
            "A page is read on the device before the step that is given it; it can be found in "
            "host memory once that step has retired, and likewise in the pool when it is back.",
        ),
        _works("host_tier", "buckets", "Its two programs have one width."),
        _works(
            "host_tier",
            "prefix_cache",
            "Host memory continues the cache's tree: the same keys, identities and comparisons.",
        ),
        *_works_with(
            "command_buffers",
            continuous_batching="Rows that join are data of a graph, not its shape.",
            on_demand_pages="Page tables are data of a graph, too.",
            chunked_prefill="Each shape with a chunk is a graph of its own.",
            overlap="A graph waits for the one before it on the device, as a kernel does.",
            buckets="There is a graph for each compiled shape.",
            prefix_cache="Copies of pages are programs of their own, before the step's graphs.",
            prefix_order="The order is in no program.",
            host_tier="Its two programs are too small for a graph and are launched as they are.",
        ),
        *_works_with(
            "batch_invariant",
            continuous_batching="Who joins changes nobody's numbers: that is what it is for.",
            on_demand_pages="Where a page lies is in no sum, and what a preemption computes again "
            "is the same bit for bit.",
            chunked_prefill="Each token is an attention row of its own, wherever a prompt is cut.",
            overlap="What is launched early computes the same.",
            buckets="There is one bucket: nothing is left to choose, and no step counts as theirs.",
            prefix_cache="What is reused is what would be computed, bit for bit.",
            prefix_order="The order of starts is in no sum.",
            host_tier="Copies are exact.",
            command_buffers="A graph replays the same kernels.",
        ),
        *_works_with(
            "kv_quantization",
            continuous_batching="A token's scales are its own, whoever runs beside it.",
            on_demand_pages="A page's scales are taken, given up and computed again with it.",
            chunked_prefill="A token is scaled by itself, wherever its prompt is cut, and reads "
            "what was rounded of its own chunk, too.",
            overlap="Scales are written on the device, in the step of their tokens.",
            buckets="There is the same write in every shape.",
            prefix_cache="What is reused was rounded as it would be again; dtype and kind of "
            "scales are in the identity.",
            prefix_order="The order of starts is in no number.",
            host_tier="A page's scales go with it, under the same checksum.",
            command_buffers="A graph has a second write for each layer.",
            batch_invariant="Each head of a token is rounded by itself: equal bits stay equal.",
        ),
    ]
)


def active_mechanisms(
    config: Config, *, mechanisms: tuple[Mechanism, ...] = MECHANISMS
) -> tuple[Mechanism, ...]:
    """Returns the mechanisms that `config` turns on, in the order of the table."""
    return tuple(mechanism for mechanism in mechanisms if mechanism.is_on(config))


def find_conflicts(
    config: Config,
    *,
    mechanisms: tuple[Mechanism, ...] = MECHANISMS,
    pairs: Mapping[frozenset[str], Pair] = PAIRS,
) -> list[str]:
    """Returns a line for each mechanism that is on without what it needs, and for each two that are
    refused, or were never looked at."""
    conflicts = []
    active = active_mechanisms(config, mechanisms=mechanisms)
    names = {mechanism.name for mechanism in active}
    for mechanism in active:
        if mechanism.needs and mechanism.needs not in names:
            needed = next(other for other in mechanisms if other.name == mechanism.needs)
            conflicts.append(
                f"{mechanism.name} does nothing without {needed.name}; "
                f"set {needed.key} = {json.dumps(needed.on)} "
                f"or {mechanism.key} = {json.dumps(mechanism.off)}"
            )
    for first, second in itertools.combinations(active, 2):
        pair = pairs.get(frozenset((first.name, second.name)))
        if pair is None or pair.verdict == "refused":
            reason = pair.note if pair else "this pair was never tested"
            conflicts.append(
                f"{first.name} and {second.name} do not go together: {reason}; "
                f"set {first.key} = {json.dumps(first.off)} "
                f"or {second.key} = {json.dumps(second.off)}"
            )
    return conflicts


def check_mechanisms(
    config: Config,
    *,
    mechanisms: tuple[Mechanism, ...] = MECHANISMS,
    pairs: Mapping[frozenset[str], Pair] = PAIRS,
) -> tuple[Mechanism, ...]:
    """Returns the active mechanisms, once all of them are known to work together.

    Raises:
      ConfigError: one that is on lacks what it needs, or two are refused together, or were never
        looked at together.
    """
    conflicts = find_conflicts(config, mechanisms=mechanisms, pairs=pairs)
    if conflicts:
        raise ConfigError(conflicts[0])
    return active_mechanisms(config, mechanisms=mechanisms)
