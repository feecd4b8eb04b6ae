"""The service `vllm.grpc.engine.VllmEngine`, which the gateway smg speaks, beside our own.

Its messages are of the package smg-grpc-proto (the extra `smg`), imported only where it is served.
"""

from typing import Final

import grpc

from jaxserve.errors import ConfigError
from jaxserve.server.door import Door
from jaxserve.server.edge import Edge

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
INSTALL: Final = "pip install 'jaxserve[smg]'"


def add_vllm_engine(server: grpc.aio.Server, door: Door, edge: Edge) -> None:
    """Adds the service to a server.

    Raises:
      ConfigError: the package with its messages is missing, or does not go with what is installed.
    """
    try:
        from jaxserve.server.vllm_engine.servicer import add_to_server
    except ImportError as error:
        raise ConfigError(
            "server.vllm_engine is true, but the package smg-grpc-proto, which has the service's "
            f"messages, is not installed; install the extra smg: {INSTALL}"
        ) from error
    except _mismatches() as error:  # what the generated modules raise at import
        raise ConfigError(
            "server.vllm_engine is true, but the package smg-grpc-proto does not go with the "
            f"installed grpcio or protobuf ({error!s:.200}); install the extra smg: {INSTALL}"
        ) from error
    add_to_server(server, door, edge)


def _mismatches() -> tuple[type[Exception], ...]:
    from google.protobuf.runtime_version import VersionError

    return RuntimeError, VersionError
