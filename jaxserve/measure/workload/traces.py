"""Traces of others as entries: lengths and arrivals, and prompts where a trace has them.

Columns and keys that a workload has no use for are not read. A request without a token of prompt or
output did nothing, or failed: it is dropped and counted.
"""

import collections
import csv
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload.entry import Prompt, Recipe
from jaxserve.measure.workload.lines import Lines, Problems
from jaxserve.measure.workload.values import (
    FieldError,
    number,
    parse_object,
    shorten,
    text,
    whole,
)

MOONCAKE_BLOCK_TOKENS: Final = 512
MAX_MS: Final = 1e12
US_PER_S: Final = 10**6

Counts = collections.Counter[str]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Traced:
    """A request as a trace has it.

    Attributes:
      at_us: on the trace's own clock; None where it tells no times.
      output: tokens, or the text of a reply whose tokens nobody has counted; None is not told.
    """

    at_us: int | None
    prompt: Prompt
    output: int | str | None
    prompt_class: str = ""
    group: str = ""


def read_azure(file: BinaryIO, path: Path, counts: Counts) -> Iterator[Traced]:
    """Reads Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens."""
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    yield from _read_csv(file, path, columns, counts, _read_azure_row)


def read_burstgpt(file: BinaryIO, path: Path, counts: Counts) -> Iterator[Traced]:
    """Reads BurstGPT: Timestamp (s), Request tokens, Response tokens, Session ID, Log Type."""
    columns = ("Timestamp", "Request tokens", "Response tokens")
    yield from _read_csv(file, path, columns, counts, _read_burstgpt_row)


def read_mooncake(file: BinaryIO, path: Path, counts: Counts) -> Iterator[Traced]:
    """Reads Mooncake's traces: timestamp (ms), input_length, output_length, hash_ids."""
    yield from _read_jsonl(file, path, counts, _read_mooncake_object)


def read_vllm(file: BinaryIO, path: Path, counts: Counts) -> Iterator[Traced]:
    """Reads the custom data set of vllm bench: prompt, and output_tokens where it has them."""
    yield from _read_jsonl(file, path, counts, _read_vllm_object)


def read_sharegpt(file: BinaryIO, path: Path, counts: Counts) -> Iterator[Traced]:
    """Reads ShareGPT: of each conversation the first message and the reply to it."""
    try:
        found = json.loads(file.read().decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, list):
        raise WorkloadError(f"{path} is {shorten(found)}, but ShareGPT is a list of conversations")
    problems = Problems(path, word="item")
    for place, item in enumerate(found, 1):
        try:
            traced = _read_conversation(item)
        except FieldError as error:
            problems.add(place, str(error))
            continue
        if traced is None:
            counts["no_reply"] += 1
        else:
            yield traced
    problems.raise_any()


def _read_azure_row(row: Mapping[str, str]) -> Traced:
    return Traced(
        at_us=_timestamp_us(row["TIMESTAMP"]),
        prompt=Recipe(num_tokens=_digits(row, "ContextTokens")),
        output=_digits(row, "GeneratedTokens"),
    )


def _read_burstgpt_row(row: Mapping[str, str]) -> Traced:
    try:
        at_s = float(row["Timestamp"])
    except ValueError:
        raise FieldError(f"Timestamp is {row['Timestamp']!r}, but must be seconds") from None
    return Traced(
        at_us=round(number(at_s, "Timestamp", low=0, high=MAX_MS) * US_PER_S),
        prompt=Recipe(num_tokens=_digits(row, "Request tokens")),
        output=_digits(row, "Response tokens"),
        prompt_class=row.get("Log Type") or "",
        group=row.get("Session ID") or "",
    )


