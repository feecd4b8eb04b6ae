"""The requests of a benchmark as JSON, a line each."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Literal, Self

from jaxserve.errors import ResultError
from jaxserve.measure.records import Arrival, RequestRecord, ServerPhases

REQUESTS_FILE: Final = "requests.jsonl"

_HINTS: Final = {
    kind: typing.get_type_hints(kind) for kind in (Arrival, ServerPhases, RequestRecord)
}


def tidy(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """Returns the value with floats to nine decimals: nanoseconds, and no noise of rounding."""
    match value:
        case float():
            return round(value, 9)
        case Mapping():
            return {key: tidy(part) for key, part in value.items()}
        case list() | tuple():
            return [tidy(part) for part in value]
    return value


class RequestWriter:
    """Writes requests as lines, as they end; a `with` block closes the file."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def write(self, record: RequestRecord, repeat: int | None) -> None:
        """Args:
        repeat: from 0; None of a warm-up.
        """
        line = {"repeat": repeat, **_record_facts(record)}
        self._file.write(json.dumps(tidy(line), separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def _record_facts(record: RequestRecord) -> dict[str, Any]:
    """Returns a record's fields; arrivals as pairs of time and tokens."""
    facts: dict[str, Any] = {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record)
    }
    facts["arrivals"] = [[arrival.time_s, arrival.num_tokens] for arrival in record.arrivals]
    facts["phases"] = dataclasses.asdict(record.phases)
    return facts


def read_records(path: Path) -> Iterator[tuple[int | None, RequestRecord]]:
    """Yields the repeat and the record of each line that `RequestWriter` wrote.

    Raises:
      ResultError: a line is something else, or a field of it is of another type.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                facts = json.loads(line)
                repeat = facts.pop("repeat")
                facts["arrivals"] = tuple(
                    _checked(Arrival(time_s=time_s, num_tokens=count))
                    for time_s, count in facts["arrivals"]
                )
                facts["phases"] = _checked(ServerPhases(**facts["phases"]))
                record = _checked(RequestRecord(**facts))
                if not _is_of(repeat, int | None):
                    raise TypeError("repeat")
            except (ValueError, TypeError, KeyError) as error:
                raise ResultError(f"{path}, line {number}: not a request of a replay") from error
            yield repeat, record


def _checked[T: (Arrival, ServerPhases, RequestRecord)](record: T) -> T:
    """Returns the record; raises TypeError where a field is of another type than it says."""
    for name, hint in _HINTS[type(record)].items():
        if not _is_of(getattr(record, name), hint):
            raise TypeError(name)
    return record


def _is_of(value: object, hint: object) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is types.UnionType:
        return any(_is_of(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple)
    return type(value) in ((int, float) if hint is float else (hint,))
