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
from jaxserve.engine.waker import MAX_HOLD_S, MAX_TURNS, MIN_TURNS, Waiter, Waker
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


class Held:
    """Has something for its reader."""

    def __init__(self, waker: Waker) -> None:
        self.is_given = False
        self._waker = waker

    def hand_over(self) -> None:
        self.is_given = True
        self._waker.leave(self)


def join(waker: Waker, number: int, *, now_s: float) -> list[Held]:
    """As many as want a turn from now on."""
    holders = [Held(waker) for _ in range(number)]
    for holder in holders:
        waker.join(holder, now_s)
    return holders


def given(holders: list[Held]) -> list[int]:
    return [place for place, holder in enumerate(holders) if holder.is_given]


def begin() -> Waker:
    """One that has seen a step at 0 s."""
    waker = Waker()
    waker.flush_turns(0.0)
    return waker


def test_each_of_four_times_as_many_has_its_turn_once_in_four_steps_and_the_first_first() -> None:
    waker = begin()
    holders = join(waker, 4 * MAX_TURNS, now_s=STEP_S)
    for step in range(1, 5):
        left = waker.flush_turns(step * STEP_S)
        assert given(holders) == list(range(step * MAX_TURNS))
        assert left == (4 - step) * MAX_TURNS


def test_who_comes_back_is_behind_those_that_wait() -> None:
    waker = begin()
    join(waker, MAX_TURNS, now_s=STEP_S)
    second = join(waker, MAX_TURNS, now_s=STEP_S)
    waker.flush_turns(STEP_S)
    again = join(waker, MAX_TURNS, now_s=2 * STEP_S)
    waker.flush_turns(2 * STEP_S)
    assert (len(given(second)), given(again)) == (MAX_TURNS, [])


def test_who_gets_more_while_it_waits_keeps_its_place() -> None:
    waker = begin()
    holders = join(waker, 2 * MAX_TURNS, now_s=STEP_S)
    waker.join(holders[0], STEP_S)
    waker.flush_turns(STEP_S)
    assert given(holders) == list(range(MAX_TURNS))


def test_who_gets_more_while_it_waits_waits_no_longer() -> None:
    waker = begin()
    step_s = 0.4 * MAX_HOLD_S
    holders = join(waker, 5 * MAX_TURNS, now_s=step_s)
    waker.flush_turns(step_s)
    waker.join(holders[-1], 2 * step_s)
    waker.flush_turns(2 * step_s)
    waker.join(holders[-1], 3 * step_s)
    waker.flush_turns(3 * step_s)
    assert holders[-1].is_given


class Follower:
    """Always has another turn."""

    def __init__(self, waker: Waker) -> None:
        self.num_turns = 0
        self._waker = waker
        self.now_s = 0.0

    def hand_over(self) -> None:
        self.num_turns += 1
        self._waker.rejoin(self, self.now_s)


def test_those_that_are_always_in_turn_have_their_turns_in_order() -> None:
    waker = begin()
    followers = [Follower(waker) for _ in range(3 * MAX_TURNS)]
    for follower in followers:
        waker.join(follower, STEP_S)
    for step in range(1, 13):
        for follower in followers:
            follower.now_s = step * STEP_S
        waker.flush_turns(step * STEP_S)
        assert sum(follower.num_turns for follower in followers) == step * MAX_TURNS
        turns = {follower.num_turns for follower in followers}
        assert max(turns) - min(turns) <= 1
    assert turns == {4}


@pytest.mark.parametrize("step_s", [STEP_S, 10.0])
def test_as_many_as_have_a_turn_in_a_step_are_never_left(step_s: float) -> None:
    waker = Waker()
    for step in range(5):
        holders = join(waker, MAX_TURNS, now_s=step * step_s)
        assert waker.flush_turns(step * step_s) == 0
        assert len(given(holders)) == MAX_TURNS


def test_with_steps_longer_than_the_bound_all_have_a_turn_in_each() -> None:
    waker = begin()
    step_s = 1.01 * MAX_HOLD_S
    holders = join(waker, 5 * MAX_TURNS, now_s=step_s)
    assert waker.flush_turns(step_s) == 0
    assert len(given(holders)) == 5 * MAX_TURNS


