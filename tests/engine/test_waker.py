"""Whose turn it is to be woken: in virtual time, with tasks of a real event loop."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.engine import waker as waker_module
from jaxserve.engine.events import ChoiceFinished, Delta, Event
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.stream import Stream
from jaxserve.engine.waker import MAX_HOLD_S, MAX_WAKES, MIN_WAKES, Waiter, Waker
from jaxserve.errors import JaxserveError, NumericsError
from jaxserve.metrics import Metrics
from jaxserve.request import FinishReason
from tests.engine.test_stream import FINISHED
from tests.engine.turns import num_in_turn

STEP_S = MAX_HOLD_S / 4  # four steps fit into what may be waited


class Loop(asyncio.SelectorEventLoop):
    """Does at once what another thread calls, and counts it."""

    num_calls = 0

    def call_soon_threadsafe(  # type: ignore[override]  # gives no handle: nobody takes one
        self, callback: Callable[..., object], *arguments: object, context: object = None
    ) -> None:
        self.num_calls += 1
        callback(*arguments)


@contextlib.contextmanager
def open_loop() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


def waiters_of(loop: Loop, number: int) -> list[Waiter]:
    return [Waiter(loop, loop.create_future()) for _ in range(number)]


def woken(waiters: list[Waiter]) -> list[int]:
    return [place for place, waiter in enumerate(waiters) if waiter.future.done()]


def test_each_of_four_times_as_many_is_woken_once_in_four_steps_and_the_first_first() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 4 * MAX_WAKES)
        for waiter in waiters:
            waker.join(waiter)
        for step in range(1, 5):
            left = waker.flush_turns(step * STEP_S)
            assert woken(waiters) == list(range(step * MAX_WAKES))
            assert left == (4 - step) * MAX_WAKES
        assert loop.num_calls == 4


def test_who_comes_back_is_behind_those_that_wait() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        first, second = waiters_of(loop, MAX_WAKES), waiters_of(loop, MAX_WAKES)
        for waiter in (*first, *second):
            waker.join(waiter)
        waker.flush_turns(STEP_S)
        again = waiters_of(loop, MAX_WAKES)
        for waiter in again:
            waker.join(waiter)
        waker.flush_turns(2 * STEP_S)
        assert (len(woken(second)), woken(again)) == (MAX_WAKES, [])


@pytest.mark.parametrize("step_s", [STEP_S, 10.0])
def test_as_many_as_have_a_turn_in_a_step_are_never_left(step_s: float) -> None:
    with open_loop() as loop:
        waker = Waker()
        for step in range(5):
            waiters = waiters_of(loop, MAX_WAKES)
            for waiter in waiters:
                waker.join(waiter)
            assert waker.flush_turns(step * step_s) == 0
            assert len(woken(waiters)) == MAX_WAKES


def test_with_steps_longer_than_the_bound_all_are_woken_in_each() -> None:
    with open_loop() as loop:
        waker = Waker()
        step_s = 1.01 * MAX_HOLD_S
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 5 * MAX_WAKES)
        for waiter in waiters:
            waker.join(waiter)
        assert waker.flush_turns(step_s) == 0
        assert len(woken(waiters)) == 5 * MAX_WAKES


def test_who_would_wait_too_long_by_the_next_step_is_woken_beyond_the_number() -> None:
    with open_loop() as loop:
        waker = Waker()
        step_s = 0.4 * MAX_HOLD_S
        waker.flush_turns(0.0)
        early, late = waiters_of(loop, 5 * MAX_WAKES), waiters_of(loop, 5 * MAX_WAKES)
        for step, waiters in ((1, early), (2, late)):
            for waiter in waiters:
                waker.join(waiter)
            waker.flush_turns(step * step_s)
        assert (len(woken(early)), woken(late)) == (2 * MAX_WAKES, [])
        waker.flush_turns(3 * step_s)
        assert (len(woken(early)), woken(late)) == (5 * MAX_WAKES, [])


@pytest.mark.parametrize(("number", "step_s", "is_crowded"), [
    (MAX_WAKES, STEP_S, False), (MAX_WAKES + 1, STEP_S, True), (MAX_WAKES + 1, 1.0, False)
])  # fmt: skip
def test_it_is_crowded_while_more_want_a_turn_than_a_short_step_has(
    number: int, step_s: float, is_crowded: bool
) -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        for waiter in waiters_of(loop, number):
            waker.join(waiter)
        waker.flush_turns(step_s)
        assert waker.is_crowded is is_crowded
        waker.flush()
        assert not waker.is_crowded


def _num_woken(waker: Waker, loop: Loop, *, now_s: float, is_late: bool) -> int:
    """Of more than have a turn; nobody is left waiting."""
    waiters = waiters_of(loop, 2 * MAX_WAKES)
    for waiter in waiters:
        waker.join(waiter)
    waker.flush_turns(now_s, is_late=is_late)
    number = len(woken(waiters))
    waker.flush()
    return number


def test_there_are_fewer_turns_while_the_host_is_late_and_more_again_behind_it() -> None:
    with open_loop() as loop:
        waker = Waker()
        numbers = [
            _num_woken(waker, loop, now_s=step * STEP_S, is_late=step < 50) for step in range(150)
        ]
        assert numbers[0] == 2 * MAX_WAKES  # of no step before it: as long as any may be
        assert numbers[1:4] == [MAX_WAKES - 8, MAX_WAKES - 12, MAX_WAKES - 16]
        assert numbers[49] == MIN_WAKES
        assert numbers[50:53] == [MIN_WAKES + 1, MIN_WAKES + 2, MIN_WAKES + 3]
        assert numbers[149] == MAX_WAKES


def test_one_late_step_in_five_takes_no_turns_for_good() -> None:
    with open_loop() as loop:
        waker = Waker()
        for step in range(1, 200):
            number = _num_woken(waker, loop, now_s=step * STEP_S, is_late=step % 5 == 0)
        assert number >= MAX_WAKES - 4


def test_nobody_waits_longer_where_the_host_is_late() -> None:
    with open_loop() as loop:
        waker = Waker()
        for step in range(50):
            _num_woken(waker, loop, now_s=step * STEP_S, is_late=True)
        waiters = waiters_of(loop, 5 * MAX_WAKES)
        for waiter in waiters:
            waker.join(waiter)
        first_s = 50 * STEP_S
        for step in range(4):
            waker.flush_turns(first_s + step * STEP_S, is_late=True)
        assert len(woken(waiters)) == 4 * MIN_WAKES
        waker.flush_turns(first_s + 4 * STEP_S, is_late=True)
        assert len(woken(waiters)) == 5 * MAX_WAKES


def test_it_stays_crowded_where_all_are_overdue_together() -> None:
    with open_loop() as loop:
        waker = Waker()
        step_s = 0.9 * MAX_HOLD_S
        waker.flush_turns(0.0)
        for waiter in waiters_of(loop, 3 * MAX_WAKES):
            waker.join(waiter)
        waker.flush_turns(step_s)
        assert waker.flush_turns(2 * step_s) == 0
        assert waker.is_crowded
        waker.flush_turns(3 * step_s)
        assert not waker.is_crowded


def test_who_is_due_is_woken_at_once_and_takes_nobodys_turn() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 2 * MAX_WAKES)
        for waiter in waiters:
            waker.join(waiter)
        waker.wake(waiters[-1])  # its end has come
        waker.flush_due()
        assert woken(waiters) == [2 * MAX_WAKES - 1]
        assert waker.flush_turns(STEP_S) == MAX_WAKES - 1
        assert woken(waiters) == [*range(MAX_WAKES), 2 * MAX_WAKES - 1]


def test_who_has_gone_takes_nobodys_turn() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, MAX_WAKES + 2)
        for waiter in waiters:
            waker.join(waiter)
        for waiter in waiters[:2]:
            waiter.future.cancel()
        assert waker.flush_turns(STEP_S) == 0


def test_all_are_woken_where_nothing_more_comes() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 3 * MAX_WAKES)
        for waiter in waiters:
            waker.join(waiter)
        waker.flush()
        assert (len(woken(waiters)), num_in_turn(waker)) == (3 * MAX_WAKES, 0)


@pytest.mark.asyncio
async def test_who_is_behind_waits_for_its_turn_too_and_for_no_start_or_end() -> None:
    waker = Waker()
    streams = [build_stream(waker) for _ in range(2)]
    got: list[list[int]] = [[] for _ in streams]
    gate = asyncio.Event()

    async def read(place: int) -> None:
        async for event in streams[place]:
            if isinstance(event, Delta):
                got[place].append(len(event.token_ids))
            await gate.wait()

    async def step(now_s: float) -> int:
        left = waker.flush_turns(now_s)
        for _ in range(5):
            await asyncio.sleep(0)
        return left

    tasks = [asyncio.create_task(read(place)) for place in range(2)]
    for stream in streams:
        stream.start()
        stream.put(1, now_s=0.0, text="")
    await step(0.0)  # each has its start, and is held up by its client
    waker.is_crowded = True
    gate.set()
    await step(STEP_S)
    assert got == [[1], [1]]  # the first output waits for nobody
    gate.clear()
    for stream in streams:
        stream.put(2, now_s=STEP_S, text="")
    await step(2 * STEP_S)
    assert got == [[1, 1], [1, 1]]
    for stream in streams:
        stream.put(3, now_s=2 * STEP_S, text="")
    waker.is_crowded = True
    gate.set()
    await asyncio.sleep(0)
    assert got == [[1, 1], [1, 1]]  # what is there waits for a turn
    streams[0].put(4, now_s=2 * STEP_S, text="")
    streams[0].finish(FINISHED)
    waker.flush_due()
    for _ in range(5):
        await asyncio.sleep(0)
    assert got == [[1, 1, 2], [1, 1]]
    assert await step(3 * STEP_S) == 0
    assert got == [[1, 1, 2], [1, 1, 1]]
    streams[1].finish(FINISHED)
    waker.flush_due()
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_a_turn_is_for_all_choices_that_have_something() -> None:
    waker = Waker()
    stream = build_stream(waker)
    got: list[int] = []

    async def read() -> None:
        async for event in stream:
            if isinstance(event, Delta):
                got.append(event.index)  # noqa: PERF401  # looked at meanwhile

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.start()
    for number in range(3):
        for index in range(2):
            stream.put(number, now_s=number * STEP_S, text="", index=index)
        waker.flush_turns(number * STEP_S)
        waker.is_crowded = True
        for _ in range(5):
            await asyncio.sleep(0)
        assert got == [0, 1] * (number + 1)
    stream.finish(FINISHED)
    waker.flush()
    await task


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(5))
async def test_readers_that_fall_behind_get_all_in_as_many_messages_as_there_are_turns(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker_module, "MAX_WAKES", 3)
    chance = random.Random(seed)
    waker = Waker()
    streams = [build_stream(waker) for _ in range(10)]
    got: list[list[int]] = [[] for _ in streams]
    num_steps = 60

    async def read(place: int) -> None:
        async for event in streams[place]:
            if isinstance(event, Delta):
                got[place] += event.token_ids
                messages.append(place)
            for _ in range(chance.randint(0, 8)):
                await asyncio.sleep(0)

    messages: list[int] = []
    tasks = [asyncio.create_task(read(place)) for place in range(len(streams))]
    for stream in streams:
        stream.start()
    for number in range(num_steps):
        for stream in streams:
            stream.put(number, now_s=number * STEP_S, text="")
        waker.flush_turns(number * STEP_S)
        for _ in range(chance.randint(0, 12)):
            await asyncio.sleep(0)
    assert len(messages) <= 4 * num_steps  # some are overdue; without turns 7 a step
    assert all(got)
    for stream in streams:
        stream.finish(FINISHED)
    waker.flush()
    await asyncio.gather(*tasks)
    assert got == [list(range(num_steps))] * len(streams)
    assert num_in_turn(waker) == 0


def build_stream(waker: Waker) -> Stream:
    return Stream(
        request_id="a",
        prompt_tokens=1,
        max_bytes=1 << 20,
        decoders=[None, None],
        waker=waker,
        on_cancel=lambda: None,
        reader=ReaderAccount(Metrics(), lambda: 0.0, times_decoding=False),
    )


def test_each_event_loop_has_its_own_and_turns_are_of_all_together() -> None:
    with open_loop() as one, open_loop() as other:
        waker = Waker()
        waker.flush_turns(0.0)
        pairs = [(waiters_of(one, 1)[0], waiters_of(other, 1)[0]) for _ in range(MAX_WAKES)]
        for waiter in (waiter for pair in pairs for waiter in pair):
            waker.join(waiter)
        waker.flush_turns(STEP_S)
        for side in zip(*pairs, strict=True):
            assert woken(list(side)) == list(range(MAX_WAKES // 2))
        assert (one.num_calls, other.num_calls) == (1, 1)


@dataclasses.dataclass(slots=True, eq=False)
class Case:
    """A stream, its reader, and what both should be.

    Attributes:
      put: tokens that were put, and not taken back by nobody.
      since_s: when there was first something for the waiting reader; None while it has all.
      looked_s: the first step since then.
      is_due: woken by the next flush of any kind.
    """

    stream: Stream
    events: list[Event]
    reader: asyncio.Task[None]
    put: list[int] = dataclasses.field(default_factory=list)
    since_s: float | None = None
    looked_s: float | None = None
    is_due: bool = False
    has_ended: bool = False
    has_left: bool = False

    @property
    def got(self) -> list[int]:
        """Tokens of both choices, whose order among each other is nobody's matter."""
        deltas = [event for event in self.events if isinstance(event, Delta)]
        return sorted(token_id for delta in deltas for token_id in delta.token_ids)

    @property
    def is_gone(self) -> bool:
        return self.has_ended or self.has_left


