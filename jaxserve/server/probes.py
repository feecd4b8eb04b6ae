"""Bounds on health calls: they need no key, and must not take the room of those that have one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, override

import grpc

from jaxserve.server.guard import FREE

MAX_CHECKS: Final = 64  # open at once, over all connections
MAX_WATCHES: Final = 64
PATIENCE_S: Final = 5.0  # a call whose message has not come by then is given up


class ProbeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Lets a bounded number of health calls be open, of each kind, and none wait for its message.

    grpc counts a call from its headers on, and a handler of one message begins when that has come:
    whoever sends only headers would hold a place for ever. So these begin at once, as streams do.
    """

    def __init__(self) -> None:
        self._checks = asyncio.Semaphore(MAX_CHECKS)
        self._watches = asyncio.Semaphore(MAX_WATCHES)

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # grpc's handlers are tuples without a public type
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(FREE):
            return handler
        bounded = self._watch if handler.response_streaming else self._check
        build = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return build(bounded(handler), handler.request_deserializer, handler.response_serializer)

    def _check(self, handler: Any) -> Callable[[object, Any], Awaitable[object]]:  # noqa: ANN401
        async def check(messages: object, context: Any) -> object:  # noqa: ANN401
            async with _place(self._checks, context) as message:
                return await handler.unary_unary(message, context)

        return check

    def _watch(self, handler: Any) -> Callable[[object, Any], Awaitable[None]]:  # noqa: ANN401
        async def watch(messages: object, context: Any) -> None:  # noqa: ANN401
            async with _place(self._watches, context) as message:
                await handler.unary_stream(message, context)

        return watch


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore, context: Any) -> AsyncIterator[object]:  # noqa: ANN401
    """Holds a place while the block runs; yields the call's message."""
    if places.locked():
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health calls are open; try again later"
        )
    async with places:
        try:
            message = await asyncio.wait_for(context.read(), PATIENCE_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
        yield message
