"""The bounded hand-off of one request's output, from the engine thread to whoever reads it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

from jaxserve.engine.events import Delta, Event, Finished, Started
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.errors import JaxserveError

TOKEN_BYTES = 8  # of an unread token id, for the buffer's account

# When a token counts as delivered: its reader has taken it, or has called `acknowledge`.
Delivery = Literal["taken", "acknowledged"]


class Decoder(Protocol):
    """Token ids to text, a few at a time: `text.Detokenizer`, or a test's."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class Waker:
    """Wakes the tasks that wait for streams: all of one event loop with one call.

    A call into a loop from another thread writes to a socket, which costs more than all else that a
    token costs here. The engine thread alone uses it, and flushes before it waits for anything.
    """

    def __init__(self) -> None:
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        loop, future = waiter
        self._futures.setdefault(loop, []).append(future)

    def flush(self) -> None:
        if not self._futures:
            return
        waiting, self._futures = self._futures, {}
        for loop, futures in waiting.items():
            # a closed loop has no reader left; its tasks' own ends cancel the requests
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, futures)


class Stream:
    """One request's events, for one reader: a thread (`for`) or a task (`async for`).

    The writing side never waits: what is unread is merged into one pending delta, and is bounded
    in bytes. The reading side ends with `Finished`, or raises the request's error, once. A reader
    that leaves early (break, close, an exception, a cancelled task) cancels the request.

    Attributes:
      request_id: as asked, or as made by the engine.
      prompt_tokens: length of the prompt.
      prompt: its token ids.
      reader: the time that passes on the reader's side.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_tokens: int,
        prompt: tuple[int, ...] = (),
        max_bytes: int,
        decoder: Decoder | None,
        waker: Waker,
        on_cancel: Callable[[], None],
        reader: ReaderAccount,
        delivery: Delivery = "taken",
    ) -> None:
        """Args:
        max_bytes: unread output that is kept; one put more ends the request.
        decoder: run by the reader over tokens that came without text; None where all have text.
        waker: told of a waiting task at each event; flushed by the engine.
        on_cancel: called at most once, by any thread, and never after the end.
        """
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.prompt = prompt
        self._max_bytes = max_bytes
        self._decoder = decoder
        self._waker = waker
        self._on_cancel = on_cancel
        self.reader = reader
        self._delivery = delivery
        self._changed = threading.Condition()
        # shared, under _changed
        self._started = False
        self._token_ids: list[int] = []
        self._ready_s: list[float] = []
        self._undecoded: list[int] = []
        self._texts: list[str] = []
        self._num_bytes = 0
        self._end: Finished | JaxserveError | None = None
        self._is_cancelled = False
        self._on_end: Callable[[], None] | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        # the reader's own
        self._has_read_start = False
        self._is_flushed = False
        self._is_over = False

    # the engine thread's side

    def start(self) -> None:
        """The request was scheduled for the first time."""
        with self._changed:
            self._started = True
            self._wake()

    def put(self, token_id: int, *, now_s: float, text: str | None = None) -> bool:
        """Adds a token; False, and nothing is added, where the unread output would be too much.

        Args:
          now_s: when it was on the host.
          text: None leaves the decoding to the reader; "" is a token without text.
        """
        num_bytes = TOKEN_BYTES + (len(text.encode()) if text else 0)
        with self._changed:
            if self._num_bytes + num_bytes > self._max_bytes:
                return False
            self._num_bytes += num_bytes
            self._token_ids.append(token_id)
            self._ready_s.append(now_s)
            if text is None:
                self._undecoded.append(token_id)
            elif text:
                self._texts.append(text)
            self._wake()
        return True

    def finish(self, end: Finished | JaxserveError, *, last_text: str = "") -> None:
        """Adds the one terminal event; `last_text` was held back and belongs before it."""
        with self._changed:
            assert self._end is None, f"request {self.request_id} ended twice"
            if last_text:
                self._texts.append(last_text)
            self._end = end
            self._wake()
            on_end = self._on_end
        if on_end is not None:
            on_end()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiter is not None:
            self._waker.add(self._waiter)
            self._waiter = None

    # the reader's side

    def __iter__(self) -> Iterator[Event]:
        """Events in order; a reader that stops early cancels the request."""
        try:
            while not self._is_over:
                with self._changed:
                    self._changed.wait_for(self._is_ready)
                yield self._take()
        finally:
            self._leave()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The same for a task, without a thread: the engine wakes the event loop."""
        try:
            while not self._is_over:
                while (future := self._future()) is not None:
                    await future
                yield self._take()
        finally:
            self._leave()

    def _leave(self) -> None:
        self.cancel()
        self.reader.close()

    def call_at_end(self, on_end: Callable[[], None]) -> None:
        """Has `on_end` called once at the end, by the engine's thread; now, where it has ended.

        Who waits for many streams learns so which of them ended. It must be quick, and not raise.
        """
        with self._changed:
            assert self._on_end is None, "a stream has one reader"
            self._on_end = on_end
            has_ended = self._end is not None
        if has_ended:
            on_end()

    def acknowledge(self, ready_s: Sequence[float]) -> None:
        """Tells that tokens were carried on: the `ready_s` of their deltas."""
        self.reader.deliver(ready_s)

    def complete(self, finished: Finished) -> Finished:
        """Returns this stream's end with its delivery, all tokens having been carried on."""
        return self.reader.complete(finished)

    def cancel(self) -> None:
        """Asks the engine to end the request; nothing happens where it has ended."""
        with self._changed:
            if self._end is not None or self._is_cancelled:
                return
            self._is_cancelled = True
        self._on_cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _is_ready(self) -> bool:
        is_start_unread = self._started and not self._has_read_start
        return is_start_unread or bool(self._token_ids) or self._end is not None

    def _future(self) -> asyncio.Future[None] | None:
        """What to await before the next `_take`; None where something is there."""
        with self._changed:
            if self._is_ready():
                return None
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiter = (loop, future)
            return future

    def _take(self) -> Event:
        """The next event; decoding is done unlocked, so that the engine never waits for it."""
        with self._changed:
            end = self._end
            owes_start = self._started or isinstance(end, Finished)
            if owes_start and not self._has_read_start:
                self._has_read_start = True
                return Started(request_id=self.request_id, prompt_tokens=self.prompt_tokens)
            token_ids, self._token_ids = self._token_ids, []
            ready_s, self._ready_s = self._ready_s, []
            undecoded, self._undecoded = self._undecoded, []
            texts, self._texts = self._texts, []
            self._num_bytes = 0
        text = "".join(texts)
        text += self.reader.decode(lambda: self._decode(undecoded, end))
        if ready_s and self._delivery == "taken":
            self.reader.deliver(ready_s)
        if token_ids or text:
            return Delta(index=0, text=text, token_ids=tuple(token_ids), ready_s=tuple(ready_s))
        assert end is not None, "woken for nothing"
        self._is_over = True
        if isinstance(end, JaxserveError):
            raise end
        return self.complete(end) if self._delivery == "taken" else end

    def _decode(self, token_ids: list[int], end: Finished | JaxserveError | None) -> str:
        if self._decoder is None:
            return ""
        text = self._decoder.push(token_ids) if token_ids else ""
        if isinstance(end, Finished) and not self._is_flushed:
            self._is_flushed = True
            text += self._decoder.flush()
        return text


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