def _read_mooncake_object(found: Mapping[str, Any]) -> Traced:
    at_ms = number(found.get("timestamp"), "timestamp", low=0, high=MAX_MS)
    num_tokens = whole(found.get("input_length"), "input_length")
    keys = found.get("hash_ids", [])
    if not isinstance(keys, list):
        raise FieldError(f"hash_ids is {shorten(keys)}, but must be a list of whole numbers")
    blocks = tuple(str(whole(key, "an id in hash_ids", high=1 << 63)) for key in keys)
    most = -(-num_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(blocks) > most:
        raise FieldError(
            f"hash_ids has {len(blocks)} ids, but input_length {num_tokens} is {most} blocks of "
            f"{MOONCAKE_BLOCK_TOKENS}"
        )
    block_tokens = MOONCAKE_BLOCK_TOKENS if blocks else 0
    return Traced(
        at_us=round(at_ms * 1000),
        prompt=Recipe(num_tokens=num_tokens, block_tokens=block_tokens, blocks=blocks),
        output=whole(found.get("output_length"), "output_length"),
    )


def _read_vllm_object(found: Mapping[str, Any]) -> Traced:
    if not found.get("prompt"):
        raise FieldError("prompt is missing or empty, but must be a text")
    output = found.get("output_tokens")
    return Traced(
        at_us=None,
        prompt=text(found, "prompt", ""),
        output=None if output is None else whole(output, "output_tokens"),
    )


def _read_conversation(item: object) -> Traced | None:
    """Returns None for a conversation without a first message and a reply."""
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list):
        raise FieldError(f'it is {shorten(item)}, but must be {{"conversations": [...]}}')
    if len(turns) < 2:
        return None
    values = []
    for turn in turns[:2]:
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise FieldError(f'a turn is {shorten(turn)}, but must be {{"from": …, "value": …}}')
        values.append(text(turn, "value", ""))
    if not all(values) or turns[0]["from"] not in ("human", "user"):
        return None
    return Traced(at_us=None, prompt=values[0], output=values[1])


def _read_jsonl(
    file: BinaryIO, path: Path, counts: Counts, read: Callable[[Mapping[str, Any]], Traced]
) -> Iterator[Traced]:
    problems = Problems(path)
    for line_number, line in Lines(file, path):
        try:
            traced = read(parse_object(line))
        except FieldError as error:
            problems.add(line_number, str(error))
            continue
        if _is_real(traced, counts):
            yield traced
    problems.raise_any()


def _read_csv(
    file: BinaryIO,
    path: Path,
    columns: tuple[str, ...],
    counts: Counts,
    read: Callable[[Mapping[str, str]], Traced],
) -> Iterator[Traced]:
    problems, lines = Problems(path), Lines(file, path)
    rows = csv.reader(_decode(lines, path), strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        missing = [name for name in columns if name not in names]
        if missing:
            raise WorkloadError(
                f"{path}, line 1: it has no column {missing[0]}, but must have {', '.join(columns)}"
            )
        for row in rows:
            if not row:
                continue
            try:
                if len(row) != len(names):
                    raise FieldError(
                        f"it has {len(row)} values, but there are {len(names)} columns"
                    )
                traced = read(dict(zip(names, row, strict=True)))
            except FieldError as error:
                problems.add(lines.number, str(error))
                continue
            if _is_real(traced, counts):
                yield traced
    except csv.Error as error:
        raise WorkloadError(f"{path}, line {lines.number}: it is not CSV: {error}") from error
    problems.raise_any()


def _is_real(traced: Traced, counts: Counts) -> bool:
    if isinstance(traced.prompt, Recipe) and traced.prompt.num_tokens == 0:
        counts["no_prompt"] += 1
        return False
    if traced.output == 0:
        counts["no_output"] += 1
        return False
    return True


def _decode(lines: Lines, path: Path) -> Iterator[str]:
    for line_number, line in lines:
        try:
            yield line.decode("utf-8-sig" if line_number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise WorkloadError(f"{path}, line {line_number}: it is not UTF-8") from None


def _digits(row: Mapping[str, str], name: str) -> int:
    word = row[name].strip()
    if not (word.isascii() and word.isdigit() and len(word) < 10):
        raise FieldError(f"{name} is {shorten(word)}, but must be a whole number")
    return int(word)


def _timestamp_us(word: str) -> int:
    """Returns microseconds since year 1; what has no time zone is UTC."""
    try:
        moment = datetime.datetime.fromisoformat(word.strip())
    except ValueError:
        raise FieldError(
            f"TIMESTAMP is {shorten(word)}, but must be a time as 2023-11-16 18:17:03.9799600"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    since = moment - datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(microseconds=1)
