"""What all clients share: the server's address, keys, their records, and the golden outputs."""

import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Final

import grpc

from scripts.judges.load.asks import Ask
from scripts.judges.load.books import Call
from scripts.judges.load.wire import ClosedError

# What a reply that is not as it should be, or none, raises in those who read it.
FAULTS: Final = (
    AssertionError, ValueError, LookupError, TypeError, OSError, ClosedError, grpc.RpcError,
)  # fmt: skip


@dataclasses.dataclass(slots=True, kw_only=True)
class Crowd:
    """Attributes:
    keys: by tenant; the one of "" is nobody's.
    mean_tokens: of an output.
    golden: token ids of the fixed requests, once they are known.
    faults: what no client may see, in words.
    num_golden: outputs of fixed requests that were compared.
    differing: those that were others than alone, in words.
    num_open: calls that are open now.
    levels: calls that were open, each time that somebody looked.
    """

    target: str
    http: tuple[str, int]
    keys: dict[str, str]
    model: str
    mean_tokens: int
    rng: random.Random
    golden: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    num_golden: int = 0
    differing: list[str] = dataclasses.field(default_factory=list)
    num_open: int = 0
    levels: list[int] = dataclasses.field(default_factory=list)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def next_id(self) -> str:
        return f"c{next(self._numbers):07d}"

    @contextlib.contextmanager
    def recording(self, call: Call) -> Iterator[Call]:
        """Keeps the record of a call; an error that leaves the block is a fault of the server."""
        self.num_open += 1
        try:
            yield call
        except FAULTS as error:
            self.fault(call, f"{type(error).__name__}: {error}")
        finally:
            self.num_open -= 1
            self.calls.append(call)

    def fault(self, call: Call, what: str) -> None:
        self.faults.append(f"{call.id} {call.kind} {call.method}: {what}")

    def check_output(self, call: Call, ask: Ask, token_ids: list[int], *, is_whole: bool) -> None:
        """Compares a golden request's output, or the part of it that came."""
        wanted = None if ask.golden is None else self.golden.get(ask.golden)
        if wanted is None:
            return
        if not is_whole:
            wanted = wanted[: len(token_ids)]
        self.num_golden += 1
        if token_ids != wanted:
            self.differing.append(f"{call.id}: request {ask.golden} gave {token_ids}, not {wanted}")

    def kinds(self) -> collections.Counter[str]:
        return collections.Counter(f"{call.door} {call.kind}" for call in self.calls)
