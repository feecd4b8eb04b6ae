"""gRPC reflection: what a server offers, for tools that have no protos."""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

PACKAGE_V1: Final = "grpc.reflection.v1"
PACKAGE_V1ALPHA: Final = "grpc.reflection.v1alpha"
REFLECTION_V1: Final = f"{PACKAGE_V1}.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serves both versions: the library registers v1alpha alone, and clients ask v1 first.

    Their messages are the same on the wire, so one servicer does for both.
    """
    names = [*services, reflection.SERVICE_NAME, REFLECTION_V1]
    pool = _build_pool([*services, reflection.SERVICE_NAME])
    reflection.enable_server_reflection(names, server, pool=pool)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)  # type: ignore[attr-defined]  # no types
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))


def _build_pool(services: Sequence[str]) -> descriptor_pool.DescriptorPool:
    """Returns the files of these services, and reflection v1's: a tool that asks for the methods of
    all services fails at one that is not described.

    The pool is of its own, so that the process may also import a library's file of the same name.
    """
    known, pool = descriptor_pool.Default(), descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for needed in file.dependencies:
                add(needed)
            pool.AddSerializedFile(file.serialized_pb)

    for service in services:
        add(known.FindFileContainingSymbol(service))
    alpha = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    text = text_format.MessageToString(alpha).replace(PACKAGE_V1ALPHA, PACKAGE_V1)
    v1 = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    v1.name = "grpc/reflection/v1/reflection.proto"
    pool.AddSerializedFile(v1.SerializeToString())
    return pool
