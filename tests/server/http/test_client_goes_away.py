"""An HTTP client that leaves, in every way, ends its requests: once, in two steps, no others."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
from typing import Any

import httpx
import pytest

from jaxserve.engine import Stream
from jaxserve.engine.stream import Delivery
from jaxserve.request import GenerationRequest
from tests.fakes import CHAT_TEMPLATE
from tests.server.harness import Steps, until
from tests.server.http.harness import CHAT, COMPLETIONS, HI, Running, run_listening

pytestmark = pytest.mark.asyncio


def body_of(**body: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"prompt": "Hi!", "max_tokens": 30, "ignore_eos": True, **body}


def request_bytes(body: dict[str, Any], url: str = COMPLETIONS, **headers: str) -> bytes:
    content = json.dumps(body).encode()
    headers = {
        "host": "localhost", "content-type": "application/json",
        "content-length": str(len(content)), **headers,
    }  # fmt: skip
    lines = [f"POST {url} HTTP/1.1", *map(": ".join, headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + content


@contextlib.asynccontextmanager
async def connecting(running: Running) -> Any:  # noqa: ANN401
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset, as a killed client's machine may."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


async def check_one_abort(running: Running, steps: Steps, *, request_id: str) -> None:
    """Two steps after the client left, nothing of its request is left."""
    await until(lambda: bool(running.aborts))
    steps.allow(2)
    await until(lambda: running.finished("cancelled") == 1)
    assert running.aborts == [request_id]
    assert not running.engine._scheduler.has_unfinished
    assert running.engine.metrics.total("requests_finished_total") == 1
    await until(lambda: running.door.open_calls.count == 0)
    assert running.engine.metrics.value("http_requests_total", status="499") == 1
    steps.open()
    assert (await running.complete("x", max_tokens=2))["usage"]["completion_tokens"] == 2, "K6"
    assert running.aborts == [request_id], "none for an end that came by itself"


@pytest.mark.parametrize("num_chunks", [0, 1, 5])
@pytest.mark.parametrize("is_reset", [True, False])
async def test_a_stream_left_after_some_chunks(num_chunks: int, is_reset: bool) -> None:
    steps = Steps()
    async with run_listening(steps) as running, connecting(running) as (reader, writer):
        writer.write(request_bytes(body_of(stream=True), **{"x-request-id": "gone"}))
        await until(lambda: running.num_submitted == 1)
        for _ in range(num_chunks):
            steps.allow(1)
            await reader.readuntil(b"data: ")
        if is_reset:
            reset(writer)
        else:
            writer.close()
        await check_one_abort(running, steps, request_id="gone")


async def test_a_whole_reply_that_is_not_waited_for() -> None:
    steps = Steps()
    async with run_listening(steps) as running, connecting(running) as (_, writer):
        writer.write(request_bytes(body_of(), **{"x-request-id": "gone"}))
        steps.allow(3)
        await until(lambda: running.num_output > 0)
        reset(writer)
        await check_one_abort(running, steps, request_id="gone")


async def test_a_client_that_times_out() -> None:
    steps = Steps()
    async with run_listening(steps) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post(
                COMPLETIONS, json=body_of(), headers={"x-request-id": "gone"}, timeout=0.2
            )
        await check_one_abort(running, steps, request_id="gone")


async def test_a_request_that_waits_in_the_queue() -> None:
    steps = Steps()
    async with run_listening(steps) as running, connecting(running) as (_, writer):
        first = asyncio.create_task(running.complete("a", max_tokens=6))
        await until(lambda: running.runner.num_steps == 2)  # the engine thread waits for a result
        writer.write(request_bytes(body_of(), **{"x-request-id": "queued"}))
        await until(lambda: running.num_submitted == 2)
        reset(writer)
        await until(lambda: running.aborts == ["queued"])
        steps.allow(1)
        await until(lambda: running.finished("cancelled") == 1)
        steps.open()
        assert (await first)["usage"]["completion_tokens"] == 6
        assert running.aborts == ["queued"]
        loads = [load for plan in running.runner.plans for load in plan.row_loads]
        assert len(loads) == 1, "it never ran"


async def test_all_prompts_of_a_body_end_with_its_client() -> None:
    steps = Steps()
    async with run_listening(steps) as running, connecting(running) as (_, writer):
        body = body_of(prompt=["a", "b", "c"], n=1, stream=True)
        writer.write(request_bytes(body, **{"x-request-id": "gone"}))
        await until(lambda: running.num_submitted == 3)
        reset(writer)
        await until(lambda: len(running.aborts) == 3)
        steps.open()
        await until(lambda: running.finished("cancelled") == 3)
        assert sorted(running.aborts) == ["gone", "gone-1", "gone-2"]


async def test_a_client_that_leaves_while_a_thread_reads_its_prompt() -> None:
    """The thread cannot be stopped, so the stream that it opens is given up then."""
    steps = Steps()
    is_let_go = threading.Event()
    entered = threading.Event()
    async with run_listening(steps, chat_template=CHAT_TEMPLATE) as running:
        submit = running.engine.submit

        def slow_submit(asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
            entered.set()
            is_let_go.wait()
            return submit(asked, delivery=delivery)

        running.engine.submit = slow_submit  # type: ignore[method-assign]
        async with connecting(running) as (_, writer):
            chat = {"messages": HI, "max_tokens": 9}
            writer.write(request_bytes(chat, CHAT, **{"x-request-id": "gone"}))
            await until(entered.is_set)
            reset(writer)
            await until(lambda: running.door.open_calls.count == 0)
            assert running.aborts == []
            is_let_go.set()
            running.engine.submit = submit  # type: ignore[method-assign]
            await check_one_abort(running, steps, request_id="gone")


async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    async with run_listening() as running, connecting(running) as (_, writer):
        whole = request_bytes(body_of())
        writer.write(whole[:-5])
        await until(lambda: running.door.open_calls.count == 1)
        reset(writer)
        await until(lambda: running.door.open_calls.count == 0)
        assert running.num_submitted == 0
        assert running.engine.metrics.value("http_requests_total", status="499") == 1
        assert (await running.complete(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_a_normal_end_is_no_abort_on_a_connection_that_is_kept() -> None:
    async with run_listening() as running:
        for _ in range(3):
            await running.complete(max_tokens=2)
            await running.stream(COMPLETIONS, max_tokens=2)
        assert running.aborts == []
        assert running.finished("max_tokens") == 6


async def test_of_48_streams_a_third_leaves_and_the_rest_are_whole() -> None:
    steps = Steps()
    async with run_listening(steps, num_pages=60) as running:

        async def read(index: int) -> str:
            async with connecting(running) as (reader, writer):
                body = body_of(max_tokens=10, stream=True)
                writer.write(request_bytes(body, connection="close"))
                if index % 3 == 0:
                    for _ in range(index % 4):
                        await reader.readuntil(b"data: ")
                    reset(writer)
                    return "left"
                content: bytes = await reader.read(-1)
                return content.decode()

        steps.open()
        outputs = await asyncio.gather(*(read(index) for index in range(48)))
        await until(lambda: not running.engine._intake.live())
        await until(lambda: running.door.open_calls.count == 0)
    whole = [output for output in outputs if output != "left"]
    assert len(whole) == 32
    for output in whole:
        texts = [
            json.loads(event.split("\r\n")[0])["choices"][0]["text"]
            for event in output.split("data: ")[1:]
            if event.startswith("{")
        ]
        assert "".join(texts) == "abcdefghij"
        assert "data: [DONE]" in output
    assert len(running.aborts) == len(set(running.aborts)) <= 16
    ends = running.finished("cancelled") + running.finished("max_tokens")
    assert ends == running.engine.metrics.total("requests_finished_total")
