"""The replay: each request at its intended time, whatever happens, and a record of what came.

One clock counts, the running event loop's (`loop.time()`, monotonic): steps of the wall clock do
not matter, and under a loop of virtual time every figure is exact.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Final

from jaxserve.measure.records import Arrival, Outcome, RequestRecord
from jaxserve.measure.targets.base import Ask, End, Levels, Message, Target, TargetError

TIMEOUT_S: Final = 600.0
SAMPLE_INTERVAL_S: Final = 1.0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TimelineSample:
    """The replay and the server at one moment.

    Attributes:
      time_s: since the replay's start.
      in_flight: requests sent and not ended.
      output_tokens: that came until now.
    """

    time_s: float
    in_flight: int
    output_tokens: int
    levels: Levels


@dataclasses.dataclass(slots=True, kw_only=True)
class Replay:
    """One replay of requests against a target.

    In an open loop requests are sent at their times, whether or not earlier ones have ended, and
    latencies count from those times: a server that stalls, or a client that is late, shortens
    nobody's latency (no coordinated omission). In a closed loop a request's intended time is when
    the one before it ended, so waiting for the server is in no latency.

    Attributes:
      asks: drawn one by one, each just ahead of its time.
      on_record: called with each request that ended, in the order of the ends.
      concurrency: of a closed loop; None is an open one.
      timeout_s: the client's own limit of a request, from its intended time.
      max_drain_s: what still runs so long after the last send is cancelled; None waits for all.
      num_tokens: output tokens that were read, as far as messages tell them.
    """

    target: Target
    asks: Iterator[Ask]
    on_record: Callable[[RequestRecord], None]
    concurrency: int | None = None
    timeout_s: float = TIMEOUT_S
    max_drain_s: float | None = None
    timeline: list[TimelineSample] = dataclasses.field(default_factory=list)
    num_sent: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    _start_s: float = math.nan
    _tasks: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    _is_cut: bool = False

    async def run(self) -> None:
        """Sends everything; returns when every request has ended.

        Raises:
          JaxserveError: a request cannot be made or sent at all; those in flight are given up.
        """
        loop = asyncio.get_running_loop()
        first = next(self.asks, None)
        self._start_s = loop.time()
        try:
            async with self._sampling(), asyncio.TaskGroup() as group:
                if self.concurrency is None:
                    await self._send_open(first, group)
                else:
                    self._send_closed(first, group)
        except BaseExceptionGroup as errors:  # one that cannot be sent; it cancelled the others
            raise errors.exceptions[0] from None

    def now(self) -> float:
        """Returns seconds since the replay's start."""
        return asyncio.get_running_loop().time() - self._start_s

    async def _send_open(self, first: Ask | None, group: asyncio.TaskGroup) -> None:
        ask = first
        while ask is not None:
            # also where it is late: those in flight must be read, and a late one is sent anyway
            await asyncio.sleep(max(0.0, ask.at_s - self.now()))
            self._start(group, self._send(ask, ask.at_s))
            ask = next(self.asks, None)
        self._cut_later()

    def _send_closed(self, first: Ask | None, group: asyncio.TaskGroup) -> None:
        assert self.concurrency is not None
        asks = itertools.chain(() if first is None else (first,), self.asks)
        for _ in range(self.concurrency):
            self._start(group, self._send_in_turn(asks))

    async def _send_in_turn(self, asks: Iterator[Ask]) -> None:
        for ask in asks:
            await self._send(ask, self.now())
        self._cut_later()

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[None, None, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cut_later(self) -> None:
        """The last request is sent: what still runs has a while."""
        if self.max_drain_s is not None:
            asyncio.get_running_loop().call_later(self.max_drain_s, self._cut)

    def _cut(self) -> None:
        self._is_cut = True
        for task in self._tasks:
            task.cancel()

    async def _send(self, ask: Ask, intended_s: float) -> None:
        """Sends one request, reads it to its end, and hands its record over."""
        left_s = None if ask.deadline_s is None else intended_s + ask.deadline_s - self.now()
        limit_s = min(self.timeout_s, math.inf if ask.deadline_s is None else ask.deadline_s)
        found = _Found(sent_s=self.now())
        self.num_sent += 1
        try:
            async with asyncio.timeout_at(self._start_s + intended_s + limit_s):
                async with contextlib.aclosing(self.target.stream(ask, left_s=left_s)) as events:
                    async for event in events:
                        self._take(event, found)
        except TimeoutError:
            found.outcome, found.error = "timed_out", f"not done {limit_s:g} s after its time"
        except TargetError as error:
            found.outcome, found.error = error.outcome, str(error)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            found.outcome, found.error = "cancelled", "the replay was over"
        self.num_ended += 1
        self.on_record(found.build_record(ask, intended_s, end_s=self.now()))

    def _take(self, event: Message | End, found: "_Found") -> None:
        if isinstance(event, End):
            found.end = event
            return
        found.times_s.append(self.now())
        found.messages.append(event)
        self.num_tokens += event.num_tokens or 0

    @contextlib.asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        """Fills the timeline while the block runs."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _sample(self) -> None:
        """Looks every second; a server that answers slowly is looked at less often."""
        while True:
            since_s = self.now()
            levels = await self.target.read_levels()
            sample = TimelineSample(
                time_s=since_s,
                in_flight=self.num_sent - self.num_ended,
                output_tokens=self.num_tokens,
                levels=levels,
            )
            self.timeline.append(sample)
            rest_s = SAMPLE_INTERVAL_S - (self.now() % SAMPLE_INTERVAL_S)
            await asyncio.sleep(rest_s)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Found:
    """What came of a request so far."""

    sent_s: float
    times_s: list[float] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    end: End | None = None
    outcome: Outcome | None = None
    error: str = ""

    def build_record(self, ask: Ask, intended_s: float, *, end_s: float) -> RequestRecord:
        end = self.end or End(finish_reason="")
        counts, are_assumed = count_tokens(self.messages, end.output_tokens)
        num_tokens = sum(counts) if end.output_tokens is None else end.output_tokens
        outcome, error = self.outcome, self.error
        if outcome is None:
            outcome, error = self._judge(ask, num_tokens)
        return RequestRecord(
            index=ask.index,
            request_id=ask.request_id,
            prompt_class=ask.prompt_class,
            intended_s=intended_s,
            sent_s=self.sent_s,
            arrivals=tuple(
                Arrival(time_s=time_s, num_tokens=count)
                for time_s, count in zip(self.times_s, counts, strict=True)
            ),
            end_s=end_s,
            outcome=outcome,
            prompt_tokens=end.prompt_tokens,
            output_tokens=end.output_tokens,
            cached_prompt_tokens=end.cached_prompt_tokens,
            wanted_tokens=ask.wanted_tokens,
            deadline_s=ask.deadline_s,
            finish_reason=end.finish_reason,
            error=error,
            phases=end.phases,
            is_warm_up=ask.is_warm_up,
            are_tokens_assumed=are_assumed,
        )

    def _judge(self, ask: Ask, num_tokens: int) -> tuple[Outcome, str]:
        """Returns the outcome of a stream that ended without an error."""
        if self.end is None:
            return "failed", "the stream stopped without saying that it was the end"
        if self.end.is_late:
            return "timed_out", "the server cut it at its deadline"
        wanted = max(1, ask.wanted_tokens or 1)
        return ("ok", "") if num_tokens >= wanted else ("short", "")


def count_tokens(messages: Sequence[Message], total: int | None) -> tuple[list[int], bool]:
    """Returns the tokens of each message, and whether they had to be assumed.

    Where the server tells them by message, they are taken. Else its total is spread evenly over the
    messages with text (over all, where there are tokens enough), earlier ones getting the odd ones;
    without a total, each message with text is one.
    """
    told = [message.num_tokens for message in messages if message.num_tokens is not None]
    if len(told) == len(messages):
        return told, False
    places = [place for place, message in enumerate(messages) if message.has_text]
    is_known = total is not None
    if total is None:
        total = len(places)
    elif total >= len(messages):
        places = list(range(len(messages)))
    counts = [0] * len(messages)
    if places:
        each, rest = divmod(total, len(places))
        for order, place in enumerate(places):
            counts[place] = each + (order < rest)
    is_certain = is_known and counts == [1] * len(messages)  # nothing was to be chosen
    return counts, not is_certain
