"""AdminService: watches and steers the server, on a listener of its own."""

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Iterator
from typing import Final, override

import grpc
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

import jaxserve
from jaxserve.engine import EngineState
from jaxserve.errors import (
    ConfigError,
    InvalidRequestError,
    NotServingError,
    ReloadError,
    UnsupportedError,
)
from jaxserve.gen import admin_pb2, admin_pb2_grpc
from jaxserve.metrics import Metrics
from jaxserve.server.convert import read_seconds
from jaxserve.server.door import Door
from jaxserve.server.edge import Context, Edge
from jaxserve.server.listeners import bind_admin, build_options, find_socket
from jaxserve.server.load import Load, LoadMeter, list_buckets
from jaxserve.server.reflection import add_reflection
from jaxserve.server.undecodable import UndecodableInterceptor

logger = logging.getLogger(__name__)

ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
MAX_CALLS: Final = 64  # open at once: nobody needs more, and they share the event loop
SAMPLE_S: Final = 1.0
INTERVAL_RANGE_S: Final = (0.1, 60.0)
LEVELS: Final = ("debug", "info", "warning", "error")
MAX_GRACE_S: Final = 7 * 86_400.0


class AdminServer:
    """Listens at `admin.address` for whoever administers this process.

    Nobody is asked for a key: who can open the address may do all of it.

    Attributes:
      address: the bound one, once started.
    """

    def __init__(self, door: Door) -> None:
        self.address = ""
        self._asked = door.config.admin.address or ""
        limits = door.config.limits.model_copy(update={"max_open_calls": MAX_CALLS})
        edge = Edge(limits, door.metrics)
        self._server = grpc.aio.server(
            options=build_options(limits, num_calls=MAX_CALLS),
            interceptors=[UndecodableInterceptor(edge)],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._servicer = AdminServicer(door, edge)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._servicer, self._server)
        add_reflection(self._server, [ADMIN])
        self._sampler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
          ConfigError: the address cannot be bound.
        """
        self.address = bind_admin(self._server, self._asked)
        await self._server.start()
        self._sampler = asyncio.create_task(self._servicer.sample())
        logger.info("listening for the administrator address=%s", self.address)

    async def stop(self, grace_s: float) -> None:
        """Closes the listener, and its socket's file with it."""
        if self._sampler is not None:
            self._sampler.cancel()
        await self._server.stop(grace_s)
        path = find_socket(self.address)
        if path is not None:
            path.unlink(missing_ok=True)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Reads from the metrics and the configuration; what it changes belongs to the process."""

    def __init__(self, door: Door, edge: Edge) -> None:
        self._door = door
        self._edge = edge
        self._meter = LoadMeter(door.metrics)

    async def sample(self) -> None:
        """Keeps the rate of GetLoad one of the last seconds, however seldom somebody asks."""
        while True:
            self._meter.read(None)
            await asyncio.sleep(SAMPLE_S)

    @override
    async def GetServerInfo(
        self, message: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        async with self._edge.call(context, "GetServerInfo"):
            _refuse_unknown(message)
            build = _labels_of(self._door.metrics)
            config_json = dump_config(self._door)
            engine = self._door.find_engine()
            state = EngineState.STARTING if engine is None else engine.state
            started = timestamp_pb2.Timestamp()
            started.FromNanoseconds(int(self._door.started_s * 1e9))
            return admin_pb2.GetServerInfoResponse(
                version=jaxserve.__version__,
                jax_version=importlib.metadata.version("jax"),
                platform=build.get("platform", ""),
                device=build.get("device", ""),
                start_time=started,
                config_json=config_json,
                config_sha256=hashlib.sha256(config_json.encode()).hexdigest(),
                state=state.value,
            )

    @override
    async def GetLoad(
        self, message: admin_pb2.GetLoadRequest, context: Context
    ) -> admin_pb2.GetLoadResponse:
        async with self._edge.call(context, "GetLoad"):
            _refuse_unknown(message)
            load = self._meter.read(self._door.find_engine())
        return admin_pb2.GetLoadResponse(load=_build_load(load))

    @override
    async def WatchLoad(self, message: admin_pb2.WatchLoadRequest, context: Context) -> None:
        async with self._edge.call(context, "WatchLoad"):
            _refuse_unknown(message)
            interval_s = 1.0
            if message.HasField("interval"):
                low, high = INTERVAL_RANGE_S
                interval_s = _seconds(message.interval, "interval", low=low, high=high)
            meter = LoadMeter(self._door.metrics, window_s=0.0)
            while True:
                load = meter.read(self._door.find_engine())
                await context.write(admin_pb2.WatchLoadResponse(load=_build_load(load)))
                await asyncio.sleep(interval_s)

    @override
    async def ListBuckets(
        self, message: admin_pb2.ListBucketsRequest, context: Context
    ) -> admin_pb2.ListBucketsResponse:
        async with self._edge.call(context, "ListBuckets"):
            _refuse_unknown(message)
            buckets = [
                admin_pb2.Bucket(
                    program=use.program,
                    shape=use.shape,
                    steps=use.steps,
                    real_tokens=use.real_tokens,
                    padded_tokens=use.padded_tokens,
                    compile_time=_duration(use.compile_s),
                )
                for use in list_buckets(self._door.metrics)
            ]
        return admin_pb2.ListBucketsResponse(buckets=buckets)

    @override
    async def Drain(
        self, message: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        async with self._edge.call(context, "Drain"):
            _refuse_unknown(message)
            drain = self._door.drain
            if drain is None:
                raise UnsupportedError("this process is not ended by calls; send it SIGTERM")
            grace_s = None
            if message.HasField("grace"):
                grace_s = _seconds(message.grace, "grace", low=0.0, high=MAX_GRACE_S)
            # once the answer is out: the end of the server would cut it off
            context.add_done_callback(lambda _: drain(grace_s))  # type: ignore[arg-type]  # no Protocol
            num_live = int(self._door.metrics.value("tenant_requests_live"))
            logger.info("a drain was asked for grace_s=%s in_flight=%d", grace_s, num_live)
        return admin_pb2.DrainResponse(in_flight=num_live)

    @override
    async def SetLogLevel(
        self, message: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        async with self._edge.call(context, "SetLogLevel"):
            _refuse_unknown(message)
            level = message.level.lower()
            if level not in LEVELS:
                raise InvalidRequestError(
                    f"level is {message.level!r}, but must be one of {', '.join(LEVELS)}",
                    field="level",
                )
            ours = logging.getLogger("jaxserve")
            previous = logging.getLevelName(ours.getEffectiveLevel()).lower()
            ours.setLevel(level.upper())
            logger.warning("the log's level was set level=%s previous=%s", level, previous)
        return admin_pb2.SetLogLevelResponse(previous_level=previous)

    @override
    async def ReloadCredentials(
        self, message: admin_pb2.ReloadCredentialsRequest, context: Context
    ) -> admin_pb2.ReloadCredentialsResponse:
        async with self._edge.call(context, "ReloadCredentials"):
            _refuse_unknown(message)
            with _telling_config_errors():
                reloaded = await asyncio.to_thread(self._door.credentials.reload)
        return admin_pb2.ReloadCredentialsResponse(**dataclasses.asdict(reloaded))

    @override
    async def FlushPrefixCache(
        self, message: admin_pb2.FlushPrefixCacheRequest, context: Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        async with self._edge.call(context, "FlushPrefixCache"):
            _refuse_unknown(message)
            if not self._door.config.prefix_cache.enabled:
                raise UnsupportedError("prefix_cache.enabled is false: nothing is kept")
            engine = self._door.find_engine()
            if engine is None:
                raise NotServingError("the engine is starting; nothing is kept yet")
            num_freed = await asyncio.wrap_future(engine.flush_prefix_cache())
            logger.warning("the prefix cache was flushed freed_pages=%d", num_freed)
        return admin_pb2.FlushPrefixCacheResponse(freed_pages=num_freed)


def dump_config(door: Door) -> str:
    """Returns the configuration in force; it names files of secrets, and holds none."""
    config = door.config.model_copy(update={"tenants": door.credentials.tenants})
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)


def _labels_of(metrics: Metrics) -> dict[str, str]:
    """Returns what start-up told of versions and device; empty before."""
    return {
        key: value
        for family in metrics.build.collect()
        for sample in family.samples
        for key, value in sample.labels.items()
    }


def _build_load(load: Load) -> admin_pb2.Load:
    return admin_pb2.Load(**dataclasses.asdict(load))


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _seconds(duration: duration_pb2.Duration, field: str, *, low: float, high: float) -> float:
    seconds = read_seconds(duration, field)
    if not low <= seconds <= high:
        raise InvalidRequestError(
            f"{field} is {seconds:g} s, but must be in [{low:g} s, {high:g} s]", field=field
        )
    return seconds


def _refuse_unknown(message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = str(unknown[0].field_number)
        raise UnsupportedError(
            f"{number} is not supported by this version; leave it out", field=number
        )


@contextlib.contextmanager
def _telling_config_errors() -> Iterator[None]:
    """Has the administrator read what elsewhere is the server's own affair."""
    try:
        yield
    except ConfigError as error:
        raise ReloadError(f"all stays as it was: {error}") from error