def test_who_would_wait_too_long_by_the_next_step_has_its_turn_beyond_the_number() -> None:
    waker = begin()
    step_s = 0.4 * MAX_HOLD_S
    early = join(waker, 5 * MAX_TURNS, now_s=step_s)
    waker.flush_turns(step_s)
    late = join(waker, 5 * MAX_TURNS, now_s=2 * step_s)
    waker.flush_turns(2 * step_s)
    assert (len(given(early)), given(late)) == (2 * MAX_TURNS, [])
    waker.flush_turns(3 * step_s)
    assert (len(given(early)), given(late)) == (5 * MAX_TURNS, [])


def _num_turns(waker: Waker, *, now_s: float, is_late: bool) -> int:
    """Of more than have a turn; nobody is left waiting."""
    holders = join(waker, 2 * MAX_TURNS, now_s=now_s)
    waker.flush_turns(now_s, is_late=is_late)
    number = len(given(holders))
    waker.flush()
    return number


def test_there_are_fewer_turns_while_the_host_is_late_and_slowly_more_again_behind_it() -> None:
    waker = begin()
    numbers = [_num_turns(waker, now_s=n * STEP_S, is_late=n <= 50) for n in range(1, 1000)]
    assert numbers[:3] == [MAX_TURNS - 4, MAX_TURNS - 8, MAX_TURNS - 12]
    assert numbers[49] == MIN_TURNS
    assert numbers[50 + 15] == MIN_TURNS + 1
    assert numbers[50 + 31] == MIN_TURNS + 2
    assert numbers[-1] == MAX_TURNS


@pytest.mark.parametrize(("every", "least", "most"), [
    (100, MAX_TURNS - 4, MAX_TURNS), (20, MIN_TURNS, MIN_TURNS + 4)
])  # fmt: skip
def test_a_late_step_now_and_then_takes_no_turns_for_good(
    every: int, least: int, most: int
) -> None:
    waker = begin()
    numbers = [_num_turns(waker, now_s=n * STEP_S, is_late=not n % every) for n in range(1, 2000)]
    assert all(least <= number <= most for number in numbers[-100:])


def test_nobody_waits_longer_where_the_host_is_late() -> None:
    waker = begin()
    for step in range(1, 50):
        _num_turns(waker, now_s=step * STEP_S, is_late=True)
    first_s = 50 * STEP_S
    holders = join(waker, 5 * MAX_TURNS, now_s=first_s)
    for step in range(4):
        waker.flush_turns(first_s + step * STEP_S, is_late=True)
    assert len(given(holders)) == 4 * MIN_TURNS
    waker.flush_turns(first_s + 4 * STEP_S, is_late=True)
    assert len(given(holders)) == 5 * MAX_TURNS


def test_who_has_nothing_more_takes_nobodys_turn() -> None:
    waker = begin()
    holders = join(waker, MAX_TURNS + 2, now_s=STEP_S)
    for holder in holders[:2]:  # their ends have come
        waker.leave(holder)
    assert waker.flush_turns(STEP_S) == 0
    assert given(holders) == list(range(2, MAX_TURNS + 2))


def test_all_is_handed_over_where_nothing_more_comes() -> None:
    waker = begin()
    holders = join(waker, 3 * MAX_TURNS, now_s=STEP_S)
    waker.flush()
    assert (len(given(holders)), num_in_turn(waker)) == (3 * MAX_TURNS, 0)


@pytest.mark.asyncio
async def test_who_is_behind_waits_for_its_turn_too_and_for_no_start_or_end() -> None:
    waker = begin()
    streams = [build_stream(waker) for _ in range(2)]
    got: list[list[int]] = [[] for _ in streams]
    gate = asyncio.Event()

    async def read(place: int) -> None:
        async for event in streams[place]:
            if isinstance(event, Delta):
                got[place].append(len(event.token_ids))
            await gate.wait()

    async def pause() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(read(place)) for place in range(2)]
    await pause()
    for stream in streams:
        stream.start()
        stream.put(1, now_s=0.0, text="")
    waker.flush_due()
    await pause()  # each has its start, and is held up by its client
    for stream in streams:
        stream.put(2, now_s=STEP_S, text="")
    gate.set()
    await pause()
    assert got == [[2], [2]]  # the first output waits for nobody, nor does what goes with it
    for stream in streams:
        stream.put(3, now_s=STEP_S, text="")
    await pause()
    assert got == [[2], [2]]
    waker.flush_turns(STEP_S)
    await pause()
    assert got == [[2, 1], [2, 1]]
    for stream in streams:
        stream.put(4, now_s=2 * STEP_S, text="")
    streams[0].put(5, now_s=2 * STEP_S, text="")
    streams[0].finish(FINISHED)
    waker.flush_due()
    await pause()
    assert got == [[2, 1, 2], [2, 1]]
    waker.flush_turns(2 * STEP_S)
    await pause()
    assert got == [[2, 1, 2], [2, 1, 1]]
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
    monkeypatch.setattr(waker_module, "MAX_TURNS", 3)
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


