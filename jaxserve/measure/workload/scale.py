"""Makes a workload of another: a part of it, slower, or with shorter lengths."""

import dataclasses
from collections.abc import Iterable, Iterator

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload.entry import Header, Prompt, Recipe, WorkloadEntry
from jaxserve.measure.workload.traces import Counts


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Scaling:
    """What to change, in the order in which it is done; None changes nothing.

    Attributes:
      window_s: keep what comes in the first seconds, of the times as they were.
      classes: keep these prompt classes.
      limit: keep so many, from the start.
      divide_lengths: prompts, shared blocks and outputs by this, rounded down, at least 1 token.
      max_tokens: drop requests whose prompt and output are longer together, and count them.
      time: all times by this; 10 sends ten times slower.
    """

    window_s: float | None = None
    classes: tuple[str, ...] | None = None
    limit: int | None = None
    divide_lengths: int | None = None
    max_tokens: int | None = None
    time: float | None = None


def scaled_header(header: Header, scaling: Scaling, *, content_hash: str) -> Header:
    """Returns the header of what comes of it, with each step in its lineage.

    Args:
      content_hash: of the workload before.
    """
    steps = {
        name: value
        for name, value in dataclasses.asdict(scaling).items()  # in the order of the steps
        if value is not None
    }
    lineage = [{"step": name, "value": value, "of": content_hash} for name, value in steps.items()]
    return dataclasses.replace(header, lineage=(*header.lineage, *lineage))


def scale_entries(
    entries: Iterable[WorkloadEntry], scaling: Scaling, *, counts: Counts
) -> Iterator[WorkloadEntry]:
    """Yields the entries that are kept, changed and numbered anew.

    Args:
      counts: gets what `max_tokens` dropped, as "over_max_tokens".

    Raises:
      WorkloadError: a text is to be shortened or measured, or no entry is left.
    """
    index = 0
    for entry in _keep(entries, scaling):
        shorter = _shorten(entry, scaling.divide_lengths)
        if scaling.max_tokens is not None and _num_tokens(shorter) > scaling.max_tokens:
            counts["over_max_tokens"] += 1
            continue
        at_s = shorter.at_s if scaling.time is None else round(shorter.at_s * scaling.time, 6)
        yield dataclasses.replace(shorter, index=index, at_s=at_s)
        index += 1
    if not index:
        raise WorkloadError("no request is left; keep more of the workload")


def _keep(entries: Iterable[WorkloadEntry], scaling: Scaling) -> Iterator[WorkloadEntry]:
    num_kept = 0
    for entry in entries:  # read to the end, where the file's hash is checked
        if scaling.window_s is not None and entry.at_s >= scaling.window_s:
            continue
        if scaling.classes is not None and entry.prompt_class not in scaling.classes:
            continue
        if scaling.limit is not None and num_kept >= scaling.limit:
            continue
        num_kept += 1
        yield entry


def _shorten(entry: WorkloadEntry, divisor: int | None) -> WorkloadEntry:
    if divisor is None:
        return entry
    wanted = entry.wanted_tokens
    return dataclasses.replace(
        entry,
        prompt=_shorten_prompt(entry, divisor),
        wanted_tokens=None if wanted is None else max(1, wanted // divisor),
    )


def _shorten_prompt(entry: WorkloadEntry, divisor: int) -> Prompt:
    match entry.prompt:
        case str():
            raise _no_length(entry)
        case Recipe():
            return _shorten_recipe(entry.prompt, divisor)
        case _:
            return entry.prompt[: max(1, len(entry.prompt) // divisor)]


def _shorten_recipe(recipe: Recipe, divisor: int) -> Recipe:
    """Returns the recipe with its blocks shorter by as much: what was shared still is."""
    num_tokens = max(1, recipe.num_tokens // divisor)
    shorter = Recipe(num_tokens=num_tokens, block_tokens=recipe.block_tokens / divisor)
    blocks = tuple(
        key for place, key in enumerate(recipe.blocks) if shorter.edge(place) < num_tokens
    )
    return dataclasses.replace(shorter, blocks=blocks)


def _num_tokens(entry: WorkloadEntry) -> int:
    if entry.prompt_tokens is None:
        raise _no_length(entry)
    return entry.prompt_tokens + (entry.wanted_tokens or 1)


def _no_length(entry: WorkloadEntry) -> WorkloadError:
    return WorkloadError(
        f"entry {entry.index} is a text, whose length only a tokenizer knows; import it with "
        "--tokenizer and --lengths-only"
    )
