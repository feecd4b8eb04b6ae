"""A client that leaves, in every way, ends its request: once, within two steps, and no other."""

import asyncio
import contextlib
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from jaxserve.client import AsyncClient, Delta, Finish, ServerError
from jaxserve.engine import Stream
from jaxserve.engine.stream import Delivery
from jaxserve.gen import generation_pb2
from jaxserve.plan import StepLimits
from jaxserve.request import ChatMessage, ChatPrompt, GenerationRequest, SamplingParams
from jaxserve.server.edge import Edge
from jaxserve.server.generation import GenerationServicer
from tests.fakes import CHAT_TEMPLATE, EOS_ID, expected_output
from tests.server.harness import (
    EOF,
    Running,
    Steps,
    connect,
    raw_stub,
    read_rest,
    run_server,
    until,
)

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).parents[2]


def ask(request_id: str = "", *, max_tokens: int = 30) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(text="Hi!", request_id=request_id)
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    request.output.include_token_ids = True
    return request


async def check_one_abort(running: Running, steps: Steps, *, request_id: str) -> None:
    """Two steps after the client left, nothing of its request is left."""
    await until(lambda: bool(running.aborts))
    steps.allow(2)
    await until(lambda: running.finished("cancelled") == 1)
    assert running.aborts == [request_id]
    assert not running.engine._scheduler.has_unfinished
    assert running.engine.metrics.total("requests_finished_total") == 1
    await until(lambda: running.num_open_calls == 0)
    async with connect(running) as client:  # K6
        steps.open()
        assert (await client.generate("x", max_tokens=2)).usage.completion_tokens == 2
    assert running.aborts == [request_id]  # none for an end that came by itself


@pytest.mark.parametrize("num_read", [0, 1, 2, 5])
async def test_a_stream_cancelled_after_some_messages(num_read: int) -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        call = stub.StreamGenerate(ask("gone"))
        await until(lambda: running.num_submitted == 1)
        for i in range(num_read):
            if i != 1:  # the first token brings two messages: the start and its delta
                steps.allow(1)
            assert await call.read() is not EOF
        call.cancel()
        await check_one_abort(running, steps, request_id="gone")


async def test_a_stream_whose_channel_is_closed() -> None:
    steps = Steps()
    async with run_server(steps) as running:
        async with raw_stub(running) as stub:
            call = stub.StreamGenerate(ask("gone"))
            steps.allow(1)
            assert (await call.read()).start.request_id == "gone"
        await check_one_abort(running, steps, request_id="gone")


async def test_a_unary_call_that_is_cancelled() -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        call = stub.Generate(ask("gone"))
        steps.allow(3)
        await until(lambda: running.engine.metrics.value("output_tokens_total") > 0)
        call.cancel()
        await check_one_abort(running, steps, request_id="gone")


async def test_a_loop_that_is_left_early() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        steps.allow(1)
        stream = client.stream("Hi!", request_id="gone", max_tokens=30)
        async with contextlib.aclosing(stream) as events:
            async for _ in events:
                break
        await check_one_abort(running, steps, request_id="gone")