def test_all_waiters_of_an_event_loop_are_woken_with_one_call() -> None:
    with open_loop() as one, open_loop() as other:
        waker = Waker()
        waiters = [Waiter(loop, loop.create_future()) for loop in (one, other) * 3]
        waiters[0].future.cancel()  # it has gone
        for waiter in waiters:
            waker.wake(waiter)
        waker.flush_due()
        assert all(waiter.future.done() for waiter in waiters)
        assert (one.num_calls, other.num_calls) == (1, 1)
        waker.flush_due()
        assert (one.num_calls, other.num_calls) == (1, 1)


@dataclasses.dataclass(slots=True, eq=False)
class Case:
    """A stream, its reader, and what both should be.

    Attributes:
      put: tokens that were put, but for those that nobody will get.
      num_given: of them, those that wait for no turn.
      since_s: when the first of the others was put; None where there is none.
      is_due: woken by the next flush of any kind.
    """

    stream: Stream
    events: list[Event]
    reader: asyncio.Task[None]
    put: list[int] = dataclasses.field(default_factory=list)
    num_given: int = 0
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
    """Streams whose readers always read on, against a list of what waits since when."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(waker_module, "MAX_TURNS", 2)
        self.loop = asyncio.new_event_loop()
        self.waker = Waker()
        self.now_s = self.turn_s = 0.0
        self.waker.flush_turns(0.0)
        self.cases: list[Case] = []
        self.order: list[Case] = []  # who wants a turn, the first one first

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

    def check(self) -> None:
        """Each reader that was woken has what it was given, and all others have what they had."""
        before = {id(case): len(case.events) for case in self.cases}
        self.turn()
        for case in self.cases:
            if case.is_due:
                assert case.got == case.put[: case.num_given]
                case.is_due = False
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
        is_first = not case.put
        if is_first:
            case.stream.start()
        assert case.stream.put(len(case.put), now_s=self.now_s, text="", index=index)
        case.put.append(len(case.put))
        if is_first or case.is_due:  # it goes with what is there
            self.give(case)
        elif case.since_s is None:
            case.since_s = self.now_s
            self.order.append(case)

    def give(self, case: Case) -> None:
        """All that was put waits for no turn, and its reader is woken."""
        case.num_given, case.since_s, case.is_due = len(case.put), None, True
        if case in self.order:
            self.order.remove(case)

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
        self.give(case)
        case.has_ended = True

    def leave(self, case: Case) -> None:
        """The reader goes; the engine hears of it, and ends the request."""
        case.reader.cancel()
        self.turn()
        case.stream.finish(FINISHED)
        self.give(case)
        case.has_left, case.is_due = True, False

    @rule(millis=st.integers(1, 30))
    def step(self, millis: int) -> None:
        self.now_s += 1e-3 * millis
        step_s, self.turn_s = self.now_s - self.turn_s, self.now_s
        left = self.waker.flush_turns(self.now_s)
        served, waiting = self.order[: len(self.order) - left], self.order[len(self.order) - left :]
        for case in list(served):
            self.give(case)
        self.check()
        for case in waiting:
            assert case.since_s is not None
            assert self.now_s + step_s - case.since_s <= MAX_HOLD_S + 1e-9
        assert not waiting or len(served) >= 2

    @rule()
    def flush_due(self) -> None:
        self.waker.flush_due()
        self.check()

    @rule()
    def flush(self) -> None:
        """Nothing runs any more."""
        self.waker.flush()
        for case in list(self.order):
            self.give(case)
        self.check()
        assert num_in_turn(self.waker) == 0

    @invariant()
    def who_has_something_held_back_wants_a_turn(self) -> None:
        assert num_in_turn(self.waker) == len(self.order)


def test_nobody_is_forgotten_and_nobody_waits_too_long() -> None:
    run_state_machine_as_test(
        Deliveries, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
