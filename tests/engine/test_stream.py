"""The hand-off alone: no engine, a decoder that spells ids as letters."""

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxserve.engine.events import (
    ChoiceFinished,
    Delta,
    Event,
    ExecutionInfo,
    Finished,
    Started,
    Timings,
    Usage,
)
from jaxserve.engine.reader_account import Decoder, ReaderAccount
from jaxserve.engine.stream import Stream
from jaxserve.engine.unread import ENTRY_BYTES, TOKEN_BYTES, UnreadTotal
from jaxserve.engine.waker import Waker
from jaxserve.errors import NumericsError, SlowReaderError
from jaxserve.metrics import Metrics
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason

FINISHED = Finished(
    index=0,
    reason=FinishReason.EOS,
    matched_stop=None,
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    timings=Timings(),
    execution=ExecutionInfo(),
)
STARTED = Started(request_id="a", prompt_tokens=3)


class Letters:
    """Holds every token back until the next one comes, like half a character."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_ids: list[int]) -> str:
        text = self.held + "".join(chr(token_id) for token_id in token_ids)
        self.held = text[-1:]
        return text[:-1]

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


class Source:
    """A stream with the list of what was asked of its engine."""

    def __init__(
        self,
        *,
        max_bytes: int = 1 << 20,
        decoder: Letters | None = None,
        decoders: Sequence[Decoder | None] | None = None,
        total: UnreadTotal[Stream] | None = None,
        waker: Waker | None = None,
    ) -> None:
        self.num_cancels = 0
        self.waker = waker or Waker()
        self.stream = Stream(
            request_id="a",
            prompt_tokens=3,
            max_bytes=max_bytes,
            decoders=[decoder] if decoders is None else decoders,
            waker=self.waker,
            on_cancel=self._count_cancel,
            reader=ReaderAccount(Metrics(), lambda: 0.0, times_decoding=False),
            total=total,
        )

    def _count_cancel(self) -> None:
        self.num_cancels += 1


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_events_come_in_order_and_unread_output_is_one_delta() -> None:
    stream = Source().stream
    stream.start()
    for letter in "hi":
        assert stream.put(ord(letter), now_s=0.0, text=letter)
    stream.finish(FINISHED, last_text="!")
    assert list(stream) == [STARTED, Delta(index=0, text="hi!", token_ids=ids("hi")), FINISHED]
    assert list(stream) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_who_waits_for_many_streams_is_told_of_an_end_once(is_late: bool) -> None:
    stream = Source().stream
    calls: list[str] = []
    if is_late:
        stream.finish(FINISHED)
    stream.call_at_end(lambda: calls.append("end"))
    if not is_late:
        stream.start()
        stream.put(ord("a"), now_s=0.0, text="a")
        assert calls == []
        stream.finish(FINISHED)
    assert calls == ["end"]
    assert list(stream)[-1] == FINISHED


def test_the_reader_decodes_and_gets_what_was_held_back_at_the_end() -> None:
    stream = Source(decoder=Letters()).stream
    stream.start()
    stream.put(ord("o"), now_s=0.0)
    events = iter(stream)
    assert next(events) == STARTED
    assert next(events) == Delta(index=0, text="", token_ids=ids("o"))
    stream.put(ord("k"), now_s=0.0)
    stream.hand_over()
    assert next(events) == Delta(index=0, text="o", token_ids=ids("k"))
    stream.put(ord("$"), now_s=0.0, text="")  # an end token: charged, not shown
    stream.finish(FINISHED)
    assert next(events) == Delta(index=0, text="k", token_ids=ids("$"))
    assert list(events) == [FINISHED]


def test_text_held_back_comes_before_the_end_even_without_a_new_token() -> None:
    stream = Source(decoder=Letters()).stream
    stream.start()
    stream.put(ord("k"), now_s=0.0)
    events = iter(stream)
    assert [next(events), next(events)] == [STARTED, Delta(index=0, text="", token_ids=ids("k"))]
    stream.finish(FINISHED)
    assert list(events) == [Delta(index=0, text="k", token_ids=()), FINISHED]


def test_a_request_that_ends_unscheduled_still_starts_first() -> None:
    stream = Source().stream
    stream.finish(FINISHED)
    assert list(stream) == [STARTED, FINISHED]


def test_an_error_is_raised_once_after_the_output_before_it() -> None:
    stream = Source().stream
    stream.start()
    stream.put(1, now_s=0.0, text="a")
    stream.finish(NumericsError("not finite"))
    events = iter(stream)
    assert [next(events), next(events)] == [STARTED, Delta(index=0, text="a", token_ids=(1,))]
    with pytest.raises(NumericsError, match="not finite"):
        next(events)
    assert list(stream) == []


def test_unread_output_is_bounded_in_bytes_and_reading_makes_room() -> None:
    stream = Source(max_bytes=2 * TOKEN_BYTES + 3).stream
    assert stream.put(1, now_s=0.0, text="é")  # two bytes
    assert not stream.put(2, now_s=0.0, text="éa")
    assert stream.put(2, now_s=0.0, text="a")
    assert not stream.put(3, now_s=0.0, text="")
    assert stream.num_unread_bytes == 2 * TOKEN_BYTES + 3
    stream.start()
    events = iter(stream)
    assert [next(events), next(events)] == [STARTED, Delta(index=0, text="éa", token_ids=(1, 2))]
    assert stream.put(3, now_s=0.0, text="")


def test_what_is_held_back_is_not_there_to_read_until_it_is_handed_over() -> None:
    stream = Source().stream
    stream.start()
    for letter in "abc":
        assert stream.put(ord(letter), now_s=0.0, text=letter)
    events = iter(stream)
    assert next(events) == STARTED
    assert next(events) == Delta(index=0, text="abc", token_ids=ids("abc"))
    stream.put(ord("d"), now_s=0.0, text="d")
    stream.hand_over()
    stream.put(ord("e"), now_s=0.0, text="e")  # goes with what is there and not taken yet
    assert next(events) == Delta(index=0, text="de", token_ids=ids("de"))
    stream.put(ord("f"), now_s=0.0, text="f")
    assert not stream._is_ready()
    stream.finish(FINISHED)  # an end waits for nobody, nor does what is before it
    assert list(events) == [Delta(index=0, text="f", token_ids=ids("f")), FINISHED]


def test_what_fills_half_the_room_waits_for_no_turn() -> None:
    stream = Source(max_bytes=4 * TOKEN_BYTES).stream
    stream.start()
    stream.put(0, now_s=0.0, text="")
    events = iter(stream)
    assert [next(events), next(events)] == [STARTED, Delta(index=0, text="", token_ids=(0,))]
    for token_id in (1, 2):
        stream.put(token_id, now_s=0.0, text="")
        assert not stream._is_ready()
    stream.put(3, now_s=0.0, text="")
    assert next(events) == Delta(index=0, text="", token_ids=(1, 2, 3))


def test_ending_twice_is_a_fault_of_ours() -> None:
    stream = Source().stream
    stream.finish(FINISHED)
    with pytest.raises(AssertionError, match="ended twice"):
        stream.finish(FINISHED)


def test_a_reader_that_breaks_off_cancels_once() -> None:
    source = Source()
    source.stream.start()
    for event in source.stream:
        assert event == STARTED
        break
    assert source.num_cancels == 1
    source.stream.cancel()
    assert source.num_cancels == 1


def test_leaving_the_context_cancels_and_after_the_end_nothing_does() -> None:
    source = Source()
    with source.stream:
        pass
    assert source.num_cancels == 1
    ended = Source()
    with ended.stream as stream:
        stream.finish(FINISHED)
        assert list(stream)[-1] == FINISHED
    ended.stream.cancel()
    assert ended.num_cancels == 0


def test_a_waiting_thread_is_woken_by_each_event() -> None:
    stream = Source().stream
    seen: list[object] = []
    has_seen = threading.Semaphore(0)

    def read() -> None:
        for event in stream:
            seen.append(event)
            has_seen.release()

    reader = threading.Thread(target=read)
    reader.start()
    stream.start()
    assert has_seen.acquire(timeout=60)
    stream.put(1, now_s=0.0, text="a")
    assert has_seen.acquire(timeout=60)
    stream.finish(FINISHED)
    reader.join(timeout=60)
    assert seen == [STARTED, Delta(index=0, text="a", token_ids=(1,)), FINISHED]


@pytest.mark.asyncio
async def test_a_waiting_task_is_woken_from_another_thread() -> None:
    source = Source(decoder=Letters())
    stream = source.stream

    async def read() -> list[object]:
        return [event async for event in stream]

    def write(act: Callable[[], object]) -> None:
        act()
        source.waker.flush()

    task = asyncio.create_task(read())
    await asyncio.sleep(0)  # the task waits now
    for act in (
        stream.start,
        lambda: stream.put(ord("x"), now_s=0.0),
        lambda: stream.finish(FINISHED),
    ):
        await asyncio.to_thread(write, act)
    events = await task
    assert (events[0], events[-1]) == (STARTED, FINISHED)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "x"


@pytest.mark.asyncio
async def test_all_tasks_of_a_loop_are_woken_with_one_call() -> None:
    sources = [Source() for _ in range(3)]
    waker = sources[0].waker
    for source in sources:
        source.stream._waker = waker

    async def read_one(stream: Stream) -> Event:
        return await anext(aiter(stream))

    tasks = [asyncio.create_task(read_one(source.stream)) for source in sources]
    await asyncio.sleep(0)
    for source in sources:
        source.stream.start()
        source.stream.put(1, now_s=0.0)
    calls: list[object] = []
    call, loop = asyncio.get_running_loop().call_soon_threadsafe, asyncio.get_running_loop()

    def count(callback: Callable[..., object], *arguments: object) -> object:
        calls.append(callback)
        return call(callback, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", count)
        waker.flush()
    assert len(calls) == 1
    assert await asyncio.gather(*tasks) == [STARTED] * 3


@pytest.mark.asyncio
async def test_a_cancelled_task_cancels_the_request() -> None:
    source = Source()

    async def read() -> None:
        async for _ in source.stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.num_cancels == 1
    source.stream.put(1, now_s=0.0)  # nobody is there any more
    source.stream.finish(FINISHED)


@pytest.mark.asyncio
async def test_a_task_that_breaks_off_cancels_the_request() -> None:
    source = Source()
    source.stream.start()
    async for _ in source.stream:
        break
    gc.collect()
    while not source.num_cancels:  # the loop closes the abandoned iterator, in a turn or two
        await asyncio.sleep(0)
    assert source.num_cancels == 1


@pytest.mark.asyncio
async def test_an_error_reaches_a_task_once() -> None:
    stream = Source().stream
    stream.finish(NumericsError("not finite"))
    with pytest.raises(NumericsError):
        _ = [event async for event in stream]
    assert [event async for event in stream] == []


def test_a_closed_event_loop_does_not_disturb_the_writer() -> None:
    source = Source()
    loop = asyncio.new_event_loop()
    events = aiter(source.stream)
    waiting: asyncio.Task[object] = loop.create_task(anext(events))  # type: ignore[arg-type]  # it is a coroutine
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    source.stream.start()
    assert source.stream.put(1, now_s=0.0, text="a")
    source.stream.finish(FINISHED)
    source.waker.flush()
    assert source.num_cancels == 0
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop is gone, as meant


def entry(token_id: int, num_top: int = 0) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=-float(token_id),
        rank=token_id + 1,
        top_ids=tuple(range(num_top)),
        top_logprobs=(-1.0,) * num_top,
    )


def ended(index: int, stop: str | None = None) -> ChoiceFinished:
    return ChoiceFinished(index=index, reason=FinishReason.STOP, matched_stop=stop)


def test_each_choice_has_its_deltas_and_then_its_end_and_the_last_end_is_the_requests() -> None:
    stream = Source(decoders=[Letters(), None, Letters()]).stream
    stream.start()
    stream.put(ord("a"), now_s=0.0)
    stream.put(ord("x"), now_s=0.0, index=2)
    stream.put(1, now_s=0.0, text="st", index=1)
    stream.put(ord("y"), now_s=0.0, index=2)
    stream.finish_choice(ended(1, "p"), last_text="o")
    stream.put(ord("b"), now_s=0.0)
    stream.finish_choice(ended(2))
    stream.finish(FINISHED)
    assert list(stream) == [
        STARTED,
        Delta(index=0, text="ab", token_ids=ids("ab")),
        Delta(index=2, text="xy", token_ids=ids("xy")),
        ended(2),
        Delta(index=1, text="sto", token_ids=(1,)),
        ended(1, "p"),
        FINISHED,
    ]


def test_a_choice_that_ends_before_anything_was_scheduled_starts_the_stream() -> None:
    stream = Source(decoders=[None, None]).stream
    stream.finish_choice(ended(1))
    events = iter(stream)
    assert [next(events), next(events)] == [STARTED, ended(1)]
    stream.finish(FINISHED)
    assert list(events) == [FINISHED]


def test_who_reads_in_between_gets_each_choices_text_whole() -> None:
    stream = Source(decoders=[Letters(), Letters()]).stream
    stream.start()
    events = iter(stream)
    assert next(events) == STARTED
    stream.put(ord("a"), now_s=0.0, index=1)
    assert next(events) == Delta(index=1, text="", token_ids=ids("a"))
    stream.put(ord("k"), now_s=0.0)
    stream.finish_choice(ended(1))
    assert next(events) == Delta(index=0, text="", token_ids=ids("k"))
    assert next(events) == Delta(index=1, text="a", token_ids=())
    assert next(events) == ended(1)
    stream.put(ord("l"), now_s=0.0)
    stream.finish(FINISHED)
    assert list(events) == [Delta(index=0, text="kl", token_ids=ids("l")), FINISHED]


def test_ending_a_choice_twice_is_a_fault_of_ours() -> None:
    stream = Source(decoders=[None, None]).stream
    stream.finish_choice(ended(1))
    with pytest.raises(AssertionError, match="choice 1 of a ended twice"):
        stream.finish_choice(ended(1))


@pytest.mark.parametrize("seed", range(20))
def test_logprobs_stay_beside_their_tokens_however_deltas_merge(seed: int) -> None:
    random = np.random.default_rng(seed)
    stream = Source(decoders=[Letters(), Letters(), None]).stream
    stream.start()
    events = iter(stream)
    assert next(events) == STARTED
    put: list[list[int]] = [[], [], []]
    got: list[list[int]] = [[], [], []]
    for token_id in range(60):
        index = int(random.integers(3))
        text = "t" if index == 2 else None
        logprobs = entry(token_id, num_top=token_id % 3)
        stream.put(token_id, now_s=0.0, text=text, index=index, logprobs=logprobs)
        put[index].append(token_id)
        if random.random() < 0.4:
            stream.hand_over()
        while stream._unread and random.random() < 0.4:
            delta = next(events)
            assert isinstance(delta, Delta)
            assert [one.token_id for one in delta.logprobs] == list(delta.token_ids)
            assert [len(one.top_ids) for one in delta.logprobs] == [
                token_id % 3 for token_id in delta.token_ids
            ]
            got[delta.index] += delta.token_ids
    stream.finish(FINISHED)
    for delta in list(events)[:-1]:
        assert isinstance(delta, Delta)
        assert [one.token_id for one in delta.logprobs] == list(delta.token_ids)
        got[delta.index] += delta.token_ids
    assert got == put


def test_the_prompts_logprobs_come_with_the_start_whatever_room_there_is() -> None:
    prompt = tuple(entry(token_id, num_top=5) for token_id in range(100))
    stream = Source(max_bytes=2 * TOKEN_BYTES).stream
    stream.start(prompt)
    assert stream.num_unread_bytes == 100 * 6 * ENTRY_BYTES
    assert stream.put(1, now_s=0.0, text="")
    events = iter(stream)
    assert next(events) == Started(request_id="a", prompt_tokens=3, prompt_logprobs=prompt)
    assert stream.num_unread_bytes == TOKEN_BYTES
    stream.finish(FINISHED)
    assert list(events) == [Delta(index=0, text="", token_ids=(1,)), FINISHED]


def test_unread_logprobs_count_for_the_bound_and_so_do_all_choices_together() -> None:
    room = 3 * TOKEN_BYTES + 4 * ENTRY_BYTES
    stream = Source(max_bytes=room, decoders=[None, None]).stream
    stream.start()
    assert stream.put(1, now_s=0.0, text="", logprobs=entry(1, num_top=2))
    assert not stream.put(2, now_s=0.0, text="", index=1, logprobs=entry(2, num_top=1))
    assert stream.put(2, now_s=0.0, text="", index=1, logprobs=entry(2))
    assert stream.num_unread_bytes == 2 * TOKEN_BYTES + 4 * ENTRY_BYTES
    events = iter(stream)
    assert next(events) == STARTED
    assert next(events) == Delta(index=0, text="", token_ids=(1,), logprobs=(entry(1, num_top=2),))
    assert stream.num_unread_bytes == TOKEN_BYTES + ENTRY_BYTES  # the other's are still there
    assert stream.put(3, now_s=0.0, text="", logprobs=entry(3, num_top=2))


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_stream_that_is_given_up_ends_with_the_error_alone(has_ended: bool) -> None:
    stream = Source(decoders=[Letters(), None]).stream
    calls: list[str] = []
    stream.call_at_end(lambda: calls.append("end"))
    stream.start((entry(1),))
    stream.put(ord("a"), now_s=0.0)
    if has_ended:
        stream.finish_choice(ended(1))
        stream.finish(FINISHED)
    error = SlowReaderError("too slow")
    stream.give_up(error)
    assert stream.num_unread_bytes == 0
    if not has_ended:
        stream.finish(error)
    assert calls == ["end"]
    events = iter(stream)
    assert next(events) == STARTED
    with pytest.raises(SlowReaderError, match="too slow"):
        next(events)
    assert list(stream) == []


def test_what_all_streams_put_is_counted_and_the_fullest_is_found() -> None:
    total: UnreadTotal[Stream] = UnreadTotal(10 * TOKEN_BYTES)
    streams = [Source(total=total).stream for _ in range(3)]
    for stream in streams:
        total.watch(stream)
        stream.start()
    for count, stream in zip((2, 5, 3), streams, strict=True):
        for token_id in range(count):
            assert stream.put(token_id, now_s=0.0, text="")
    assert total.find_largest() is None  # exactly full
    streams[0].put(9, now_s=0.0, text="")
    assert total.find_largest() is streams[1]
    list(zip(range(2), streams[1], strict=False))  # it reads after all
    assert total.find_largest() is None


def test_a_stream_that_nobody_holds_counts_no_longer() -> None:
    total: UnreadTotal[Stream] = UnreadTotal(3 * TOKEN_BYTES)
    lost, held = Source(total=total), Source(total=total)
    for source in (lost, held):
        total.watch(source.stream)
        source.stream.start()
        for token_id in range(2):
            source.stream.put(token_id, now_s=0.0, text="")
    del lost, source
    gc.collect()
    assert total.find_largest() is None
    held.stream.put(2, now_s=0.0, text="")
    held.stream.put(3, now_s=0.0, text="")
    assert total.find_largest() is held.stream