async def test_a_task_that_is_cancelled() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        task = asyncio.create_task(client.generate("Hi!", request_id="gone"))
        await until(lambda: running.num_submitted == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_one_abort(running, steps, request_id="gone")


async def test_a_deadline_that_passes_in_a_stream() -> None:
    steps = Steps()
    async with run_server(steps, clock=time.monotonic) as running, raw_stub(running) as stub:
        call = stub.StreamGenerate(ask("gone"), timeout=0.2)
        steps.allow(1)
        with pytest.raises(grpc.RpcError):
            await read_rest(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        steps.open()
        await until(lambda: not running.engine._intake.live())
        ends = running.finished("cancelled") + running.finished("deadline")
        ends += running.finished("error_deadline")
        assert ends == running.engine.metrics.total("requests_finished_total") == 1
        assert len(running.aborts) <= 1


async def test_a_request_that_is_cancelled_while_it_waits_in_the_queue() -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        first = stub.Generate(ask("first", max_tokens=6))
        await until(lambda: running.runner.num_steps == 2)  # the engine thread waits for a result
        queued = stub.Generate(ask("queued"))
        await until(lambda: running.num_submitted == 2)
        queued.cancel()
        await until(lambda: running.aborts == ["queued"])
        steps.allow(1)
        await until(lambda: running.finished("cancelled") == 1)
        steps.open()
        response = await first
        assert response.usage.completion_tokens == 6
        assert running.aborts == ["queued"]
        loads = [load for plan in running.runner.plans for load in plan.row_loads]
        assert len(loads) == 1  # it never ran


async def test_a_client_that_is_killed() -> None:
    program = (
        "import sys\n"
        "from jaxserve.client import Client\n"
        "for event in Client(sys.argv[1]).stream('Hi!', request_id='gone', max_tokens=30):\n"
        "    print('read', flush=True)\n"
    )
    steps = Steps()
    async with run_server(steps) as running:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, running.target),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        steps.allow(1)
        assert client.stdout is not None
        assert await client.stdout.readline() == b"read\n"
        client.send_signal(signal.SIGKILL)
        assert await client.wait() == -signal.SIGKILL
        await check_one_abort(running, steps, request_id="gone")


async def test_a_call_that_is_cancelled_while_a_thread_reads_its_prompt() -> None:
    """The thread cannot be stopped, so the stream that it opens is given up then."""
    steps = Steps()
    is_let_go = threading.Event()
    async with run_server(steps, chat_template=CHAT_TEMPLATE) as running:
        submit = running.engine.submit
        entered = threading.Event()

        def slow_submit(asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
            entered.set()
            is_let_go.wait()
            return submit(asked, delivery=delivery)

        running.engine.submit = slow_submit  # type: ignore[method-assign]
        conversation = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
        async with connect(running) as client:
            task = asyncio.create_task(client.generate(conversation, request_id="gone"))
            await until(entered.is_set)
            task.cancel()
            await until(lambda: running.num_open_calls == 0)
            assert running.aborts == []
            is_let_go.set()
            running.engine.submit = submit  # type: ignore[method-assign]
            await check_one_abort(running, steps, request_id="gone")


async def test_of_64_streams_a_third_leaves_and_the_rest_are_whole() -> None:
    chance = random.Random(11)
    steps = Steps()
    limits = StepLimits(max_rows=8, max_chunk_tokens=12, chunk_tile=2, max_chunks=2, max_seqs=8)
    prompts = [bytes(chance.choices(range(97, 123), k=chance.randint(1, 12))) for _ in range(64)]
    leaving = {i: chance.randint(0, 6) for i in chance.sample(range(64), 21)}
    ends: dict[int, Finish | None] = {}
    outputs: dict[int, list[int]] = {i: [] for i in range(64)}

    async def read(client: AsyncClient, i: int) -> None:
        events = client.stream(
            prompts[i].decode(),
            request_id=f"r{i}",
            temperature=0.0,
            max_tokens=20,
            ignore_eos=True,
            include_token_ids=True,
        )
        async with contextlib.aclosing(events):
            num_read = 0
            async for event in events:
                assert ends.get(i) is None, "nothing comes after the end"
                num_read += 1
                if isinstance(event, Delta):
                    outputs[i] += event.token_ids
                if isinstance(event, Finish):
                    ends[i] = event
                if num_read == leaving.get(i):
                    return

    async with run_server(steps, script=None, step_limits=limits, num_pages=33) as running:
        async with connect(running) as client:
            tasks = {i: asyncio.create_task(read(client, i)) for i in range(64)}
            await until(lambda: running.num_submitted == 64)
            early = [i for i, num_read in leaving.items() if num_read == 0]
            for i in early:  # before any result: in the queue or in prefill
                tasks[i].cancel()
            await until(lambda: len(running.aborts) == len(early))
            steps.open()
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
            await until(lambda: not running.engine._intake.live())
            await until(lambda: running.num_open_calls == 0)
    assert [i for i, result in enumerate(results) if result is not None] == sorted(early)
    for i in range(64):
        expected = expected_output(
            prompts[i], SamplingParams(temperature=0.0), 20, stop_ids=(EOS_ID,)
        )
        if i in leaving:
            assert outputs[i] == expected[: len(outputs[i])]
        else:
            assert outputs[i] == expected
            assert ends[i] is not None
    # each stream has one end; aborts are only of those that left, and at most one for each
    assert len(running.aborts) == len(set(running.aborts))
    assert set(running.aborts) <= {f"r{i}" for i in leaving}
    assert len(early) <= running.finished("cancelled") <= len(running.aborts)
    assert running.engine.metrics.total("requests_finished_total") == 64
    assert running.finished("cancelled") + running.finished("max_tokens") == 64


async def test_an_abort_asked_of_the_engine_ends_the_call_with_what_there_is() -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        call = stub.Generate(ask("r"))
        steps.allow(2)
        await until(lambda: running.engine.metrics.value("output_tokens_total") == 2)
        running.engine.abort("r")
        steps.allow(2)
        response = await call
        assert response.choices[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        assert len(response.choices[0].token_ids) in (2, 3, 4)
        assert running.aborts == ["r"]


async def test_an_error_that_is_not_ours_ends_the_call_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_server() as running, connect(running) as client:
        submit = running.engine.submit

        def broken(asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
            raise KeyError("a secret of the server")

        running.engine.submit = broken  # type: ignore[method-assign]
        with pytest.raises(ServerError) as caught:
            await client.generate("x", request_id="r7")
        running.engine.submit = submit  # type: ignore[method-assign]
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert (caught.value.reason, caught.value.request_id) == ("INTERNAL", "r7")
        assert "secret" not in str(caught.value)
        (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert "r7" in record.getMessage()
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_call_that_ends_before_its_first_event_is_read() -> None:
    """Between submit and the first read nothing but the servicer holds the stream."""

    class Gone:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

        def time_remaining(self) -> None:
            return None

        async def send_initial_metadata(self, metadata: object) -> None:
            raise asyncio.CancelledError

    steps = Steps()
    async with run_server(steps) as running:
        edge = Edge(running.engine.config.limits, running.engine.metrics)
        with ThreadPoolExecutor(1) as threads:
            servicer = GenerationServicer(
                lambda: running.engine, edge, threads, form_threads=threads
            )
            with pytest.raises(asyncio.CancelledError):
                await servicer.Generate(ask("unary"), Gone())  # type: ignore[arg-type]
            with pytest.raises(asyncio.CancelledError):
                await servicer.StreamGenerate(ask("stream"), Gone())  # type: ignore[arg-type]
        assert running.aborts == ["unary", "stream"]
