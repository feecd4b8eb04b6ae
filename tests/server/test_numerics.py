"""Numbers that are none reach the client as a status of their own (C32)."""

from typing import Literal

import grpc
import pytest

from jaxserve.client import ServerError
from jaxserve.gen import generation_pb2
from tests.fakes import say
from tests.server.harness import connect, raw_stub, read_rest, run_server

pytestmark = pytest.mark.asyncio

SICK = tuple(b"sick")
LETTERS = say({None: b"abcdefghij" * 3})


def break_one(prompt: tuple[int, ...], index: int) -> int | Literal["not_finite"] | None:
    return "not_finite" if (prompt, index) == (SICK, 2) else LETTERS(prompt, index)


async def test_a_request_with_such_logits_ends_with_internal_beside_a_healthy_stream() -> None:
    async with (
        run_server(script=break_one) as running,
        raw_stub(running) as stub,
        connect(running) as client,
    ):
        healthy = generation_pb2.GenerateRequest(text="well")
        healthy.stop.max_tokens = 20
        call = stub.StreamGenerate(healthy)
        assert (await call.read()).HasField("start")
        with pytest.raises(ServerError, match="not finite") as caught:
            await client.generate("sick", max_tokens=8)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert caught.value.reason == "NUMERICS"
        messages: list[generation_pb2.StreamGenerateResponse] = []
        sick = generation_pb2.GenerateRequest(text="sick")
        with pytest.raises(grpc.RpcError):
            await read_rest(stub.StreamGenerate(sick), messages)
        assert "".join(message.delta.text for message in messages) in ("", "a", "ab")
        assert (await read_rest(call))[-1].finish.usage.completion_tokens == 20
        assert (await client.generate("sic", max_tokens=8)).usage.completion_tokens == 8
        assert running.finished("error_numerics") == 2
