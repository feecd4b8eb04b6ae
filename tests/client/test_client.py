"""Both clients against a real server: the same calls, the same records, the same errors."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxserve.client as client_module
from jaxserve.client import (
    AsyncClient,
    BadRequestError,
    CallDeadlineError,
    Client,
    Delta,
    Event,
    Finish,
    FinishReason,
    Health,
    NotSupportedError,
    ServerError,
    Start,
    StructuredOutput,
    UnavailableError,
)
from jaxserve.client.requests import GenerateOptions, build_generate
from jaxserve.config import ServerSection
from jaxserve.gen import generation_pb2
from jaxserve.server.app import Server
from tests.engines import NO_CACHE, build_engine
from tests.fakes import EOS_ID, say
from tests.server.harness import Running, Steps, local, run_server, until

ROOT = Path(__file__).parents[2]
SCRIPT = say({None: [*"né🌶".encode(), EOS_ID]})
ASYNC = pytest.mark.asyncio


async def blocking[T](running: Running, call: Callable[[Client], T]) -> T:
    """Runs a call of the blocking client in a thread, as its users do."""

    def run() -> T:
        with Client(running.target) as client:
            return call(client)

    return await asyncio.to_thread(run)


async def gather(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


@ASYNC
async def test_both_clients_give_the_same_records() -> None:
    async with (
        run_server(script=SCRIPT, prefix_cache=NO_CACHE) as running,
        AsyncClient(running.target) as client,
    ):
        options: GenerateOptions = {"request_id": "r", "include_token_ids": True}
        first = await client.generate("Hi!", **options)
        second = await blocking(running, lambda c: c.generate("Hi!", **options))
        assert first.text == second.text == "né🌶"
        assert first.token_ids == second.token_ids == (*"né🌶".encode(), EOS_ID)
        assert first.finish_reason is second.finish_reason is FinishReason.EOS
        assert first.usage == second.usage
        assert first.request_id == second.request_id == "r"
        assert first.timings.time_to_first_token_s >= first.timings.queue_s >= 0

        assert await client.models() == await blocking(running, lambda c: c.models())
        tokens = await client.tokenize("né", include_offsets=True)
        assert tokens == await blocking(running, lambda c: c.tokenize("né", include_offsets=True))
        text = await client.detokenize(tokens.token_ids)
        assert text == await blocking(running, lambda c: c.detokenize(tokens.token_ids)) == "né"
        assert await client.health() == await blocking(running, lambda c: c.health())
        await blocking(running, lambda c: c.wait_ready(timeout_s=60))


@ASYNC
async def test_both_clients_stream_a_start_deltas_and_a_finish() -> None:
    async with run_server(script=SCRIPT) as running, AsyncClient(running.target) as client:
        for events in (
            await gather(client.stream("Hi!")),
            await blocking(running, lambda c: list(c.stream("Hi!"))),
        ):
            start, *deltas, finish = events
            assert isinstance(start, Start)
            assert (start.model, start.prompt_tokens) == ("bytes", 3)
            assert isinstance(finish, Finish)
            assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == "né🌶"
            assert len(deltas) == sum(isinstance(delta, Delta) for delta in deltas)


@ASYNC
async def test_a_blocking_stream_that_is_closed_cancels_its_request() -> None:
    steps = Steps()
    async with run_server(steps) as running:
        steps.allow(1)

        def read_one(client: Client) -> Event:
            with contextlib.closing(client.stream("Hi!", max_tokens=30)) as events:
                return next(events)

        assert isinstance(await blocking(running, read_one), Start)
        await until(lambda: len(running.aborts) == 1)
        steps.open()
        await until(lambda: running.finished("cancelled") == 1)


@ASYNC
async def test_errors_carry_code_reason_field_and_request_id() -> None:
    async with run_server() as running, AsyncClient(running.target) as client:

        async def stream_it() -> None:
            await gather(client.stream("x", top_p=2.0, request_id="r"))

        for attempt in (
            client.generate("x", top_p=2.0, request_id="r"),
            stream_it(),
            blocking(running, lambda c: c.generate("x", top_p=2.0, request_id="r")),
            blocking(running, lambda c: list(c.stream("x", top_p=2.0, request_id="r"))),
        ):
            with pytest.raises(BadRequestError, match="top_p is 2") as caught:
                await attempt
            error = caught.value
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (error.reason, error.field) == ("INVALID_FIELD", "sampling.top_p")
            assert (error.request_id, error.retry_after_s) == ("r", None)
        form = StructuredOutput(kind="regex", text="a+")
        with pytest.raises(NotSupportedError, match="min_tokens"):
            await client.generate("x", structured_output=form, min_tokens=1)


@ASYNC
async def test_what_cannot_be_sent_is_refused_before_it_is() -> None:
    async with run_server() as running, AsyncClient(running.target) as client:
        wrong: list[tuple[dict[str, Any], type[Exception]]] = [
            ({"stop_token_ids": [-1]}, ValueError),
            ({"stop_token_ids": ["abc"]}, TypeError),
            ({"stop_token_ids": "abc"}, TypeError),
            ({"stop_strings": "abc"}, TypeError),
            ({"logit_bias": {-1: 1.0}}, ValueError),
            ({"logit_bias": {"abc": 1.0}}, TypeError),
            ({"max_tokens": -1}, ValueError),
            ({"seed": 1 << 64}, ValueError),
            ({"bad_words": "abc"}, TypeError),
            ({"allowed_token_ids": [-1]}, ValueError),
            ({"n": 1 << 32}, ValueError),
            ({"tool_choice": "auto"}, ValueError),
            ({"tool_function": "add"}, ValueError),
            ({"temprature": 0.5}, TypeError),
        ]
        for options, error in wrong:
            with pytest.raises(error):
                await client.generate("x", **options)
        prompts: list[tuple[Any, type[Exception]]] = [
            ([-1], ValueError),
            (["abc"], TypeError),
            ("\ud800", ValueError),  # no UTF-8 can hold it
        ]
        for prompt, error in prompts:
            with pytest.raises(error):
                await client.generate(prompt)
        assert running.num_submitted == 0
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


def test_none_is_an_option_left_out() -> None:
    bare = build_generate("x", {})
    assert build_generate("x", {"temperature": None, "stop_strings": None}) == bare  # type: ignore[typeddict-item]
    assert not bare.sampling.HasField("temperature")


def test_every_field_of_the_proto_is_an_option() -> None:
    fields = {
        field.name
        for message in (
            generation_pb2.SamplingParams,
            generation_pb2.StopConditions,
            generation_pb2.OutputOptions,
        )
        for field in message.DESCRIPTOR.fields
    }
    top = {
        "request_id", "model", "priority", "cache_salt", "queue_timeout_s", "structured_output",
    }  # fmt: skip
    assert GenerateOptions.__annotations__.keys() == fields | top | {"tool_choice", "tool_function"}


@ASYNC
async def test_nobody_there_is_unavailable_and_waiting_for_him_ends_in_time() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("x")
        assert (caught.value.reason, caught.value.request_id) == ("", "")
        with pytest.raises(CallDeadlineError, match=r"not ready after 0\.05 s"):
            await client.wait_ready(timeout_s=0.05)

    def wait() -> None:
        with Client("127.0.0.1:1") as client:
            client.wait_ready(timeout_s=0.05)

    with pytest.raises(CallDeadlineError, match=r"not ready after 0\.05 s"):
        await asyncio.to_thread(wait)


@ASYNC
async def test_waiting_begins_before_the_server_and_ends_with_its_engine() -> None:
    engine, _ = build_engine()
    probe = Server(local(engine.config), engine.metrics)
    await probe.start()  # to learn a free port
    await probe.stop(0.0)
    server = Server(
        engine.config.model_copy(update={"server": ServerSection(port=probe.port)}), engine.metrics
    )
    async with AsyncClient(f"127.0.0.1:{probe.port}") as client:
        waiting = asyncio.create_task(client.wait_ready(timeout_s=60))
        await server.start()
        while not (await client.health(timeout_s=60)).is_alive:
            pass
        assert not waiting.done()
        server.attach(engine)
        engine.start()
        await waiting
        assert await client.health() == Health(is_alive=True, is_ready=True)
    await asyncio.to_thread(engine.stop)
    await server.stop(5.0)


def test_the_client_imports_neither_jax_nor_the_engine() -> None:
    program = (
        "import sys, jaxserve.client\n"
        "heavy = [name for name in ('jax', 'numpy', 'tokenizers', 'pydantic', 'jaxserve.engine',\n"
        "         'jaxserve.server') if name in sys.modules]\n"
        "print(heavy)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_every_error_is_a_server_error() -> None:
    errors = [getattr(client_module, name) for name in client_module.__all__ if "Error" in name]
    assert len(errors) == 13
    assert all(issubclass(error, ServerError) for error in errors)
