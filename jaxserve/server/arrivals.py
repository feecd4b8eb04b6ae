"""Calls whose message has yet to come: they have a place from their headers on, and some time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, override

import grpc

from jaxserve.errors import DeadlineError, InvalidRequestError, JaxserveError
from jaxserve.server.edge import Edge, find_method
from jaxserve.server.guard import FREE

PATIENCE_S: Final = 30.0  # the largest message at 4.5 Mbit/s
MAX_STREAMS: Final = 32  # of reflection, open at once over all connections
STREAM_S: Final = 60.0  # a tool asks for what it needs at once


class ArrivalInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Has every call of one message begin with its headers, as streams do.

    grpc counts a call from its headers on, and begins a handler of one message when that has come:
    who sends only headers would hold grpc's last places, those of probes too, for ever.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._streams = asyncio.Semaphore(MAX_STREAMS)

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # grpc's handlers are tuples without a public type
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or path.startswith(FREE):
            return handler
        if handler.request_streaming:
            return handler._replace(stream_stream=self._bounded(handler.stream_stream))
        is_streaming = handler.response_streaming
        behavior = handler.unary_stream if is_streaming else handler.unary_unary
        build = (
            grpc.stream_stream_rpc_method_handler
            if is_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return build(
            self._arriving(behavior, find_method(path)),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _arriving(
        self, behavior: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def call(messages: object, context: Any) -> Any:  # noqa: ANN401
            try:
                with self._edge.taking_place():
                    message = await _read(context, method)
            except JaxserveError as error:
                await self._edge.refuse(context, method, error)
            # the place is taken again before anybody else has his turn
            return await behavior(message, context)

        return call

    def _bounded(
        self, behavior: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(messages: object, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
            if self._streams.locked():
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "too many calls of reflection are open; try again later",
                )
            async with self._streams:
                try:
                    async with asyncio.timeout(STREAM_S):
                        async for reply in behavior(messages, context):
                            yield reply
                except TimeoutError:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        f"a call of reflection may take {STREAM_S:g} s; begin another",
                    )

        return call


async def _read(context: Any, method: str) -> object:  # noqa: ANN401
    try:
        message: object = await asyncio.wait_for(context.read(), PATIENCE_S)
    except TimeoutError:
        raise DeadlineError(
            f"the message of {method} did not come within {PATIENCE_S:g} s; send it with its call"
        ) from None
    if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        raise InvalidRequestError(f"the call of {method} has no message; send one")
    return message
