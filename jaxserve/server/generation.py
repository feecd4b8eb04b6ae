"""GenerationService: each call becomes one request of the engine, and ends with it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, override

from jaxserve.engine import Engine, Stream
from jaxserve.errors import DuplicateRequestError
from jaxserve.gen import generation_pb2, generation_pb2_grpc
from jaxserve.server import convert, tokenization
from jaxserve.server.answers import Response
from jaxserve.server.asked import read_asked
from jaxserve.server.choice_reply import MAX_DELTA_TOKENS
from jaxserve.server.edge import (
    REQUEST_ID_KEY,
    Context,
    Edge,
    Entered,
    check_request_id,
    find_request_id,
)
from jaxserve.server.fields import refuse_unsupported
from jaxserve.server.replies import Replies
from jaxserve.server.score import ScoreCall
from jaxserve.server.score_items import read_items
from jaxserve.server.submitting import run_in_thread, submit_in_thread
from jaxserve.server.tracing import Operation

INLINE_BYTES: Final = 4096  # a longer request is read and tokenized in a thread


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Holds nothing of a request once its call is over."""

    def __init__(
        self,
        get_engine: Callable[[], Engine],
        edge: Edge,
        threads: ThreadPoolExecutor,
        *,
        form_threads: ThreadPoolExecutor,
    ) -> None:
        """Args:
        get_engine: raises NotServingError until there is one.
        threads: for work that would hold up the event loop.
        form_threads: for requests whose output has a form.
        """
        self._get_engine = get_engine
        self._edge = edge
        self._threads = threads
        self._form_threads = form_threads
        self._scores: dict[tuple[str, str], ScoreCall] = {}  # that run, by tenant and id

    @override
    async def Generate(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        request_id = find_request_id(message.request_id, context)
        operation = _operation(message)
        async with self._edge.call(context, "Generate", request_id, operation=operation) as call:
            opening = self._open(message, context, request_id, call, interval=MAX_DELTA_TOKENS)
            async with opening as (stream, replies):
                response = await self._gather(stream, replies)
            self._edge.check_size(response)
            stream.acknowledge(replies.take_sent())  # as near as gRPC lets a unary call see it
        return response

    @override
    async def StreamGenerate(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        request_id = find_request_id(message.request_id, context)
        interval = message.output.stream_interval or 1
        operation = _operation(message)
        entering = self._edge.call(context, "StreamGenerate", request_id, operation=operation)
        async with entering as call:
            if call.span is not None:
                call.span.is_streaming = True
            opening = self._open(message, context, request_id, call, interval=interval)
            async with opening as (stream, replies):
                async for event in stream:
                    for reply in replies.push(event):
                        self._edge.check_size(reply)
                        await context.write(reply)
                        stream.acknowledge(replies.take_sent())

    @override
    async def Score(
        self, message: generation_pb2.ScoreRequest, context: Context
    ) -> generation_pb2.ScoreResponse:
        request_id = find_request_id(message.request_id, context)
        async with self._edge.call(context, "Score", request_id, operation="score") as entered:
            check_request_id(request_id)
            engine, tenant = self._get_engine(), entered.tenant.name
            deadline_s = _deadline(engine, context)
            refuse_unsupported(message)
            convert.check_model(message.model, engine.model)
            items = await self._in_thread(lambda: read_items(message.items, engine))
            call = ScoreCall(
                engine,
                self._threads,
                message,
                request_id=request_id,
                tenant=tenant,
                deadline_s=deadline_s,
                span=entered.span,
            )
            with self._scoring(call, tenant, request_id):
                response = await call.run(items)
            self._edge.check_size(response)
        return response

    @override
    async def CancelGeneration(
        self, message: generation_pb2.CancelGenerationRequest, context: Context
    ) -> generation_pb2.CancelGenerationResponse:
        entering = self._edge.call(context, "CancelGeneration", message.request_id)
        async with entering as call:
            engine, tenant = self._get_engine(), call.tenant.name
            refuse_unsupported(message)
            if not message.request_id:
                convert.refuse(
                    "request_id is empty; send the id of the request to end", "request_id"
                )
            score = self._scores.get((tenant, message.request_id))
            if score is not None:
                score.cancel()
            found = engine.abort(message.request_id, tenant) or score is not None
        return generation_pb2.CancelGenerationResponse(found=found)

    @override
    async def Tokenize(
        self, message: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        async with self._edge.call(context, "Tokenize"):
            engine = self._get_engine()
            response = await self._in_thread(lambda: tokenization.tokenize(message, engine))
            self._edge.check_size(response)
        return response

    @override
    async def Detokenize(
        self, message: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        async with self._edge.call(context, "Detokenize"):
            engine = self._get_engine()
            response = await self._in_thread(lambda: tokenization.detokenize(message, engine))
            self._edge.check_size(response)
        return response

    async def _gather(self, stream: Stream, replies: Replies) -> generation_pb2.GenerateResponse:
        """Returns the whole answer; stops as soon as it is far too large for a message."""
        response, num_bytes = Response(), 0
        limit = self._get_engine().config.limits.max_message_bytes
        async for event in stream:
            for reply in replies.push(event):
                num_bytes += reply.ByteSize()
                response.add(reply)
                if num_bytes > 2 * limit:
                    self._edge.refuse_size(num_bytes)
                await asyncio.sleep(0)  # each may be large: other calls have their turn
        return response.build()

    @contextlib.asynccontextmanager
    async def _open(
        self,
        message: generation_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        call: Entered,
        *,
        interval: int,
    ) -> AsyncIterator[tuple[Stream, Replies]]:
        """Submits a request, and ends it when the block is left, for whatever reason.

        An end that comes by itself makes the last `cancel` a no-op, so the engine sees an abort
        only for a call that was given up. A flag of the call would not do: a cancel reaches the
        handler as CancelledError, or as an error of the write it cuts short.
        """
        stream, replies = await self._submit(message, context, request_id, call, interval=interval)
        try:
            # Not before this: headers end a client's own retries, which a refusal must not.
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            yield stream, replies
        finally:
            stream.cancel()

    async def _submit(
        self,
        message: generation_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        call: Entered,
        *,
        interval: int,
    ) -> tuple[Stream, Replies]:
        with self._edge.counting_refusals():
            check_request_id(request_id)
            engine = self._get_engine()
        deadline_s = _deadline(engine, context)

        def submit() -> tuple[Stream, Replies]:
            with convert.naming_fields():
                with self._edge.counting_refusals():
                    asked = read_asked(
                        message,
                        engine,
                        request_id=request_id,
                        tenant=call.tenant.name,
                        deadline_s=deadline_s,
                        interval=interval,
                    )
                request = asked.request
                if call.span is not None:
                    request = dataclasses.replace(request, on_end=call.span.note_end)
                stream = engine.submit(request, delivery="acknowledged")
                if call.span is not None:
                    call.span.accept()
            return stream, asked.open_replies(engine, stream)

        if _is_quick(message):
            return submit()
        threads = self._form_threads if _has_form(message) else self._threads
        return await submit_in_thread(threads, submit, stream_of=lambda opened: opened[0])

    @contextlib.contextmanager
    def _scoring(self, call: ScoreCall, tenant: str, request_id: str) -> Iterator[None]:
        """Makes a Score call be found by its id while the block runs."""
        key = tenant, request_id
        if key in self._scores:
            raise DuplicateRequestError(
                f"request_id {request_id!r} is in flight; use another, or wait for its end",
                field="request_id",
            )
        self._scores[key] = call
        try:
            yield
        finally:
            del self._scores[key]

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        return await run_in_thread(self._threads, call)


def _operation(message: generation_pb2.GenerateRequest) -> Operation:
    return "chat" if message.HasField("chat") else "text_completion"


def _has_form(message: generation_pb2.GenerateRequest) -> bool:
    """Whether a grammar is to be compiled: of a form, or of the calls that are demanded."""
    return message.HasField("structured_output") or message.chat.HasField("tool_choice")


def _is_quick(message: generation_pb2.GenerateRequest) -> bool:
    """Whether reading it takes no longer than a thread's turn: it is short, and nothing in it is
    rendered or compiled."""
    is_masked = message.HasField("structured_output") or bool(message.sampling.bad_words)
    return not (is_masked or message.HasField("chat") or message.ByteSize() > INLINE_BYTES)


def _deadline(engine: Engine, context: Context) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else engine.now() + remaining_s
