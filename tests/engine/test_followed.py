"""Outputs that a stream takes from where they grow, at its turns."""

import asyncio
from collections.abc import Iterator

import pytest

from jaxserve.engine.events import Delta, Event, Finished, Started
from jaxserve.engine.followed import Followed
from jaxserve.engine.stream import Stream
from jaxserve.engine.unread import TOKEN_BYTES, UnreadTotal
from jaxserve.engine.waker import MAX_HOLD_S, MIN_TURNS, Waker
from jaxserve.errors import JaxserveError, SlowReaderError
from tests.engine.test_stream import FINISHED, STARTED, Letters, Source, ids

STEP_S = MAX_HOLD_S / 4


class Growing:
    """A sequence's tokens, a letter each, and the stream that follows them. Letter n comes with
    step n."""

    def __init__(
        self,
        *,
        waker: Waker | None = None,
        max_bytes: int = 1 << 20,
        total: UnreadTotal[Stream] | None = None,
    ) -> None:
        self.source = Source(decoder=Letters(), max_bytes=max_bytes, total=total, waker=waker)
        self.stream, self.waker = self.source.stream, self.source.waker
        self.num_slow = 0
        self.token_ids: list[int] = []
        self.ready_s: list[float] = []
        self.stream.start()
        self.stream.follow(Followed(self.token_ids, self.ready_s, self._note_slow))

    def _note_slow(self) -> None:
        self.num_slow += 1

    def grow(self, text: str) -> None:
        for letter in text:
            self.token_ids.append(ord(letter))
            self.ready_s.append(STEP_S * len(self.token_ids))

    def begin(self, text: str = "a") -> Iterator[Event]:
        """Returns what reads it, after the start and a first output."""
        self.grow(text)
        self.stream.hand_over()
        events = iter(self.stream)
        assert next(events) == STARTED
        assert next(events) == Delta(index=0, text=text[:-1], token_ids=ids(text))
        return events


def test_at_each_turn_comes_what_has_grown_since_the_last() -> None:
    growing = Growing()
    events = growing.begin()
    growing.grow("bc")
    assert not growing.stream._unread  # it waits for its turn
    growing.waker.flush_turns(3 * STEP_S)
    delta = next(events)
    assert delta == Delta(index=0, text="ab", token_ids=ids("bc"))  # `Letters` holds one back
    assert isinstance(delta, Delta)
    assert delta.ready_s == (2 * STEP_S, 3 * STEP_S)
    growing.grow("d")
    growing.waker.flush_turns(4 * STEP_S)
    assert next(events) == Delta(index=0, text="c", token_ids=ids("d"))


@pytest.mark.parametrize(("is_silent", "text"), [(False, "abc"), (True, "ab")])
def test_with_the_end_comes_the_rest_and_the_last_token_may_have_no_text(
    is_silent: bool, text: str
) -> None:
    growing = Growing()
    events = growing.begin()
    growing.grow("bc")
    growing.stream.catch_up(is_last_silent=is_silent)
    growing.stream.finish(FINISHED)
    delta, finished = events
    assert delta == Delta(index=0, text=text, token_ids=ids("bc"))
    assert isinstance(finished, Finished)


def test_what_is_not_taken_yet_goes_with_what_comes() -> None:
    growing = Growing()
    events = growing.begin()
    for letter in "bcd":
        growing.grow(letter)
        growing.waker.flush_turns(STEP_S * len(growing.token_ids))
    assert next(events) == Delta(index=0, text="abc", token_ids=ids("bcd"))


def test_all_that_is_not_read_is_counted_handed_over_or_not() -> None:
    total: UnreadTotal[Stream] = UnreadTotal(4 * TOKEN_BYTES)
    growing = Growing(total=total)
    total.watch(growing.stream)
    growing.grow("abc")
    assert growing.stream.num_unread_bytes == 3 * TOKEN_BYTES
    growing.stream.hand_over()
    growing.grow("d")
    assert growing.stream.num_unread_bytes == 4 * TOKEN_BYTES
    growing.stream.hand_over()
    assert total.find_largest() is None
    growing.grow("e")
    growing.stream.hand_over()
    assert total.find_largest() is growing.stream


def test_a_reader_that_is_too_slow_is_told_of_at_each_turn_and_gets_all_before_the_error() -> None:
    growing = Growing(max_bytes=4 * TOKEN_BYTES)
    events = growing.begin()
    growing.grow("bcde")
    growing.waker.flush_turns(5 * STEP_S)
    assert growing.num_slow == 0  # exactly full
    growing.grow("f")
    growing.waker.flush_turns(6 * STEP_S)
    assert growing.num_slow == 1
    growing.stream.finish(SlowReaderError("read faster"))
    assert next(events) == Delta(index=0, text="abcde", token_ids=ids("bcdef"))
    with pytest.raises(SlowReaderError, match="read faster"):
        next(events)


def test_of_a_stream_that_is_given_up_nothing_more_is_taken() -> None:
    growing = Growing()
    events = growing.begin()
    growing.grow("b")
    growing.stream.give_up(SlowReaderError("too much"))
    growing.waker.flush_turns(9 * STEP_S)
    growing.stream.catch_up()
    assert growing.stream.num_unread_bytes == 0
    growing.stream.finish(FINISHED)
    with pytest.raises(JaxserveError, match="too much"):
        next(events)


def test_all_have_turn_after_turn_the_first_first() -> None:
    """Of four times as many as have a turn each has one in four steps, and none is left for
    good."""
    waker = Waker()
    many = [Growing(waker=waker) for _ in range(4 * MIN_TURNS)]
    for growing in many:
        growing.begin()
    waker.flush_turns(0.0)
    for step in range(1, 60):  # the device waits for the host: few turns
        waker.flush_turns(step * STEP_S / 100, is_late=True)
    numbers = []
    for step in range(60, 68):
        for growing in many:
            growing.token_ids.append(ord("x"))
            growing.ready_s.append(step * STEP_S / 100)
        num_left = waker.flush_turns(step * STEP_S / 100, is_late=True)
        assert num_left == 3 * MIN_TURNS
        numbers.append([bool(growing.stream._unread) for growing in many])
    assert [sum(row) for row in numbers] == [
        min(4, n) * MIN_TURNS for n in range(1, len(numbers) + 1)
    ]


@pytest.mark.asyncio
async def test_nobody_is_woken_for_nothing_nor_kept_waiting_for_what_comes_later() -> None:
    growing = Growing()
    got: list[Event] = []

    async def read() -> None:
        got.extend([event async for event in growing.stream])

    async def pause() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    growing.grow("a")
    growing.stream.hand_over()
    task = asyncio.create_task(read())
    await pause()
    for step in range(20):  # its sequence was preempted, say
        growing.waker.flush_turns(step * STEP_S)
        await pause()
        assert growing.stream._waiter is not None
    growing.grow("b")
    growing.waker.flush_turns(21 * STEP_S)
    await pause()
    growing.stream.finish(FINISHED)
    growing.waker.flush_due()
    await task
    assert [type(event) for event in got] == [Started, Delta, Delta, Delta, Finished]
