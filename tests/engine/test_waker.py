"""Whose turn it is to be woken: in virtual time, with tasks of a real event loop."""

import asyncio
import contextlib
import dataclasses
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
from jaxserve.engine.waker import MAX_HOLD_S, MAX_WAKES, Waiter, Waker
from jaxserve.errors import JaxserveError, NumericsError
from jaxserve.metrics import Metrics
from jaxserve.request import FinishReason
from tests.engine.test_stream import FINISHED

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
            waker.wake_in_turn(waiter, STEP_S)
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
            waker.wake_in_turn(waiter, STEP_S)
        waker.flush_turns(STEP_S)
        again = waiters_of(loop, MAX_WAKES)
        for waiter in again:
            waker.wake_in_turn(waiter, 2 * STEP_S)
        waker.flush_turns(2 * STEP_S)
        assert (len(woken(second)), woken(again)) == (MAX_WAKES, [])


@pytest.mark.parametrize("step_s", [STEP_S, 10.0])
def test_as_many_as_have_a_turn_in_a_step_are_never_left(step_s: float) -> None:
    with open_loop() as loop:
        waker = Waker()
        for step in range(5):
            waiters = waiters_of(loop, MAX_WAKES)
            for waiter in waiters:
                waker.wake_in_turn(waiter, step * step_s)
            assert waker.flush_turns(step * step_s) == 0
            assert len(woken(waiters)) == MAX_WAKES


def test_with_steps_longer_than_the_bound_all_are_woken_in_each() -> None:
    with open_loop() as loop:
        waker = Waker()
        step_s = 1.01 * MAX_HOLD_S
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 5 * MAX_WAKES)
        for waiter in waiters:
            waker.wake_in_turn(waiter, step_s)
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
                waker.wake_in_turn(waiter, step * step_s)
            waker.flush_turns(step * step_s)
        assert (len(woken(early)), woken(late)) == (2 * MAX_WAKES, [])
        waker.flush_turns(3 * step_s)
        assert (len(woken(early)), woken(late)) == (5 * MAX_WAKES, [])


def test_who_is_due_is_woken_at_once_and_takes_nobodys_turn() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 2 * MAX_WAKES)
        for waiter in waiters:
            waker.wake_in_turn(waiter, STEP_S)
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
            waker.wake_in_turn(waiter, STEP_S)
        for waiter in waiters[:2]:
            waiter.future.cancel()
        assert waker.flush_turns(STEP_S) == 0


def test_all_are_woken_where_nothing_more_comes() -> None:
    with open_loop() as loop:
        waker = Waker()
        waker.flush_turns(0.0)
        waiters = waiters_of(loop, 3 * MAX_WAKES)
        for waiter in waiters:
            waker.wake_in_turn(waiter, STEP_S)
        waker.flush()
        assert (len(woken(waiters)), waker.num_in_turn) == (3 * MAX_WAKES, 0)


def test_each_event_loop_has_its_own_and_turns_are_of_all_together() -> None:
    with open_loop() as one, open_loop() as other:
        waker = Waker()
        waker.flush_turns(0.0)
        pairs = [(waiters_of(one, 1)[0], waiters_of(other, 1)[0]) for _ in range(MAX_WAKES)]
        for waiter in (waiter for pair in pairs for waiter in pair):
            waker.wake_in_turn(waiter, STEP_S)
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
      is_due: woken by the next flush of any kind.
    """

    stream: Stream
    events: list[Event]
    reader: asyncio.Task[None]
    put: list[int] = dataclasses.field(default_factory=list)
    since_s: float | None = None
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
                case.since_s, case.is_due = None, False
            else:
                assert len(case.events) == before[id(case)]

    @initialize()
    def begin(self) -> None:
        for _ in range(4):
            self.open()

    @rule()
    def open(self) -> None:
        events: list[Event] = []
        stream = Stream(
            request_id="a",
            prompt_tokens=1,
            max_bytes=1 << 20,
            decoders=[None, None],
            waker=self.waker,
            on_cancel=lambda: None,
            reader=ReaderAccount(Metrics(), lambda: 0.0, times_decoding=False),
        )

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
        case.has_left, case.since_s, case.is_due = True, None, False

    @rule(millis=st.integers(1, 30))
    def step(self, millis: int) -> None:
        self.now_s += 1e-3 * millis
        step_s, self.turn_s = self.now_s - self.turn_s, self.now_s
        due = [case for case in self.cases if case.is_due]
        in_turn = [case for case in self.cases if case.since_s is not None and not case.is_due]
        in_turn.sort(key=lambda case: (case.since_s, self.cases.index(case)))
        left = self.waker.flush_turns(self.now_s)
        before = {id(case): len(case.events) for case in in_turn}
        self.turn()
        served = [case for case in in_turn if len(case.events) > before[id(case)]]
        assert left == len(in_turn) - len(served)
        for case in (*due, *served):
            assert case.got == case.put
            case.since_s, case.is_due = None, False
        waiting = [case for case in in_turn if case not in served]
        for case in waiting:
            assert case.since_s is not None
            assert self.now_s + step_s - case.since_s <= MAX_HOLD_S + 1e-9
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
        assert self.waker.num_in_turn == 0

    @invariant()
    def nobody_waits_for_a_turn_but_who_reads(self) -> None:
        waiting = [c for c in self.live if c.since_s is not None and not c.is_due]
        assert self.waker.num_in_turn == len(waiting)


def test_nobody_is_forgotten_and_nobody_waits_too_long() -> None:
    run_state_machine_as_test(
        Deliveries, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
