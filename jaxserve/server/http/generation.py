"""`/v1/completions` and `/v1/chat/completions`: each call becomes requests of the engine, and ends
with them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from jaxserve.engine import Engine, Stream
from jaxserve.errors import InvalidRequestError
from jaxserve.server.door import Door
from jaxserve.server.http.call import Call
from jaxserve.server.http.edge import counting_refusals, do_until_gone
from jaxserve.server.http.sending import Sender
from jaxserve.server.json_text import parse_json
from jaxserve.server.openai import Asked, read_asked
from jaxserve.server.submitting import run_in_thread, submit_in_thread

INLINE_BYTES: Final = 4096  # a longer body is read and tokenized in a thread


@dataclasses.dataclass(slots=True, kw_only=True)
class Opened:
    """What a body asked for, in the engine.

    Attributes:
      streams: one for each request, in their order.
    """

    asked: Asked
    streams: Sequence[Stream]

    def cancel(self) -> None:
        """Ends what has not ended."""
        for stream in self.streams:
            stream.cancel()


class GenerationEndpoint:
    """Holds nothing of a request once its call is over."""

    def __init__(self, door: Door, url: str) -> None:
        """Args:
        url: a key of `ENDPOINTS`.
        """
        self._door = door
        self._url = url

    async def __call__(self, call: Call) -> None:
        """Answers with one body, or with a stream."""
        with counting_refusals(self._door):
            self._door.get_engine()  # before a body is read that nobody could answer
        body = await call.read_body()
        await do_until_gone(call, self._answer(call, body))

    async def _answer(self, call: Call, body: bytes) -> None:
        engine = self._door.get_engine()
        opened = await self._open(engine, call, body)
        try:
            sender = Sender(self._door, engine, call, opened.asked, opened.streams)
            if opened.asked.stream is None:
                await sender.send_whole()
            else:
                await sender.send_stream()
        finally:
            # an end that came by itself makes this a no-op: the engine sees an abort only of a call
            # that was given up
            opened.cancel()

    async def _open(self, engine: Engine, call: Call, body: bytes) -> Opened:
        def read() -> Asked:
            with counting_refusals(self._door):
                return read_asked(self._url, _parse(body), engine=engine)

        is_short = len(body) <= INLINE_BYTES and self._url == "/v1/completions"
        asked = read() if is_short else await self._in_thread(read)
        if call.span is not None:
            call.span.is_streaming = asked.stream is not None

        def submit() -> Opened:
            return Opened(asked=asked, streams=_submit(engine, call, asked))

        threads = self._door.threads
        if any(request.structured_output for request in asked.requests):
            threads = self._door.form_threads
        elif is_short and not any(request.sampling.bad_words for request in asked.requests):
            return submit()
        return await submit_in_thread(threads, submit, stream_of=lambda opened: opened)

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        return await run_in_thread(self._door.threads, call)


def _parse(body: bytes) -> object:
    try:
        return parse_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error


def _submit(engine: Engine, call: Call, asked: Asked) -> list[Stream]:
    """Returns the streams; where one request is refused, none begins."""
    deadline_s = None
    if asked.timeout_s is not None:
        deadline_s = engine.now() + asked.timeout_s - (time.monotonic() - call.arrival_s)
    streams: list[Stream] = []
    with contextlib.ExitStack() as stack:
        for index, request in enumerate(asked.requests):
            named = dataclasses.replace(
                request,
                id=f"{call.request_id}-{index}" if index else call.request_id,
                tenant=call.tenant,
                deadline_s=deadline_s,
                on_end=call.span.note_end if call.span else None,
            )
            stream = engine.submit(named, delivery="acknowledged")
            if call.span:
                call.span.accept()
            stack.callback(stream.cancel)
            streams.append(stream)
        stack.pop_all()
    return streams
