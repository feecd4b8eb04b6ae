"""Bytes that are no message of ours: a status with details, and the server goes on."""

import asyncio

import grpc
import pytest

from jaxserve.client.errors import BadRequestError, read_error
from tests.server.harness import connect, run_server

pytestmark = pytest.mark.asyncio

NO_MESSAGES = {
    "a field cut short": b"\x0a\xff",
    "text that is not UTF-8": b"\x0a\x02H\xff",  # field 1 is a text in all of them
    "a group that never ends": b"\x0b",
    "an unknown wire type": b"\x0f",
}
METHODS = ("GenerationService/Generate", "GenerationService/StreamGenerate",
           "GenerationService/Tokenize", "ModelService/GetModel")  # fmt: skip


OTHERS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
@pytest.mark.parametrize("method", METHODS)
async def test_undecodable_bytes_are_an_invalid_argument(
    method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"/jaxserve.v1.{method}"
    async with run_server() as running:
        async with grpc.aio.insecure_channel(running.target) as channel:
            if method == "GenerationService/StreamGenerate":
                call = channel.unary_stream(name, None, None)(data)
                reading = asyncio.ensure_future(call.read())
            else:
                reading = asyncio.ensure_future(channel.unary_unary(name, None, None)(data))
            with pytest.raises(grpc.RpcError) as caught:
                await reading
        error = read_error(caught.value)
        assert isinstance(error, BadRequestError)
        assert error.reason == "INVALID_FIELD"
        assert f"{len(data)} bytes are not a message of {method.rpartition('/')[2]}" in str(error)
        assert running.num_submitted == 0
        async with connect(running) as client:
            assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("name", OTHERS)
async def test_they_are_for_the_services_of_grpc_too(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server() as running, grpc.aio.insecure_channel(running.target) as channel:
        for data in NO_MESSAGES.values():
            call = channel.stream_stream(name, None, None)(iter([data]))
            with pytest.raises(grpc.RpcError, match="the bytes are no message") as caught:
                await call.read()
            assert read_error(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
