"""Time that passes only when everybody waits, and a server that does what a script says in it."""

import asyncio
import dataclasses
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import Replay
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import Ask, End, Levels, Message, TargetFacts

EPOCH_S = 50_000.0  # no clock begins at 0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self.now_s = EPOCH_S

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for something that no timer brings"
        found = super().select(0)
        if not found and timeout > 0:
            self._loop.now_s += timeout
        return found


def run_virtual[T](work: Awaitable[T]) -> T:
    """Returns the result of a coroutine that lived in virtual time."""

    async def wrapped() -> T:
        return await work

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(wrapped())


HANG = "hang"
Step = tuple[float, Message | End | JaxserveError | str]


def tokens(num_tokens: int | None, text: str = "x") -> Message:
    return Message(num_tokens=num_tokens, has_text=bool(text))


@dataclasses.dataclass(slots=True)
class ScriptedTarget:
    """A server that answers each request by its script: what comes, so long after the send.

    Attributes:
      scripts: by the request's index.
      free_s: of a server that does one request at a time, when it is free again; None is one
        that does all at once.
      closed: indices of requests that were given up.
    """

    scripts: Mapping[int, Sequence[Step]]
    free_s: float | None = None
    asked: list[tuple[Ask, float | None]] = dataclasses.field(default_factory=list)
    closed: list[int] = dataclasses.field(default_factory=list)
    levels: Callable[[], Levels] = Levels

    async def describe(self) -> TargetFacts:
        return TargetFacts(backend="script", vocab_size=100)

    async def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        loop = asyncio.get_running_loop()
        self.asked.append((ask, left_s))
        start_s = loop.time()
        script = self.scripts[ask.index]
        if self.free_s is not None:
            start_s = max(start_s, EPOCH_S + self.free_s)
            self.free_s = start_s - EPOCH_S + max(at_s for at_s, _ in script)
        has_ended = False
        try:
            for at_s, what in script:
                await asyncio.sleep(start_s + at_s - loop.time())
                match what:
                    case JaxserveError():
                        raise what
                    case Message():
                        yield what
                    case End():
                        has_ended = True
                        yield what
                    case _:
                        await asyncio.sleep(1e6)
        finally:
            if not has_ended:
                self.closed.append(ask.index)

    async def read_metrics(self) -> Snapshot | None:
        return None

    async def read_levels(self) -> Levels:
        return self.levels()

    async def close(self) -> None:
        return None


def end(num_tokens: int | None, **facts: Any) -> End:  # noqa: ANN401  # fields of the end
    return End(finish_reason="max_tokens", prompt_tokens=7, output_tokens=num_tokens, **facts)


def build_ask(index: int, at_s: float = 0.0, **facts: Any) -> Ask:  # noqa: ANN401  # fields
    return Ask(index=index, request_id=f"r{index}", at_s=at_s, prompt=(1, 2), **facts)


def replay(
    target: ScriptedTarget,
    asks: Iterable[Ask],
    **options: Any,  # noqa: ANN401  # fields of the replay
) -> tuple[dict[int, RequestRecord], Replay]:
    """Returns the records by index, and the replay that is over."""
    records: dict[int, RequestRecord] = {}
    on_record = options.pop("on_record", lambda record: None)

    def take(record: RequestRecord) -> None:
        assert record.index not in records
        records[record.index] = record
        on_record(record)

    run = Replay(target=target, asks=iter(asks), on_record=take, **options)
    run_virtual(run.run())
    return records, run
