"""What probes and tools see: health that follows the engine, reflection in both versions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from jaxserve.client import AsyncClient, Health, ServerError, UnavailableError
from jaxserve.config import Config, ServerSection
from jaxserve.engine import EngineState
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepPlan
from jaxserve.server.app import GENERATION, Server
from tests.engines import build_engine
from tests.server.harness import Steps, connect, local, run_server, until

pytestmark = pytest.mark.asyncio

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def watch(target: str, service: str) -> AsyncIterator[int]:
    async with grpc.aio.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request):
            yield response.status


async def test_a_server_is_alive_before_it_is_ready_and_refuses_until_then() -> None:
    engine, _ = build_engine()
    server = Server(local(engine.config), engine.metrics)
    await server.start()
    async with AsyncClient(server.address) as client:
        assert await client.health() == Health(is_alive=True, is_ready=False)
        with pytest.raises(UnavailableError, match="loading"):
            await client.generate("x")
        server.attach(engine)  # loaded, but not started
        with pytest.raises(UnavailableError, match="starting"):
            await client.generate("x")
        assert await client.health() == Health(is_alive=True, is_ready=False)
        engine.start()
        await client.wait_ready(timeout_s=60)
        assert await client.health() == Health(is_alive=True, is_ready=True)
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1
        await asyncio.to_thread(engine.stop)
        await server.wait_ended()
        assert await client.health() == Health(is_alive=True, is_ready=False)
    await server.stop(5.0)


async def test_the_states_of_all_services_at_once() -> None:
    async with run_server() as running, grpc.aio.insecure_channel(running.target) as channel:
        asked = health_pb2.HealthListRequest()
        found = (await health_pb2_grpc.HealthStub(channel).List(asked)).statuses
        states = {service: response.status for service, response in found.items()}
        assert states == {"": SERVING, GENERATION: SERVING}
        await asyncio.to_thread(running.engine.stop)
        await running.server.wait_ended()
        found = (await health_pb2_grpc.HealthStub(channel).List(asked)).statuses
        states = {service: response.status for service, response in found.items()}
        assert states == {"": SERVING, GENERATION: NOT_SERVING}


async def test_a_watcher_sees_each_change() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        changes = watch(running.target, GENERATION)
        seen = [await anext(changes)]
        if seen == [NOT_SERVING]:
            seen = [await anext(changes)]
        assert seen == [SERVING]
        call = asyncio.create_task(client.generate("x", max_tokens=2))
        await until(lambda: running.runner.num_steps > 0)
        drained = asyncio.create_task(asyncio.to_thread(running.engine.drain, 600.0))
        assert await anext(changes) == NOT_SERVING  # though a request still runs
        assert not call.done()
        with pytest.raises(UnavailableError, match="draining"):
            await client.generate("x")
        steps.open()
        assert (await call).usage.completion_tokens == 2
        await drained


async def test_a_failed_step_ends_every_call_and_both_healths() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 3:
            raise RuntimeError("the device of /secret is gone")

    steps = Steps()
    async with run_server(steps, on_launch=fail) as running, connect(running) as client:
        calls = [asyncio.create_task(client.generate("x", max_tokens=20)) for _ in range(6)]
        await until(lambda: running.num_submitted == 6)
        steps.open()
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            assert isinstance(result, ServerError)
            assert (result.code, result.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_DEAD")
            assert "secret" not in str(result)
        await running.server.wait_ended()
        assert running.engine.state is EngineState.FAILED
        assert await client.health() == Health(is_alive=False, is_ready=False)
        with pytest.raises(ServerError) as caught:
            await client.generate("x")
        assert caught.value.reason == "ENGINE_DEAD"


async def test_an_unknown_service_has_no_health() -> None:
    async with run_server() as running:
        async with grpc.aio.insecure_channel(running.target) as channel:
            request = health_pb2.HealthCheckRequest(service="other")
            call = health_pb2_grpc.HealthStub(channel).Check(request)
            assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async with run_server() as running:
        port = running.server.port
        other = Server(Config(server=ServerSection(port=port)), Metrics())
        with pytest.raises(ConfigError, match=f"server.port {port}: cannot be bound"):
            await other.start()
        async with connect(running) as client:
            assert (await client.health()).is_ready


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_services_and_their_messages(version: str) -> None:
    async with run_server() as running, grpc.aio.insecure_channel(running.target) as channel:
        method: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = [answer async for answer in method(iter([listing]))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            "jaxserve.v1.GenerationService",
            "jaxserve.v1.ModelService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        symbols = sorted(names)  # what is listed is described, or `buf curl --list-methods` fails
        questions = [
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=s) for s in symbols
        ]
        files = [answer async for answer in method(iter(questions))]
        assert len(files) == len(symbols)
        for answer, symbol in zip(files, symbols, strict=True):
            (described, *_) = answer.file_descriptor_response.file_descriptor_proto
            file = descriptor_pb2.FileDescriptorProto.FromString(described)
            assert f"{file.package}.{file.service[0].name}" == symbol
