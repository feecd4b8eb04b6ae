"""Makes workloads of traces, of data sets of prompts, and of workload files without an end."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Literal

from jaxserve.errors import ConfigError, WorkloadError
from jaxserve.measure.workload.draws import Draws
from jaxserve.measure.workload.entry import Header, Prompt, Recipe, WorkloadEntry
from jaxserve.measure.workload.file import open_workload
from jaxserve.measure.workload.lengths import Lengths
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop, arrival_times
from jaxserve.measure.workload.traces import (
    Counts,
    Traced,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_sharegpt,
    read_vllm,
)

Format = Literal["azure", "mooncake", "burstgpt", "sharegpt", "vllm", "jaxserve"]
US_PER_S: Final = 10**6


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class _TraceFormat:
    """A reader, whether its files tell times, and whose layout it is: a file may be anybody's."""

    read: Callable[[BinaryIO, Path, Counts], Iterator[Traced]]
    has_times: bool
    layout: str


FORMATS: Final[Mapping[str, _TraceFormat]] = {
    "azure": _TraceFormat(read=read_azure, has_times=True, layout="Azure/AzurePublicDataset"),
    "mooncake": _TraceFormat(read=read_mooncake, has_times=True, layout="kvcache-ai/Mooncake"),
    "burstgpt": _TraceFormat(read=read_burstgpt, has_times=True, layout="HPMLL/BurstGPT"),
    "sharegpt": _TraceFormat(read=read_sharegpt, has_times=False, layout="ShareGPT"),
    "vllm": _TraceFormat(read=read_vllm, has_times=False, layout="vllm bench's custom data sets"),
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Filling:
    """What stands in for what a file does not tell.

    Attributes:
      arrivals: of a file without times; None is refused there, and needed nowhere else.
      output: lengths of outputs that are not told.
      count_tokens: of a text, by the tokenizer of the model that will be asked.
      drops_text: keep the lengths of prompts and not the prompts; needs `count_tokens`.
    """

    arrivals: OpenLoop | ClosedLoop | None = None
    output: Lengths | None = None
    count_tokens: Callable[[str], int] | None = None
    drops_text: bool = False
    seed: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Imported:
    """What came of a file.

    Attributes:
      counts: of what was dropped, by reason; full once the entries are through.
    """

    header: Header
    entries: Iterable[WorkloadEntry]
    counts: Counts


def import_trace(path: Path, format: str, filling: Filling) -> Imported:
    """Returns the workload of a trace; its first request comes at 0.

    Args:
      format: of `FORMATS`.

    Raises:
      ConfigError: something is missing that the file does not tell, or given though it does.
      WorkloadError: it cannot be read or has bad lines.
    """
    known = FORMATS[format]
    if known.has_times and filling.arrivals is not None:
        raise ConfigError(
            f"{format} has its own arrivals; leave --rate and --concurrency out, and change its "
            "times with `jaxserve workload scale --time`"
        )
    if not known.has_times and filling.arrivals is None:
        raise ConfigError(f"{format} has no arrivals; give --rate or --concurrency")
    if filling.drops_text and filling.count_tokens is None:
        raise ConfigError("--lengths-only needs the tokenizer that counts them; give --tokenizer")
    counts = Counts()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            found = list(known.read(file, path, counts))
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise WorkloadError(f"{path} holds no request with a prompt and an output")
    if known.has_times:
        found.sort(key=lambda traced: traced.at_us or 0)
    entries = tuple(_fill(found, filling))
    is_fixed = any(not isinstance(entry.prompt, Recipe) for entry in entries)
    closed = filling.arrivals if isinstance(filling.arrivals, ClosedLoop) else None
    header = Header(
        name=path.stem,
        arrivals="closed" if closed else "open",
        concurrency=closed.concurrency if closed else None,
        prompts="fixed" if is_fixed else "unique",
        seed=filling.seed,
        source=f"{path.name}, in the layout of {known.layout}",
        parameters={"format": format, "sha256": digest},
    )
    return Imported(header=header, entries=entries, counts=counts)


def import_workload(path: Path) -> Imported:
    """Returns what is there of a workload that was cut, changed or written by hand.

    Its entries may be in any order; the first comes at 0.

    Raises:
      WorkloadError: it is no workload, or has bad lines.
    """
    with open_workload(path, needs_end=False) as opened:
        found = sorted(opened.entries, key=lambda entry: entry.at_s)
    first_s = found[0].at_s if found else 0.0
    entries = tuple(
        dataclasses.replace(entry, index=index, at_s=round(entry.at_s - first_s, 6))
        for index, entry in enumerate(found)
    )
    return Imported(header=opened.header, entries=entries, counts=opened.counts)


def _fill(found: list[Traced], filling: Filling) -> Iterator[WorkloadEntry]:
    """Yields the entries, with times, lengths and prompts as far as anything tells them."""
    if filling.arrivals is None:
        first_us = found[0].at_us or 0
        times: Iterator[float] = (((one.at_us or 0) - first_us) / US_PER_S for one in found)
    else:
        times = arrival_times(filling.arrivals, filling.seed)
    outputs = Draws(filling.seed, "output")
    for index, (one, at_s) in enumerate(zip(found, times, strict=False)):
        yield WorkloadEntry(
            index=index,
            at_s=at_s,
            prompt=_fill_prompt(one.prompt, filling),
            prompt_class=one.prompt_class,
            wanted_tokens=_fill_output(one.output, index, filling, outputs),
            group=one.group,
        )


def _fill_prompt(prompt: Prompt, filling: Filling) -> Prompt:
    if filling.drops_text and filling.count_tokens is not None and isinstance(prompt, str):
        return Recipe(num_tokens=max(1, filling.count_tokens(prompt)))
    return prompt


def _fill_output(output: int | str | None, index: int, filling: Filling, draws: Draws) -> int:
    if isinstance(output, int):
        return output
    if isinstance(output, str) and filling.count_tokens is not None:
        return max(1, filling.count_tokens(output))
    if filling.output is not None:
        return filling.output.draw(draws)
    what = "its reply as a text" if isinstance(output, str) else "no output length"
    fix = (
        "--tokenizer counts it, or --output-tokens"
        if isinstance(output, str)
        else "--output-tokens"
    )
    raise ConfigError(f"request {index + 1} has {what}; {fix} sets the lengths")
