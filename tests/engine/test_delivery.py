"""Readers of a running engine, more than a step has turns for."""

import asyncio
from typing import Final

import pytest

from jaxserve.engine import Delta, Engine, EngineState, Event, Finished, Stream, waker
from tests.engine.turns import num_in_turn
from tests.engines import ask, build_engine

pytestmark = pytest.mark.asyncio

NUM_READERS: Final = 4


class Reading:
    """Tasks that read streams while the test moves the engine in the same thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[Stream, list[Event]] = {}

    def submit(self, max_tokens: int) -> Stream:
        number = len(self.events)
        stream = self.engine.submit(ask((number + 1,), max_tokens=max_tokens, ignore_eos=True))
        self.events[stream] = []
        asyncio.get_running_loop().create_task(self._read(stream)).set_name(str(number))
        return stream

    async def _read(self, stream: Stream) -> None:
        async for event in stream:
            self.events[stream].append(event)

    async def step(self) -> None:
        """What the engine's thread does in a turn, and then all that the readers can."""
        loop = self.engine._loop
        if not loop.is_idle:
            loop.step()
        loop.waker.flush_due()
        if loop.is_idle:
            loop.waker.flush()
        for _ in range(5):
            await asyncio.sleep(0)

    def tokens(self, stream: Stream) -> int:
        return sum(len(e.token_ids) for e in self.events[stream] if isinstance(e, Delta))


@pytest.fixture
def engine() -> Engine:
    engine, _ = build_engine()
    engine._change_state(EngineState.SERVING)
    return engine


async def test_a_step_gives_as_many_their_turn_and_the_rest_is_merged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "MAX_TURNS", 1)
    reading = Reading(engine)
    streams = [reading.submit(max_tokens=9) for _ in range(NUM_READERS)]
    for _ in range(6):
        await reading.step()
    assert all(reading.tokens(stream) for stream in streams)  # the first is put off for nobody
    assert engine.metrics.value("put_off_streams_total") > 0
    while not engine._loop.is_idle:
        await reading.step()
    await reading.step()
    for stream in streams:
        assert isinstance(reading.events[stream][-1], Finished)
        assert reading.tokens(stream) == 9
    deltas = [e for events in reading.events.values() for e in events if isinstance(e, Delta)]
    assert len(deltas) < NUM_READERS * 9
    assert num_in_turn(engine._loop.waker) == 0
    engine.stop()


async def test_an_end_comes_with_its_step_whoever_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "MAX_TURNS", 0)
    reading = Reading(engine)
    long, short = reading.submit(max_tokens=12), reading.submit(max_tokens=3)
    while engine.metrics.total("requests_finished_total") < 1:
        assert not any(isinstance(event, Finished) for event in reading.events[short])
        await reading.step()
    assert isinstance(reading.events[short][-1], Finished)
    assert reading.tokens(short) == 3
    assert reading.tokens(long) == 1
    long.cancel()
    await reading.step()
    assert isinstance(reading.events[long][-1], Finished)
    engine.stop()


async def test_nobody_of_a_few_readers_is_put_off(engine: Engine) -> None:
    reading = Reading(engine)
    streams = [reading.submit(max_tokens=6) for _ in range(NUM_READERS)]
    while not engine._loop.is_idle:
        await reading.step()
    await reading.step()
    assert [reading.tokens(stream) for stream in streams] == [6] * NUM_READERS
    assert engine.metrics.value("put_off_streams_total") == 0
    engine.stop()


async def test_a_reader_that_leaves_while_it_waits_for_its_turn_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "MAX_TURNS", 0)
    reading = Reading(engine)
    stays, goes = reading.submit(max_tokens=20), reading.submit(max_tokens=20)
    while num_in_turn(engine._loop.waker) < 2:
        await reading.step()
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "1")
    task.cancel()
    await reading.step()
    await reading.step()
    assert num_in_turn(engine._loop.waker) == 1
    assert reading.tokens(goes) == 1
    stays.cancel()
    await reading.step()
    assert num_in_turn(engine._loop.waker) == 0
    engine.stop()
