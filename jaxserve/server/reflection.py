"""gRPC reflection: what a server offers, for tools that have no protos."""

from collections.abc import Sequence
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serves both versions: the library registers v1alpha alone, and clients ask v1 first.

    Their messages are the same on the wire, so one servicer does for both.
    """
    names = [*services, reflection.SERVICE_NAME, REFLECTION_V1]
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # as above
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
