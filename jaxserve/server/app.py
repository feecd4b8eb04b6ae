"""The gRPC server of one engine: services, health, reflection, who may call."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jaxserve.config import Config
from jaxserve.engine import Engine, EngineState
from jaxserve.errors import ConfigError
from jaxserve.gen import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxserve.metrics import Metrics
from jaxserve.server.admin import AdminServer
from jaxserve.server.arrivals import ArrivalInterceptor
from jaxserve.server.door import Door
from jaxserve.server.edge import Edge
from jaxserve.server.generation import GenerationServicer
from jaxserve.server.guard import GuardInterceptor
from jaxserve.server.health_listener import HealthListener
from jaxserve.server.health_servicer import HealthServicer
from jaxserve.server.http import HttpServer
from jaxserve.server.listeners import bind_tcp, build_options, check_exposure, format_address
from jaxserve.server.models import ModelServicer
from jaxserve.server.probes import MAX_CHECKS, MAX_WATCHES, ProbeInterceptor
from jaxserve.server.reflection import add_reflection
from jaxserve.server.undecodable import UndecodableInterceptor
from jaxserve.server.vllm_engine import SERVICE as VLLM_ENGINE
from jaxserve.server.vllm_engine import add_vllm_engine

logger = logging.getLogger(__name__)

GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL: Final = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
LAST_WORDS_S: Final = 0.5
# beside a full house of requests: health, reflection, and what is just being refused
NUM_SPARE_CALLS: Final = MAX_CHECKS + MAX_WATCHES + 64

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """Listens before there is an engine, follows its state, and outlives its end.

    Health: "" is liveness and is SERVING until the engine fails; the services that generate are
    SERVING exactly while the engine accepts requests.

    Attributes:
      door: what other front ends of the process share with this one.
      port: the bound one, once started.
    """

    def __init__(
        self, config: Config, metrics: Metrics, *, read_config: Callable[[], Config] | None = None
    ) -> None:
        """Args:
          metrics: those of the engine to come.
          read_config: reads the configuration again, for a reload of its tenants.

        Raises:
          ConfigError: keys or certificates are missing or wrong, or a package is.
        """
        self.port = 0
        self.door = Door(config, metrics, read_config=read_config)
        self._config = config
        self._health = HealthServicer()
        self._states: asyncio.Queue[EngineState] = asyncio.Queue()
        self._has_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._edge = Edge(
            config.limits,
            metrics,
            open_calls=self.door.open_calls,
            authenticator=self.door.authenticator,
            tracing=self.door.tracing,
            find_model=self.door.find_model,
        )
        self._server = self._build()
        self._admin = AdminServer(self.door) if config.admin.address else None
        self._http = HttpServer(self.door) if config.server.http_port is not None else None
        is_probed = config.server.health_port is not None
        self._probes = HealthListener(self._health, config) if is_probed else None

    @property
    def address(self) -> str:
        return format_address(self._config.server.host, self.port)

    @property
    def admin(self) -> AdminServer | None:
        """Where it is administered; None where the configuration says nowhere."""
        return self._admin

    @property
    def http(self) -> HttpServer | None:
        """Where it speaks HTTP; None where the configuration says nowhere."""
        return self._http

    @property
    def probes(self) -> HealthListener | None:
        """Where its health alone is told; None where the configuration says nowhere."""
        return self._probes

    async def start(self) -> None:
        """Listens; every call but health and reflection is UNAVAILABLE until `attach`.

        Raises:
          ConfigError: an address cannot be bound, or may not be without credentials.
        """
        await self._set_readiness(_NOT_SERVING)
        host = self._config.server.host
        try:
            check_exposure(self._config, self.door.credentials, key="server.host", host=host)
            self.port = bind_tcp(self._server, self._config, self.door.credentials)
            if self._admin is not None:
                await self._admin.start()
            if self._http is not None:
                await self._http.start()
            if self._probes is not None:
                await self._probes.start()
        except ConfigError:
            self.door.close()
            raise
        await self._server.start()
        watch = self.door.credentials.watch()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(watch)]
        has_tls = self.door.certificates is not None
        is_open = self.door.authenticator.is_open
        logger.info("listening address=%s tls=%s keys=%s", self.address, has_tls, not is_open)

    def attach(self, engine: Engine) -> None:
        """Serves this engine from now on, as far as its state allows."""
        self.door.attach(engine)
        loop = asyncio.get_running_loop()

        def on_state(state: EngineState) -> None:
            # called by whichever thread changed it; a closed loop has no one left to tell
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._states.put_nowait, state)

        engine.add_listener(on_state)
        self._states.put_nowait(engine.state)

    async def wait_ended(self) -> None:
        """Returns when the engine has stopped or failed."""
        await self._has_ended.wait()

    async def stop(self, grace_s: float) -> None:
        """Gives open calls the grace to end, then closes the listener and what is left."""
        await self.door.open_calls.wait_idle(grace_s)
        # a health watch never ends by itself: it gets the time that the last statuses need
        await self._server.stop(min(grace_s, LAST_WORDS_S))
        if self._admin is not None:
            await self._admin.stop(min(grace_s, LAST_WORDS_S))
        if self._http is not None:
            await self._http.stop()
        if self._probes is not None:
            await self._probes.stop(min(grace_s, LAST_WORDS_S))
        for task in self._tasks:
            task.cancel()
        if self.door.tracing is not None:
            await self.door.tracing.close(grace_s)
        self.door.close()

    async def _follow(self) -> None:
        """Makes health say what the engine is; in order, one state after the other."""
        while True:
            state = await self._states.get()
            is_serving = state is EngineState.SERVING
            await self._set_readiness(_SERVING if is_serving else _NOT_SERVING)
            if state is EngineState.FAILED:
                await self._health.set("", _NOT_SERVING)
            if state in (EngineState.STOPPED, EngineState.FAILED):
                self._has_ended.set()

    async def _set_readiness(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await self._health.set(GENERATION, status)
        if self._config.server.vllm_engine:
            await self._health.set(VLLM_ENGINE, status)

    def _build(self) -> grpc.aio.Server:
        limits = self._config.limits
        num_calls = limits.max_open_calls + NUM_SPARE_CALLS
        server = grpc.aio.server(
            options=build_options(limits, num_calls=num_calls),
            interceptors=[
                GuardInterceptor(self._edge),
                ProbeInterceptor(),
                ArrivalInterceptor(self._edge),
                UndecodableInterceptor(self._edge),
            ],
            maximum_concurrent_rpcs=num_calls,
        )
        generation = GenerationServicer(
            self.door.get_engine,
            self._edge,
            self.door.threads,
            form_threads=self.door.form_threads,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        models = ModelServicer(self.door.get_engine, self._edge)
        model_pb2_grpc.add_ModelServiceServicer_to_server(models, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        services = [GENERATION, MODEL, health.SERVICE_NAME]
        if self._config.server.vllm_engine:
            add_vllm_engine(server, self.door, self._edge)
            services.append(VLLM_ENGINE)
        if self._config.server.reflection:
            add_reflection(server, services)
        return server
