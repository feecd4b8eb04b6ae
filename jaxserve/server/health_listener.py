"""Health on a port of its own, for probes that speak neither TLS nor keys."""

import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.server.listeners import build_options, format_address
from jaxserve.server.probes import MAX_CHECKS, MAX_WATCHES, ProbeInterceptor
from jaxserve.server.undecodable import UndecodableInterceptor

logger = logging.getLogger(__name__)


class HealthListener:
    """Says what the public port says of its health, in plaintext, and nothing else.

    Kubernetes' own gRPC probes cannot do TLS, and so cannot ask a public port that has it.

    Attributes:
      port: the bound one, once started.
    """

    def __init__(self, health: Any, config: Config) -> None:  # noqa: ANN401  # not in the stubs
        """Args:
        health: the servicer that follows the engine.
        """
        self.port = 0
        self._section = config.server
        num_calls = MAX_CHECKS + MAX_WATCHES + 64
        self._server = grpc.aio.server(
            options=build_options(config.limits, num_calls=num_calls),
            interceptors=[ProbeInterceptor(), UndecodableInterceptor()],
            maximum_concurrent_rpcs=num_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)

    @property
    def address(self) -> str:
        return format_address(self._section.health_host, self.port)

    async def start(self) -> None:
        """Listens.

        Raises:
          ConfigError: the address cannot be bound.
        """
        host, port = self._section.health_host, self._section.health_port
        assert port is not None, "no port was asked for"
        try:
            self.port = self._server.add_insecure_port(format_address(host, port))
        except RuntimeError as error:
            raise ConfigError(
                f"server.health_host {host!r}, server.health_port {port}: cannot be bound; is the "
                "host an address of this machine, and no other server on the port? 0 picks a free "
                "one"
            ) from error
        await self._server.start()
        logger.info("listening for probes address=%s", self.address)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
