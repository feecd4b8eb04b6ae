"""CancelGeneration: a request ended by its id, from another call."""

import asyncio

import grpc
import pytest

from jaxserve.client import BadRequestError, Delta, Finish, FinishReason
from jaxserve.gen import generation_pb2
from tests.server.harness import Steps, connect, raw_stub, run_server, until

pytestmark = pytest.mark.asyncio


async def test_its_output_so_far_stands_and_its_call_ends_well() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:

        async def read() -> tuple[str, Finish]:
            text = ""
            async for event in client.stream("Hi!", request_id="r", max_tokens=30):
                match event:
                    case Delta():
                        text += event.text
                    case Finish():
                        finish = event
            return text, finish

        call = asyncio.create_task(read())
        steps.allow(3)
        await until(lambda: running.runner.num_steps >= 4)
        assert await client.cancel("r")
        steps.open()
        text, finish = await asyncio.wait_for(call, 60)
        assert finish.reason is FinishReason.CANCELLED
        assert finish.usage is not None
        assert len(text) == finish.usage.completion_tokens > 0
        assert "abcdefghij".startswith(text)
        assert running.aborts == ["r"]
        assert not await client.cancel("r")


async def test_a_request_in_the_queue_ends_without_having_run() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        first = asyncio.create_task(client.generate("long", max_tokens=5))
        await until(lambda: running.runner.num_steps == 2)
        queued = asyncio.create_task(client.generate("x" * 20, request_id="r"))
        await until(lambda: running.num_submitted == 2)
        assert await client.cancel("r")
        steps.open()
        ended = await asyncio.wait_for(queued, 60)
        assert ended.finish_reason is FinishReason.CANCELLED
        assert (ended.usage.completion_tokens, ended.text) == (0, "")
        assert (await first).usage.completion_tokens == 5
        assert sum(len(plan.row_loads) for plan in running.runner.plans) == 1


async def test_who_is_not_there_is_not_found() -> None:
    async with run_server() as running, connect(running) as client:
        assert not await client.cancel("nobody")
        await client.generate("x", request_id="r", max_tokens=1)
        assert not await client.cancel("r")


async def test_an_id_is_needed() -> None:
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="request_id is empty") as caught:
            await client.cancel("")
        assert caught.value.field == "request_id"


async def test_without_an_engine_it_is_unavailable() -> None:
    async with run_server() as running, raw_stub(running) as stub:
        running.server.door._engine = None
        with pytest.raises(grpc.RpcError) as caught:
            await stub.CancelGeneration(generation_pb2.CancelGenerationRequest(request_id="r"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        running.server.door._engine = running.engine
