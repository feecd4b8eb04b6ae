"""What the clients saw of each call, and what the server's log says of it."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

Cut = Literal["", "cancelled", "killed", "late", "stalled"]
ID: Final = re.compile(r"(c\d+)(?:[-/]\d+)?")


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """One call as its client saw it.

    Attributes:
      id: the request's; of an HTTP call with several prompts and of Score the first part of each.
      method: the metrics' word: a method of gRPC or a route.
      kind: what the client did, for the table of them.
      num_requests: that it is in the engine.
      is_generating: refusals of it are requests refused.
      end: the server's code or status; empty where the client could not see one.
      cut: why it could not.
      reason: of an error that the server told, in lower case; also one inside a stream.
      finishes: reasons of the choices in the order they came; empty where it did not read them all.
      is_ordered: the last of these is the request's.
      usage: tokens of prompt and output, where the server told them.
      num_tokens: output tokens that were read.
    """

    id: str
    door: Literal["grpc", "http"]
    method: str
    tenant: str
    kind: str
    num_requests: int = 1
    is_generating: bool = True
    end: str = ""
    cut: Cut = ""
    reason: str = ""
    quota: str = ""
    finishes: list[str] = dataclasses.field(default_factory=list)
    is_ordered: bool = False
    usage: tuple[int, int] | None = None
    num_tokens: int = 0

    @property
    def is_done(self) -> bool:
        """The server said that it went well, to its end."""
        return self.end in ("OK", "200") and not self.reason


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Finished:
    """A line of the server's log: a request that was accepted has ended."""

    request_id: str
    tenant: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    was_scheduled: bool
    has_first_token: bool

    @property
    def has_prompt(self) -> bool:
        """Whether its prompt was computed."""
        is_scored = self.reason == "max_tokens" and not self.output_tokens
        return self.has_first_token or is_scored


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Failed:
    """A line of the server's log: a call that generates ended with an error."""

    request_id: str
    method: str
    code: str
    reason: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Log:
    """What the server wrote, from one place in its log on.

    Attributes:
      faults: lines that are errors, or nobody's.
    """

    finished: dict[str, list[Finished]]
    failed: dict[str, list[Failed]]
    faults: list[str]

    def all_finished(self) -> Iterable[Finished]:
        return (line for lines in self.finished.values() for line in lines)

    def all_failed(self) -> Iterable[Failed]:
        return (line for lines in self.failed.values() for line in lines)


def read_log(path: Path, *, first_byte: int) -> Log:
    """Reads the lines from a place in the log on, by the calls that they are of."""
    log = Log(
        finished=collections.defaultdict(list), failed=collections.defaultdict(list), faults=[]
    )
    with path.open("rb") as file:
        file.seek(first_byte)
        for line in file:
            try:
                _note(log, json.loads(line))
            except (ValueError, KeyError, TypeError):
                log.faults.append(line.decode("utf-8", "replace").strip())
    return log


def _note(log: Log, facts: Mapping[str, Any]) -> None:
    event = facts["event"]
    if facts["level"] in ("ERROR", "CRITICAL") or "exception" in facts:
        log.faults.append(json.dumps(facts))
    elif event == "finished":
        line = Finished(
            request_id=facts["request_id"],
            tenant=facts["tenant"],
            reason=facts["reason"],
            prompt_tokens=facts["prompt_tokens"],
            output_tokens=facts["output_tokens"],
            was_scheduled=facts["queue_s"] is not None,
            has_first_token=facts["ttft_s"] is not None,
        )
        log.finished[_call_of(line.request_id)].append(line)
    elif event == "failed":
        failed = Failed(
            request_id=facts["request_id"],
            method=facts["method"],
            code=facts["code"],
            reason=facts["reason"].lower(),
        )
        log.failed[_call_of(failed.request_id)].append(failed)


def _call_of(request_id: str) -> str:
    found = ID.fullmatch(request_id)
    return found.group(1) if found else request_id
