"""Who sends only headers holds a place as others do, and not for ever."""

import asyncio
from typing import Any

import grpc
import pytest

from jaxserve.client import AsyncClient, OverloadedError
from jaxserve.config import LimitsSection
from jaxserve.server import arrivals, probes
from jaxserve.server.app import NUM_SPARE_CALLS
from jaxserve.server.reflection import REFLECTION_V1
from tests.server.harness import run_server, until
from tests.server.test_security import read_reason

pytestmark = pytest.mark.asyncio

GENERATE = "/jaxserve.v1.GenerationService/Generate"
STREAM = "/jaxserve.v1.GenerationService/StreamGenerate"
REFLECT = f"/{REFLECTION_V1}/ServerReflectionInfo"


def begin(channel: grpc.aio.Channel, path: str) -> Any:  # noqa: ANN401  # the stubs' calls have no types
    """Returns a call of which only the headers are sent."""
    return channel.stream_stream(path)()  # type: ignore[call-arg]  # bytes as they are


async def reason_of(call: Any) -> str:  # noqa: ANN401
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return read_reason(error)
    raise AssertionError("it has an answer")


@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_calls_without_their_message_leave_probes_their_room(path: str) -> None:
    limit = 4
    bounds = LimitsSection(max_open_calls=limit)
    async with (
        run_server(bounds=bounds) as running,
        grpc.aio.insecure_channel(running.target) as channel,
        AsyncClient(running.target) as client,
    ):
        await channel.channel_ready()
        calls = [begin(channel, path) for _ in range(limit + NUM_SPARE_CALLS + 10)]
        await until(lambda: sum(call.done() for call in calls) == len(calls) - limit)
        codes = {await call.code() for call in calls if call.done()}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert (await client.health()).is_ready
        silent = [call for call in calls if not call.done()]
        for call in silent:
            call.cancel()
        while True:  # their places come free soon
            try:
                await client.generate("x", max_tokens=1)
                break
            except OverloadedError as error:
                assert "max_open_calls" in str(error)  # noqa: PT017


@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_a_message_must_come_in_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE_S", 0.05)
    async with (
        run_server() as running,
        grpc.aio.insecure_channel(running.target) as channel,
        AsyncClient(running.target) as client,
    ):
        silent = begin(channel, path)
        assert await reason_of(silent) == "DEADLINE"
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1
        assert running.num_submitted == 1


@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_a_call_that_ends_without_a_message_is_refused(path: str) -> None:
    async with run_server() as running, grpc.aio.insecure_channel(running.target) as channel:
        empty = begin(channel, path)
        await empty.done_writing()
        assert await reason_of(empty) == "INVALID_FIELD"
        assert running.num_submitted == 0


async def test_streams_of_reflection_are_bounded_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert arrivals.MAX_STREAMS < NUM_SPARE_CALLS - probes.MAX_CHECKS - probes.MAX_WATCHES
    monkeypatch.setattr(arrivals, "STREAM_S", 1.0)
    async with run_server() as running, grpc.aio.insecure_channel(running.target) as channel:
        calls = [begin(channel, REFLECT) for _ in range(arrivals.MAX_STREAMS + 5)]
        codes = [await call.code() for call in calls]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 5
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == arrivals.MAX_STREAMS
        await asyncio.wait_for(begin(channel, REFLECT).done_writing(), 5)
