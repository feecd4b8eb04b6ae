"""Health calls need no key, and cannot take the room of calls that have one."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import AsyncClient
from jaxserve.config import LimitsSection
from jaxserve.server import app, probes
from jaxserve.server.app import GENERATION
from tests.server.credentials import sections, write_keys
from tests.server.harness import run_server

pytestmark = pytest.mark.asyncio

CHECK = "/grpc.health.v1.Health/Check"
ASKED = health_pb2.HealthCheckRequest(service=GENERATION)


async def watch(stub: health_pb2_grpc.HealthStub) -> Any:  # noqa: ANN401  # the stubs' calls have no types
    """Returns a watch that has told the state."""
    call: Any = stub.Watch(ASKED)
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    return call


async def test_watches_are_bounded_and_nobody_else_lacks_their_places(tmp_path: Path) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    chosen = {**sections(keys), "limits": LimitsSection(max_open_calls=1)}
    async with (
        run_server(sections=chosen) as running,
        grpc.aio.insecure_channel(running.target) as channel,
        AsyncClient(running.target, key=key) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [await watch(stub) for _ in range(probes.MAX_WATCHES)]
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match="too many health calls"):
                await stub.Watch(ASKED).read()
        assert (await client.health()).is_ready  # checks have places of their own
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1
        calls.pop().cancel()
        while True:  # its place comes free soon
            try:
                calls.append(await watch(stub))
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017


async def test_a_check_that_never_sends_its_message_holds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "PATIENCE_S", 0.05)
    async with (
        run_server() as running,
        grpc.aio.insecure_channel(running.target) as channel,
        AsyncClient(running.target) as client,
    ):
        method: Any = channel.stream_unary(CHECK)  # type: ignore[call-arg]  # bytes as they are
        for _ in range(2):
            silent = [method() for _ in range(probes.MAX_CHECKS)]
            codes = await asyncio.gather(*(call.code() for call in silent))
            assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
            assert set(codes) <= {
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            }
        assert (await client.health()).is_ready
        ended = method()
        await ended.done_writing()
        assert await ended.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_all_health_calls_together_leave_room() -> None:
    assert probes.MAX_CHECKS + probes.MAX_WATCHES < app.NUM_SPARE_CALLS
