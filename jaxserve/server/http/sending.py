"""What streams give, as one body or as server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from jaxserve.engine import Delta, Engine, Event, Finished, Started, Stream
from jaxserve.errors import HttpError, InvalidRequestError, JaxserveError
from jaxserve.plan import TokenLogprobs
from jaxserve.server.door import Door
from jaxserve.server.http.call import Call
from jaxserve.server.http.reply import DONE, Reply, build_json, to_event
from jaxserve.server.openai import Asked, ReplyWriter, WholeReply, build_error, open_chat
from jaxserve.server.submitting import run_in_thread

MANY_TOKENS: Final = 64  # whose log-probabilities take long enough to be written in a thread
ENTRY_BYTES: Final = 24  # of a log-probability, at least


class Sender:
    """Sends the reply to one call."""

    def __init__(
        self, door: Door, engine: Engine, call: Call, asked: Asked, streams: Sequence[Stream]
    ) -> None:
        """Args:
        streams: of `asked.requests`.
        """
        self._door = door
        self._engine = engine
        self._call = call
        self._asked = asked
        self._streams = streams
        self._num_bytes = 0  # of a whole reply, at least
        self._begun: set[tuple[int, int]] = set()  # choices whose echo has been written

    async def send_whole(self) -> None:
        """Sends one body, when all is there.

        Raises:
          JaxserveError: what the first stream to fail ended with; or it would be too large.
        """
        whole = WholeReply(self._asked, **self._settings())
        gathered: list[tuple[int, Event]] = []
        async with contextlib.aclosing(_read(self._streams)) as events:
            async for index, event in events:
                gathered.append((index, event))
                self._count(event)
        limit = self._door.config.limits.max_message_bytes

        def render() -> Reply:
            for index, event in gathered:
                whole.push(index, event)
            return build_json(whole.build())

        is_long = self._asked.logprobs is not None or self._asked.prompt_logprobs is not None
        reply = await run_in_thread(self._door.threads, render) if is_long else render()
        if len(reply.body) > limit:
            raise self._refusal(len(reply.body))
        await self._call.reply(reply)
        for index, stream in enumerate(self._streams):
            stream.acknowledge(whole.take_sent(index))  # as near as one body lets us see it

    async def send_stream(self) -> None:
        """Sends chunks; the reply begins with the first, so that errors before it have a status.

        Raises:
          JaxserveError: what the first stream to fail ended with, before anything was sent.
        """
        call = self._call
        writer = ReplyWriter(self._asked, interval=self._asked.stream_interval, **self._settings())
        try:
            async with contextlib.aclosing(_read(self._streams)) as events:
                async for index, event in events:
                    chunks = await self._write(writer, index, event)
                    if not chunks:
                        continue
                    if call.status is None:
                        await call.start_events()
                    await call.send_events(chunks)
                    self._streams[index].acknowledge(writer.take_sent(index))
            await call.send_events(b"".join(map(to_event, writer.end())) + DONE)
        except HttpError:
            raise  # of the connection: there is nobody to hear of it
        except JaxserveError as error:
            if call.status is None:
                raise
            # nothing follows it: the mark of the end stands behind whole replies alone
            await call.send_events(to_event(build_error(error)))
        await call.end_events()

    def _settings(self) -> dict[str, Any]:
        return {
            "prompts": [stream.prompt for stream in self._streams],
            "model_name": self._engine.model.name,
            "created_s": time.time(),
            "tokenizer": self._engine.tokenizer,
            "chat": open_chat(self._asked, self._engine, self._streams[0].prompt),
        }

    async def _write(self, writer: ReplyWriter, index: int, event: Event) -> bytes:
        """Returns the chunks that are due; many tokens' take a thread, others have their turn."""

        def render() -> bytes:
            return b"".join(map(to_event, writer.push(index, event)))

        if self._asked.logprobs is None or isinstance(event, Started):
            return render()
        num_tokens = len(event.logprobs) if isinstance(event, Delta) else 0
        choice = (index, event.index)
        if self._asked.echo and choice not in self._begun:
            num_tokens += len(self._streams[index].prompt)
        self._begun.add(choice)
        if num_tokens <= MANY_TOKENS:
            return render()
        return await run_in_thread(self._door.threads, render)

    def _count(self, event: Event) -> None:
        """Raises for a whole reply that is going to be far too large, before all of it is there."""
        match event:
            case Started():
                echoes = self._asked.num_choices if self._asked.echo else 1
                self._num_bytes += echoes * _size_of(event.prompt_logprobs)
            case Delta():
                self._num_bytes += len(event.text)
                self._num_bytes += _size_of(event.logprobs)
        if self._num_bytes > 2 * self._door.config.limits.max_message_bytes:
            raise self._refusal(self._num_bytes)

    def _refusal(self, num_bytes: int) -> InvalidRequestError:
        limit = self._door.config.limits.max_message_bytes
        return InvalidRequestError(
            f"the reply has {num_bytes} bytes, but the limit of a whole one is {limit} "
            "(limits.max_message_bytes); ask for less, or stream it"
        )


def _size_of(entries: Sequence[TokenLogprobs]) -> int:
    return sum(ENTRY_BYTES * (1 + len(entry.top_ids)) for entry in entries)


async def _read(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event]]:
    """Yields the events of all streams as they come, each with its stream's place.

    Raises:
      JaxserveError: what the first stream to fail ended with.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, _complete(streams[0], event)
        return
    # bounded: what waits stays in the streams, whose bounds count it
    ready: asyncio.Queue[tuple[int, Event | JaxserveError]] = asyncio.Queue(maxsize=1)

    async def read(index: int) -> None:
        try:
            async for event in streams[index]:
                await ready.put((index, event))
        except JaxserveError as error:
            await ready.put((index, error))

    readers = [asyncio.create_task(read(index)) for index in range(len(streams))]
    num_left = len(streams)
    try:
        while num_left:
            index, came = await ready.get()
            if isinstance(came, JaxserveError):
                raise came
            num_left -= isinstance(came, Finished)
            yield index, _complete(streams[index], came)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _complete(stream: Stream, event: Event) -> Event:
    """Returns an end with its delivery: all before it has been sent."""
    return stream.complete(event) if isinstance(event, Finished) else event
