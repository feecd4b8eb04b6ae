"""grpc's health service: the library's own, and the method that it leaves out."""

from typing import override

from grpc_health.v1 import health, health_pb2

from jaxserve.server.edge import Context


class HealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # not in the stubs
    """Tells the state of one service, now or as it changes, or of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._told = {"": health_pb2.HealthCheckResponse.SERVING}

    @override
    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Has a service be in this state from now on."""
        self._told[service] = status
        await super().set(service, status)

    @override
    async def List(
        self, message: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        """Returns the state of every service."""
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status)
            for service, status in self._told.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)
