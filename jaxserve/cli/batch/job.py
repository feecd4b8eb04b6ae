"""The loop of a batch: lines to requests, results to lines, in the order of the input."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from jaxserve.cli.batch.lines import Line, LineReader, RawLine
from jaxserve.cli.batch.output import DoneLine
from jaxserve.cli.batch.progress import Counts
from jaxserve.cli.batch.replies import build_line
from jaxserve.engine import Completion
from jaxserve.errors import BatchError, RequestError
from jaxserve.llm import LLM
from jaxserve.request import GenerationRequest


class Sink(Protocol):
    """Where lines go: a file that can be resumed, or stdout."""

    def append(self, line: bytes) -> None: ...


class StandardOutput:
    """Lines on stdout, each as soon as it is there."""

    def append(self, line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def read_lines(
    raws: Iterable[RawLine], reader: LineReader, done: Sequence[DoneLine]
) -> Iterator[Line]:
    """Yields the lines behind those that are done.

    Raises:
      BatchError: what is done are other lines than these.
    """
    num_seen = 0
    for num_seen, raw in enumerate(raws, start=1):
        if num_seen > len(done):
            yield reader.read(raw)
        elif reader.skip(raw) != done[num_seen - 1].custom_id:
            raise BatchError(
                f"line {num_seen} of the .partial file is not the answer to line {raw.number} of "
                "the input; start over with --overwrite"
            )
    if num_seen < len(done):
        raise BatchError(
            f"the .partial file has {len(done)} lines, but the input only {num_seen}; start over "
            "with --overwrite"
        )


def run_lines(
    lines: Iterable[Line],
    llm: LLM,
    sink: Sink,
    *,
    counts: Counts,
    on_line: Callable[[], None],
    clock: Callable[[], float] = time.time,
) -> None:
    """Answers the lines and writes the answers in their order.

    Args:
      counts: kept up to date, also when this is left by an error.
      on_line: called after each line that was written.
    """
    waiting: collections.deque[Line] = collections.deque()

    def draw() -> Iterator[GenerationRequest | RequestError]:
        for line in lines:
            waiting.append(line)
            yield from line.requests()

    found: list[Completion | RequestError] = []
    with contextlib.closing(llm.generate_each(draw())) as results:
        for result in results:
            found.append(result)
            if len(found) < waiting[0].num_requests:
                continue
            line = waiting.popleft()
            content, has_failed = build_line(line, found, engine=llm.engine, created_s=clock())
            sink.append(content)
            counts.num_lines += 1
            counts.num_failed += has_failed
            counts.num_tokens += sum(
                done.usage.completion_tokens for done in found if isinstance(done, Completion)
            )
            found.clear()
            on_line()
