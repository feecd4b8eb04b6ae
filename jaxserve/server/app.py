"""The gRPC server of one engine: services, health, reflection, transport limits."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxserve.config import Config
from jaxserve.engine import Engine, EngineState
from jaxserve.errors import ConfigError, NotServingError
from jaxserve.gen import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxserve.metrics import Metrics
from jaxserve.server.edge import Edge
from jaxserve.server.generation import GenerationServicer
from jaxserve.server.models import ModelServicer
from jaxserve.server.undecodable import UndecodableInterceptor

logger = logging.getLogger(__name__)

GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL: Final = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
NUM_THREADS: Final = 4  # that read and tokenize long requests
LAST_WORDS_S: Final = 0.5
NUM_SPARE_CALLS: Final = 64  # health and reflection beside a full house of requests

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """Listens before there is an engine, follows its state, and outlives its end.

    Health: "" is liveness and is SERVING until the engine fails; the generation service is SERVING
    exactly while the engine accepts requests.

    Attributes:
      port: the bound one, once started.
    """

    def __init__(self, config: Config, metrics: Metrics) -> None:
        """Args:
        metrics: those of the engine to come.
        """
        self.port = 0
        self._config = config
        self._engine: Engine | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxserve-text")
        self._states: asyncio.Queue[EngineState] = asyncio.Queue()
        self._has_ended = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._edge = Edge(config.limits, metrics)
        self._server = self._build()

    @property
    def address(self) -> str:
        host = self._config.server.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def start(self) -> None:
        """Listens; every call but health and reflection is UNAVAILABLE until `attach`.

        Raises:
          ConfigError: the address cannot be bound.
        """
        await self._health.set(GENERATION, _NOT_SERVING)
        section = self._config.server
        host = f"[{section.host}]" if ":" in section.host else section.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{section.port}")
        except RuntimeError as error:
            self._threads.shutdown()
            raise ConfigError(
                f"server.host {section.host!r}, server.port {section.port}: cannot be bound; is "
                "the host an address of this machine, and no other server on the port? "
                "--port 0 picks a free one"
            ) from error
        await self._server.start()
        self._follower = asyncio.create_task(self._follow())
        logger.info("listening address=%s", self.address)

    def attach(self, engine: Engine) -> None:
        """Serves this engine from now on, as far as its state allows."""
        self._engine = engine
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
        await self._edge.wait_idle(grace_s)
        # a health watch never ends by itself: it gets the time that the last statuses need
        await self._server.stop(min(grace_s, LAST_WORDS_S))
        if self._follower is not None:
            self._follower.cancel()
        self._threads.shutdown(wait=False)

    def _get_engine(self) -> Engine:
        if self._engine is None:
            raise NotServingError("the model is loading; try again later")
        return self._engine

    async def _follow(self) -> None:
        """Makes health say what the engine is; in order, one state after the other."""
        while True:
            state = await self._states.get()
            is_serving = state is EngineState.SERVING
            await self._health.set(GENERATION, _SERVING if is_serving else _NOT_SERVING)
            if state is EngineState.FAILED:
                await self._health.set("", _NOT_SERVING)
            if state in (EngineState.STOPPED, EngineState.FAILED):
                self._has_ended.set()

    def _build(self) -> grpc.aio.Server:
        limits = self._config.limits
        num_calls = limits.max_open_calls + NUM_SPARE_CALLS
        options = [
            ("grpc.so_reuseport", 0),  # or a second server on the port would take half the calls
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            ("grpc.max_concurrent_streams", num_calls),
            # a long prefill sends nothing: let clients ping meanwhile, and find dead ones
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
        server = grpc.aio.server(
            options=options,
            interceptors=[UndecodableInterceptor(self._edge)],
            maximum_concurrent_rpcs=num_calls,
        )
        generation = GenerationServicer(self._get_engine, self._edge, self._threads)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        models = ModelServicer(self._get_engine, self._edge)
        model_pb2_grpc.add_ModelServiceServicer_to_server(models, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        _add_reflection(server)
        return server


def _add_reflection(server: grpc.aio.Server) -> None:
    """Serves both versions: the library registers v1alpha alone, and clients ask v1 first.

    Their messages are the same on the wire, so one servicer does for both.
    """
    names = [GENERATION, MODEL, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1]
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # as above
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
