"""Bytes that are no message of a service here end their call as any other bad request does.

grpc's own answer is UNKNOWN, without details, and a traceback in the log.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, override

import grpc
from google.protobuf.message import DecodeError, Message

from jaxserve.errors import InvalidRequestError
from jaxserve.server.edge import OURS, Edge, find_method
from jaxserve.server.vllm_engine import SERVICE

SERVED: Final = (OURS, f"/{SERVICE}/")


@dataclasses.dataclass(slots=True, frozen=True)
class _Undecodable:
    """Stands in for the message until the call can be refused."""

    num_bytes: int


class UndecodableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Refuses undecodable messages to our services with INVALID_ARGUMENT."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # grpc's handlers are tuples without a public type
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(SERVED):
            return handler
        assert not handler.request_streaming, "each of our calls begins with one message"
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        refusing = self._refusing(getattr(handler, kind), find_method(method))
        read = functools.partial(_read, handler.request_deserializer)
        return handler._replace(request_deserializer=read, **{kind: refusing})

    def _refusing(
        self, behavior: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def call(message: Message | _Undecodable, context: Any) -> Any:  # noqa: ANN401
            if not isinstance(message, _Undecodable):
                return await behavior(message, context)
            async with self._edge.call(context, method):
                raise InvalidRequestError(
                    f"the request's {message.num_bytes} bytes are not a message of {method}; "
                    "build it from the service's proto"
                )

        return call


def _read(parse: Callable[[bytes], Message], data: bytes) -> Message | _Undecodable:
    try:
        return parse(data)
    except DecodeError:
        return _Undecodable(len(data))
