"""Lets nobody without a valid key reach a service, before anything of the message is read."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, override

import grpc

from jaxserve.errors import UnauthenticatedError
from jaxserve.server.edge import Edge, find_method

FREE: Final = "/grpc.health.v1.Health/"  # probes have no keys


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Refuses every call but health's with UNAUTHENTICATED, unless its key is valid."""

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
        if handler is None or method.startswith(FREE):
            return handler  # a method that is not there is UNIMPLEMENTED for everyone
        try:
            self._edge.authenticate(handler_call_details.invocation_metadata)
        except UnauthenticatedError as error:
            return self._refuse(error, find_method(method))
        return handler

    def _refuse(
        self, error: UnauthenticatedError, method: str
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Returns a handler that reads no message: that is what a stream of them begins with."""

        async def refuse(messages: object, context: Any) -> None:  # noqa: ANN401
            await self._edge.refuse(context, method, error)

        return grpc.stream_stream_rpc_method_handler(refuse)
