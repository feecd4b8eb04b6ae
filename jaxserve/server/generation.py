"""GenerationService: each call becomes one request of the engine, and ends with it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, override

from jaxserve.engine import Engine, Stream, limits
from jaxserve.engine.fields import check_text
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2, generation_pb2_grpc
from jaxserve.server import convert
from jaxserve.server.edge import (
    REQUEST_ID_KEY,
    Context,
    Edge,
    check_request_id,
    find_request_id,
)
from jaxserve.server.fields import refuse_unsupported
from jaxserve.server.replies import MAX_DELTA_TOKENS, Replies

INLINE_BYTES: Final = 4096  # a longer request is read and tokenized in a thread


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Holds nothing of a request once its call is over."""

    def __init__(
        self, get_engine: Callable[[], Engine], edge: Edge, threads: ThreadPoolExecutor
    ) -> None:
        """Args:
        get_engine: raises NotServingError until there is one.
        threads: for work that would hold up the event loop.
        """
        self._get_engine = get_engine
        self._edge = edge
        self._threads = threads

    @override
    async def Generate(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        request_id = find_request_id(message.request_id, context)
        async with self._edge.call(context, "Generate", request_id):
            async with self._open_stream(message, context, request_id) as stream:
                replies = self._replies(message, stream, interval=MAX_DELTA_TOKENS)
                messages = [reply async for event in stream for reply in replies.push(event)]
            response = convert.build_response(messages)
            self._edge.check_size(response)
            stream.acknowledge(replies.take_sent())  # as near as gRPC lets a unary call see it
        return response

    @override
    async def StreamGenerate(
        self, message: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        request_id = find_request_id(message.request_id, context)
        async with (
            self._edge.call(context, "StreamGenerate", request_id),
            self._open_stream(message, context, request_id) as stream,
        ):
            interval = message.output.stream_interval or 1
            replies = self._replies(message, stream, interval=interval)
            async for event in stream:
                for reply in replies.push(event):
                    await context.write(reply)
                    stream.acknowledge(replies.take_sent())

    @override
    async def Tokenize(
        self, message: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        async with self._edge.call(context, "Tokenize"):
            response = await self._in_thread(lambda: self._tokenize(message))
            self._edge.check_size(response)
        return response

    @override
    async def Detokenize(
        self, message: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        async with self._edge.call(context, "Detokenize"):
            response = await self._in_thread(lambda: self._detokenize(message))
            self._edge.check_size(response)
        return response

    @contextlib.asynccontextmanager
    async def _open_stream(
        self, message: generation_pb2.GenerateRequest, context: Context, request_id: str
    ) -> AsyncIterator[Stream]:
        """Submits a request, and ends it when the block is left, for whatever reason.

        An end that comes by itself makes the last `cancel` a no-op, so the engine sees an abort
        only for a call that was given up. A flag of the call would not do: a cancel reaches the
        handler as CancelledError, or as an error of the write it cuts short.
        """
        stream = await self._submit(message, context, request_id)
        try:
            # Not before this: headers end a client's own retries, which a refusal must not.
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            yield stream
        finally:
            stream.cancel()

    async def _submit(
        self, message: generation_pb2.GenerateRequest, context: Context, request_id: str
    ) -> Stream:
        with self._edge.counting_refusals():
            check_request_id(request_id)
            engine = self._get_engine()
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else engine.now() + remaining_s

        def submit() -> Stream:
            with self._edge.counting_refusals():
                refuse_unsupported(message)
                convert.check_model(message.model, engine.model)
                asked = convert.read_generate(
                    message, request_id=request_id, deadline_s=deadline_s, model=engine.model
                )
            return engine.submit(asked, delivery="acknowledged")

        if message.ByteSize() <= INLINE_BYTES and not message.HasField("chat"):
            return submit()
        submitted = asyncio.get_running_loop().run_in_executor(self._threads, submit)
        try:
            return await asyncio.shield(submitted)
        except asyncio.CancelledError:
            # the thread cannot be stopped: give up its stream when it has one
            submitted.add_done_callback(_cancel_stream)
            raise

    def _replies(
        self, message: generation_pb2.GenerateRequest, stream: Stream, *, interval: int
    ) -> Replies:
        model = self._get_engine().model
        return Replies(message.output, model, interval=interval, complete=stream.complete)

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _tokenize(self, message: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        engine = self._get_engine()
        refuse_unsupported(message)
        convert.check_model(message.model, engine.model)
        response = generation_pb2.TokenizeResponse(max_model_tokens=engine.model.max_model_tokens)
        match message.WhichOneof("input"):
            case "text":
                check_text(message.text, "text", engine.config.limits.max_prompt_bytes)
                is_added = message.add_special_tokens or not message.HasField("add_special_tokens")
                token_ids, offsets = engine.tokenizer.encode_with_offsets(
                    message.text, add_special_tokens=is_added
                )
                response.token_ids.extend(token_ids)
                if message.include_offsets:
                    response.start_offsets.extend(start for start, _ in offsets)
                    response.end_offsets.extend(end for _, end in offsets)
            case "chat":
                _refuse_text_options(message)
                response.token_ids.extend(
                    limits.tokenize(
                        convert.read_chat(message.chat),
                        model=engine.model,
                        tokenizer=engine.tokenizer,
                        limits=engine.config.limits,
                    )
                )
            case _:
                raise InvalidRequestError("input is missing; set text or chat", field="input")
        return response

    def _detokenize(
        self, message: generation_pb2.DetokenizeRequest
    ) -> generation_pb2.DetokenizeResponse:
        engine = self._get_engine()
        refuse_unsupported(message)
        convert.check_model(message.model, engine.model)
        highest = max(message.token_ids, default=0)
        if highest >= engine.model.vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is not in this model's vocabulary, whose ids are 0 to "
                f"{engine.model.vocab_size - 1}; use ids of its tokenizer",
                field="token_ids",
            )
        is_skipped = message.skip_special_tokens or not message.HasField("skip_special_tokens")
        text = engine.tokenizer.decode(message.token_ids, skip_special_tokens=is_skipped)
        return generation_pb2.DetokenizeResponse(text=text)


def _refuse_text_options(message: generation_pb2.TokenizeRequest) -> None:
    """Raises for an option that a conversation has no use for: its template says it all."""
    for field in ("add_special_tokens", "include_offsets"):
        if getattr(message, field):
            raise InvalidRequestError(
                f"{field} is for text; leave it out with a conversation", field=field
            )


def _cancel_stream(submitted: asyncio.Future[Stream]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
