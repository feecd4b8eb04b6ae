"""Bytes that are no message of a service here end their call as any other bad request does.

grpc's own answer is UNKNOWN, without details, and a traceback in the log.
"""

import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, override

import grpc
from google.protobuf.message import DecodeError, Message

from jaxserve.errors import InvalidRequestError
from jaxserve.server.edge import OURS, Edge, find_method
from jaxserve.server.vllm_engine import SERVICE

NO_MESSAGE: Final = "the bytes are no message of this method; build it from the service's proto"
SERVED: Final = (OURS, f"/{SERVICE}/")


@dataclasses.dataclass(slots=True, frozen=True)
class _Undecodable:
    """Stands in for the message until the call can be refused."""

    num_bytes: int


class UndecodableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Refuses undecodable messages with INVALID_ARGUMENT, to our services with its details too."""

    def __init__(self, edge: Edge | None = None) -> None:
        """Args:
        edge: of our services; None where there is none of them.
        """
        self._edge = edge

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # grpc's handlers are tuples without a public type
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        behavior = getattr(handler, kind)
        refusing: Callable[..., Any]
        if method.startswith(SERVED):
            assert not handler.request_streaming, "each of our calls begins with one message"
            refusing = self._refusing(behavior, find_method(method))
        elif handler.request_streaming:
            refusing = _refusing_in_stream(behavior)
        else:
            refusing = _refusing_plainly(behavior)
        read = functools.partial(_read, handler.request_deserializer)
        return handler._replace(request_deserializer=read, **{kind: refusing})

    def _refusing(
        self, behavior: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def call(message: Message | _Undecodable, context: Any) -> Any:  # noqa: ANN401
            if not isinstance(message, _Undecodable):
                return await behavior(message, context)
            assert self._edge is not None, "a service of ours without an edge"
            async with self._edge.call(context, method):
                raise InvalidRequestError(
                    f"the request's {message.num_bytes} bytes are not a message of {method}; "
                    "build it from the service's proto"
                )

        return call


def _refusing_plainly(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Of health, which needs no key and is no call of an edge."""

    async def call(message: Message | _Undecodable, context: Any) -> Any:  # noqa: ANN401
        if isinstance(message, _Undecodable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
        return await behavior(message, context)

    return call


def _refusing_in_stream(
    behavior: Callable[..., AsyncIterator[Any]],
) -> Callable[..., AsyncIterator[Any]]:
    """Of reflection, which answers one message after the other."""

    async def call(messages: AsyncIterator[Message | _Undecodable], context: Any) -> Any:  # noqa: ANN401
        async def decoded() -> AsyncIterator[Message]:
            async for message in messages:
                if isinstance(message, _Undecodable):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
                else:
                    yield message

        async for reply in behavior(decoded(), context):
            yield reply

    return call


def _read(parse: Callable[[bytes], Message], data: bytes) -> Message | _Undecodable:
    try:
        return parse(data)
    except DecodeError:
        return _Undecodable(len(data))
