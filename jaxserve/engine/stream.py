"""The bounded hand-off of one request's output, from the engine thread to whoever reads it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self

from jaxserve.engine.events import ChoiceFinished, Delta, Event, Finished, Started
from jaxserve.engine.followed import Followed
from jaxserve.engine.reader_account import Decoder, ReaderAccount
from jaxserve.engine.unread import TOKEN_BYTES, Unread, UnreadTotal, logprobs_bytes
from jaxserve.engine.waker import Waiter, Waker
from jaxserve.errors import JaxserveError
from jaxserve.plan import TokenLogprobs

# When a token counts as delivered: its reader has taken it, or has called `acknowledge`.
Delivery = Literal["taken", "acknowledged"]


class Stream:
    """One request's events, for one reader: a thread (`for`) or a task (`async for`).

    `Started`, then each choice's `Delta`s and, of all but the last, its `ChoiceFinished`;
    `Finished` stands for the last choice's end and the request's. The choices' events come in any
    order among each other.

    The writing side never waits. It holds tokens back until the waker gives the stream a turn, but
    its first, and what goes with others that the reader has not taken yet. Tokens that nothing is
    to be said of are not put at all: at its turn the stream takes them from the list that they are
    in (`follow`). What is unread of a choice is merged into one pending delta, and all is bounded
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
        decoders: Sequence[Decoder | None],
        waker: Waker,
        on_cancel: Callable[[], None],
        reader: ReaderAccount,
        delivery: Delivery = "taken",
        total: "UnreadTotal[Stream] | None" = None,
    ) -> None:
        """Args:
        max_bytes: unread output that is kept; one put more ends the request.
        decoders: of each choice, run by the reader over tokens that came without text; None where
          all have text.
        waker: told of a waiting task at each event, and asked for turns for output behind the
          first; flushed by the engine.
        on_cancel: called at most once, by any thread, and never after the end.
        total: told of all that is put.
        """
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.prompt = prompt
        self._max_bytes = max_bytes
        self._decoders = tuple(decoders)
        self._waker = waker
        self._on_cancel = on_cancel
        self.reader = reader
        self._delivery = delivery
        self._total = total
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Shared, under _lock. `put` reads _unread and _num_bytes without it: the engine thread
        # alone adds to them, so it may see more than there is: hands over early, or refuses early.
        self._started = False
        self._cached_prompt_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._unread: dict[int, Unread] = {}  # by choice, the first one first
        self._num_bytes = 0
        self._num_start_bytes = 0
        self._end: Finished | JaxserveError | None = None
        self._is_given_up = False
        self._is_cancelled = False
        self._on_end: Callable[[], None] | None = None
        self._waiter: Waiter | None = None
        self._has_sleeper = False  # a thread, which waits for _changed
        # the engine thread's own
        self._followed: Followed | None = None
        self._held: dict[int, Unread] = {}  # by choice, until this stream has its turn
        self._num_held_bytes = 0
        self._has_output = False  # some has been put
        # the reader's own
        self._has_read_start = False
        self._next: ChoiceFinished | None = None
        self._is_over = False

    # the engine thread's side

    @property
    def num_unread_bytes(self) -> int:
        """All of it, the prompt's log-probabilities too."""
        num_ahead = 0 if self._followed is None else self._followed.num_ahead
        num_held = self._num_held_bytes + TOKEN_BYTES * num_ahead
        return self._num_bytes + num_held + self._num_start_bytes

    def start(
        self, prompt_logprobs: tuple[TokenLogprobs, ...] = (), *, cached_prompt_tokens: int = 0
    ) -> None:
        """The request was scheduled for the first time, or its prompt is scored.

        Args:
          prompt_logprobs: are no output: only the bound on all streams counts them, because nobody
            could have read them any earlier.
        """
        with self._lock:
            self._started = True
            self._cached_prompt_tokens = cached_prompt_tokens
            self._prompt_logprobs = prompt_logprobs
            self._num_start_bytes = logprobs_bytes(prompt_logprobs)
            if self._total is not None:
                self._total.note(self._num_start_bytes)
            self._wake()

    def follow(self, followed: Followed) -> None:
        """Has the only choice's tokens taken as they come, in place of `put`; their text is the
        reader's to make. `hand_over` is to be called of the first, `catch_up` at the end."""
        self._followed = followed

    def catch_up(self, *, is_last_silent: bool = False) -> None:
        """Gives the reader all that has come of who is followed.

        Args:
          is_last_silent: the last token has no text.
        """
        followed = self._followed
        if followed is None or not followed.num_ahead:
            return
        token_ids, ready_s = followed.take()
        undecoded = token_ids[:-1] if is_last_silent else token_ids.copy()
        num_bytes = TOKEN_BYTES * len(token_ids)
        come = Unread(
            token_ids=token_ids, ready_s=ready_s, undecoded=undecoded, num_bytes=num_bytes
        )
        if self._total is not None:
            self._total.note(num_bytes)
        with self._lock:
            if (unread := self._unread.setdefault(0, come)) is not come:
                unread.add(come)
            self._num_bytes += num_bytes
            self._wake()

    def put(
        self,
        token_id: int,
        *,
        now_s: float,
        text: str | None = None,
        index: int = 0,
        logprobs: TokenLogprobs | None = None,
    ) -> bool:
        """Adds a token; False, and nothing is added, where the unread output would be too much.

        Args:
          now_s: when it was on the host.
          text: None leaves the decoding to the reader; "" is a token without text.
          index: the choice that it belongs to.
          logprobs: of this token; None where none are asked for.
        """
        num_bytes = TOKEN_BYTES
        if text:
            is_ascii = text.isascii()
            num_bytes += len(text) if is_ascii else len(text.encode("utf-8", "surrogatepass"))
        if logprobs is not None:
            num_bytes += logprobs_bytes((logprobs,))
        if self._num_bytes + self._num_held_bytes + num_bytes > self._max_bytes:
            return False
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = Unread()
        self._num_held_bytes += num_bytes
        held.num_bytes += num_bytes
        held.token_ids.append(token_id)
        held.ready_s.append(now_s)
        if logprobs is not None:
            held.logprobs.append(logprobs)
        if text is None:
            held.undecoded.append(token_id)
        elif text:
            held.texts.append(text)
        if self._total is not None:
            self._total.note(num_bytes)
        is_half_full = 2 * self._num_held_bytes > self._max_bytes  # the reader must be able to read
        if self._has_output and not self._unread and not is_half_full:
            self._waker.join(self, now_s)
        else:
            self._has_output = True
            self.hand_over()
        return True

    def hand_over(self) -> None:
        """Gives the reader what is held back, or what has come of who is followed, which has
        another turn then."""
        followed = self._followed
        if followed is not None:
            self.catch_up()
            self._waker.rejoin(self, followed.last_s)
            if self._num_bytes > self._max_bytes:
                followed.on_slow()
            return
        with self._lock:
            self._give_held()
            self._wake()

    def finish_choice(self, end: ChoiceFinished, *, last_text: str = "") -> None:
        """Adds the end of a choice that is not the last; `last_text` was held back before it."""
        with self._lock:
            self._started = True  # where it never was: an end before it would be out of order
            self._give_held()
            self._end_choice(end.index, last_text)
            self._unread[end.index].end = end
            self._wake()

    def finish(self, end: Finished | JaxserveError, *, last_text: str = "") -> None:
        """Adds the one terminal event; `last_text` of its choice belongs before it."""
        with self._lock:
            if not self._is_given_up:
                assert self._end is None, f"request {self.request_id} ended twice"
                self._give_held()
                if isinstance(end, Finished):
                    self._end_choice(end.index, last_text)
                self._end = end
            self._followed = None  # the request's lists are not this reader's to keep
            self._wake()
            on_end = self._on_end
        if on_end is not None:
            on_end()

    def give_up(self, error: JaxserveError) -> None:
        """Forgets what is unread, for want of room: the reader gets this error, whatever the end.

        A stream that has not ended must be finished next.
        """
        with self._lock:
            self._followed = None
            self._held.clear()
            self._unread.clear()
            self._prompt_logprobs = ()
            self._num_bytes = self._num_held_bytes = self._num_start_bytes = 0
            self._is_given_up = True
            self._end = error
            self._waker.leave(self)
            self._wake()

    def _end_choice(self, index: int, last_text: str) -> None:
        unread = self._unread.setdefault(index, Unread())
        assert not unread.has_ended, f"choice {index} of {self.request_id} ended twice"
        if last_text:
            unread.texts.append(last_text)
        unread.has_ended = True

    def _give_held(self) -> None:
        """Adds what was held back to what is unread: no turn is needed for it any more."""
        self._waker.leave(self)
        for index, held in self._held.items():
            if (unread := self._unread.setdefault(index, held)) is not held:
                unread.add(held)
        self._held.clear()
        self._num_bytes += self._num_held_bytes
        self._num_held_bytes = 0

    def _wake(self) -> None:
        if self._has_sleeper:
            self._has_sleeper = False
            self._changed.notify_all()
        if self._waiter is not None:
            self._waker.wake(self._waiter)
            self._waiter = None

    # the reader's side

    def __iter__(self) -> Iterator[Event]:
        """Events in order; a reader that stops early cancels the request."""
        try:
            while not self._is_over:
                with self._lock:
                    while not self._is_ready():
                        self._has_sleeper = True
                        self._changed.wait()
                yield self._take()
        finally:
            self._leave()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The same for a task, without a thread: the engine wakes the event loop."""
        try:
            while not self._is_over:
                if (future := self._future()) is not None:
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
        with self._lock:
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
        with self._lock:
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
        is_there = is_start_unread or bool(self._unread) or self._end is not None
        return is_there or self._next is not None

    def _future(self) -> asyncio.Future[None] | None:
        """What to await before the next `_take`; None where something is there."""
        with self._lock:
            if self._is_ready():
                return None
            loop = asyncio.get_running_loop()
            self._waiter = Waiter(loop, loop.create_future())
            return self._waiter.future

    def _take(self) -> Event:
        """The next event; decoding is done unlocked, so that the engine never waits for it."""
        while True:
            if self._next is not None:
                ended, self._next = self._next, None
                return ended
            with self._lock:
                if (started := self._take_start()) is not None:
                    return started
                index = next(iter(self._unread), None)
                if index is None:
                    return self._take_end()
                unread = self._unread.pop(index)
                self._num_bytes -= unread.num_bytes
            if (delta := self._build_delta(index, unread)) is not None:
                return delta

    def _take_start(self) -> Started | None:
        owes_start = self._started or isinstance(self._end, Finished)
        if self._has_read_start or not owes_start:
            return None
        self._has_read_start = True
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        self._num_start_bytes = 0
        return Started(
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _build_delta(self, index: int, unread: Unread) -> Delta | None:
        """Returns what came of a choice, if anything did; its end comes next."""
        text = "".join(unread.texts)
        decoder = self._decoders[index]
        if decoder is not None and (unread.undecoded or unread.has_ended):
            text += self.reader.decode(decoder, unread.undecoded, is_last=unread.has_ended)
        self._next = unread.end
        if unread.ready_s and self._delivery == "taken":
            self.reader.deliver(unread.ready_s)
        if not (unread.token_ids or text):
            return None
        return Delta(
            index=index,
            text=text,
            token_ids=tuple(unread.token_ids),
            logprobs=tuple(unread.logprobs),
            ready_s=tuple(unread.ready_s),
        )

    def _take_end(self) -> Finished:
        end = self._end
        assert end is not None, "woken for nothing"
        self._is_over = True
        if isinstance(end, JaxserveError):
            raise end
        return self.complete(end) if self._delivery == "taken" else end