class Deliveries(RuleBasedStateMachine):
    """Streams whose readers always read on, against a list of who waits since when."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(waker_module, "MAX_WAKES", 2)
        self.loop = asyncio.new_event_loop()
        self.waker = Waker()
        self.now_s = self.turn_s = 0.0
        self.waker.flush_turns(0.0)
        self.cases: list[Case] = []

    def teardown(self) -> None:
        try:
            for case in self.live:
                case.stream.finish(FINISHED)
            self.waker.flush()
            self.turn()
            assert all(case.reader.done() for case in self.cases)
        finally:
            self.loop.close()
            self.patch.undo()

    @property
    def live(self) -> list[Case]:
        return [case for case in self.cases if not case.is_gone]

    def turn(self) -> None:
        """Lets the readers do all that they can."""

        async def pause() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pause())

    def pick(self, place: int) -> Case:
        return self.live[place % len(self.live)]

    def check_woken(self, wanted: list[Case]) -> None:
        """Those have all that was put; all others have what they had."""
        before = {id(case): len(case.events) for case in self.cases}
        self.turn()
        for case in self.cases:
            if case in wanted:
                assert case.got == case.put
                case.since_s, case.looked_s, case.is_due = None, None, False
            else:
                assert len(case.events) == before[id(case)]

    @initialize()
    def begin(self) -> None:
        for _ in range(4):
            self.open()

    @rule()
    def open(self) -> None:
        events: list[Event] = []
        stream = build_stream(self.waker)

        async def read() -> None:
            with contextlib.suppress(JaxserveError):
                async for event in stream:
                    events.append(event)  # noqa: PERF401  # those before an error too

        self.cases.append(Case(stream, events, self.loop.create_task(read())))
        self.turn()

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 9), index=st.integers(0, 1), count=st.integers(1, 8))
    def put(self, place: int, index: int, count: int) -> None:
        for number in range(min(count, len(self.live))):
            self.put_one(self.pick(place + number), index)

    def put_one(self, case: Case, index: int) -> None:
        if not case.put:
            case.stream.start()
            case.is_due = True
        assert case.stream.put(len(case.put), now_s=self.now_s, text="", index=index)
        case.put.append(len(case.put))
        if case.since_s is None:
            case.since_s = self.now_s

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 9), how=st.sampled_from(["end", "error", "give up", "leave"]))
    def end(self, place: int, how: str) -> None:
        case = self.pick(place)
        match how:
            case "end":
                case.stream.finish_choice(
                    ChoiceFinished(index=1, reason=FinishReason.EOS, matched_stop=None)
                )
                case.stream.finish(FINISHED)
            case "error":
                case.stream.finish(NumericsError("not finite"))
            case "give up":
                case.stream.give_up(NumericsError("too slow"))
                case.put = case.got  # the rest is forgotten
            case "leave":
                self.leave(case)
                return
        case.has_ended = case.is_due = True

    def leave(self, case: Case) -> None:
        """The reader goes; the engine hears of it, and ends the request."""
        case.reader.cancel()
        self.turn()
        case.stream.finish(FINISHED)
        case.has_left, case.since_s, case.looked_s, case.is_due = True, None, None, False

    @rule(millis=st.integers(1, 30))
    def step(self, millis: int) -> None:
        self.now_s += 1e-3 * millis
        step_s, self.turn_s = self.now_s - self.turn_s, self.now_s
        due = [case for case in self.cases if case.is_due]
        in_turn = [case for case in self.cases if case.since_s is not None and not case.is_due]
        in_turn.sort(key=lambda case: (case.since_s, self.cases.index(case)))
        for case in in_turn:
            case.looked_s = self.now_s if case.looked_s is None else case.looked_s
        left = self.waker.flush_turns(self.now_s)
        before = {id(case): len(case.events) for case in in_turn}
        self.turn()
        served = [case for case in in_turn if len(case.events) > before[id(case)]]
        assert left == len(in_turn) - len(served)
        for case in (*due, *served):
            assert case.got == case.put
            case.since_s, case.looked_s, case.is_due = None, None, False
        waiting = [case for case in in_turn if case not in served]
        for case in waiting:
            assert case.since_s is not None
            assert case.looked_s is not None
            assert self.now_s + step_s - case.looked_s <= MAX_HOLD_S + 1e-9
            assert len(served) >= 2
            assert all(other.since_s is None or other.since_s <= case.since_s for other in served)

    @rule()
    def flush_due(self) -> None:
        self.waker.flush_due()
        self.check_woken([case for case in self.cases if case.is_due])

    @rule()
    def flush(self) -> None:
        """Nothing runs any more."""
        self.waker.flush()
        self.check_woken([case for case in self.cases if case.since_s is not None or case.is_due])
        assert num_in_turn(self.waker) == 0

    @invariant()
    def nobody_waits_for_a_turn_but_who_reads(self) -> None:
        waiting = [c for c in self.live if c.since_s is not None and not c.is_due]
        assert num_in_turn(self.waker) == len(waiting)


def test_nobody_is_forgotten_and_nobody_waits_too_long() -> None:
    run_state_machine_as_test(
        Deliveries, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
