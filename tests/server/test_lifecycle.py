"""A serving process from its first probe to its exit code; signals are real."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import (
    AsyncClient,
    Finish,
    FinishReason,
    Health,
    ServerError,
    Start,
    UnavailableError,
)
from jaxserve.config import ServerSection
from jaxserve.engine import Engine
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.plan import StepPlan
from jaxserve.server.app import Server
from jaxserve.server.lifecycle import Service
from tests.engines import build_engine, check_accounts, check_idle
from tests.server.harness import Steps, local, until

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(slots=True, kw_only=True)
class Process:
    """A service that runs in this process, as a task."""

    engine: Engine
    steps: Steps
    exit_code: asyncio.Task[int]
    client: AsyncClient

    async def started_streams(self, count: int) -> list[asyncio.Task[list[object]]]:
        """Returns tasks that read streams, all of which have given their first token."""
        tasks = [asyncio.create_task(self._read(f"r{i}")) for i in range(count)]
        await until(lambda: len(self.engine._intake.live()) == count)
        while self.engine.metrics.value("requests_running") < count or self._num_without() > 0:
            self.steps.allow(1)
            await asyncio.sleep(0.001)
        return tasks

    def _num_without(self) -> int:
        return sum(1 for live in self.engine._intake.live() if live.first_token_s is None)

    async def _read(self, request_id: str) -> list[object]:
        events: list[object] = []
        try:
            stream = self.client.stream(
                "Hi!", request_id=request_id, max_tokens=30, ignore_eos=True
            )
            async for event in stream:
                events += [event]
        except ServerError as error:
            events.append(error)
        return events


@contextlib.asynccontextmanager
async def run_service(drain_timeout_s: float, **options: Any) -> AsyncIterator[Process]:  # noqa: ANN401
    steps = Steps()
    engine, _ = build_engine(on_result=steps.on_result, num_pages=49, **options)
    section = ServerSection(port=0, drain_timeout_s=drain_timeout_s)
    service = Service(
        lambda: engine, engine.config.model_copy(update={"server": section}), engine.metrics
    )
    exit_code = asyncio.create_task(service.run())
    await until(lambda: service.server.port != 0)
    async with AsyncClient(service.server.address) as client:
        await client.wait_ready(timeout_s=60)
        yield Process(engine=engine, steps=steps, exit_code=exit_code, client=client)
        steps.open()
        await exit_code


async def refused(client: AsyncClient) -> UnavailableError:
    """Returns what a new request gets, once it is refused."""
    while (await client.health()).is_ready:
        await asyncio.sleep(0.001)
    with pytest.raises(UnavailableError) as caught:
        await client.generate("x", max_tokens=1)
    return caught.value


async def test_after_a_signal_running_streams_end_well_and_new_ones_are_refused() -> None:
    async with run_service(drain_timeout_s=600) as process:
        streams = await process.started_streams(4)
        os.kill(os.getpid(), signal.SIGTERM)
        error = await refused(process.client)
        assert (error.reason, "draining" in str(error)) == ("NOT_SERVING", True)
        assert await process.client.health() == Health(is_alive=True, is_ready=False)
        process.steps.open()
        for events in await asyncio.gather(*streams):
            assert isinstance(events[0], Start)
            assert isinstance(events[-1], Finish)
            assert events[-1].reason is FinishReason.MAX_TOKENS
            assert events[-1].usage is not None
            assert events[-1].usage.completion_tokens == 30
        assert await process.exit_code == 0
        check_idle(process.engine)


async def test_what_is_not_done_in_time_ends_with_a_status() -> None:
    async with run_service(drain_timeout_s=0.0) as process:
        streams = await process.started_streams(4)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: process.engine._intake.is_cut)
        process.steps.open()  # the engine thread comes back from the step it was in
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], UnavailableError)
            assert events[-1].reason == "NOT_SERVING"
            assert not [event for event in events if isinstance(event, Finish)]
        assert await process.exit_code == 0
        check_idle(process.engine)
        check_accounts(process.engine)


async def test_a_second_signal_does_not_wait() -> None:
    async with run_service(drain_timeout_s=600) as process:
        streams = await process.started_streams(2)
        os.kill(os.getpid(), signal.SIGTERM)
        await refused(process.client)
        assert not process.engine._intake.is_cut
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: process.engine._intake.is_cut)
        process.steps.open()
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], UnavailableError)
        assert await process.exit_code == 0


async def test_an_idle_server_leaves_at_once() -> None:
    async with run_service(drain_timeout_s=600) as process:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await process.exit_code == 0


async def test_a_failed_engine_ends_its_streams_and_exits_with_1() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 9:
            raise RuntimeError("the device is gone")

    async with run_service(drain_timeout_s=600, on_launch=fail) as process:
        streams = await process.started_streams(3)
        process.steps.open()
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], ServerError)
            assert events[-1].reason == "ENGINE_DEAD"
        assert await process.exit_code == 1


async def test_the_port_answers_while_the_engine_loads() -> None:
    is_loaded = threading.Event()
    engine, _ = build_engine()

    def load() -> Engine:
        is_loaded.wait()
        return engine

    section = ServerSection(port=0)
    service = Service(load, engine.config.model_copy(update={"server": section}), engine.metrics)
    exit_code = asyncio.create_task(service.run())
    await until(lambda: service.server.port != 0)
    async with AsyncClient(service.server.address) as client:
        assert await client.health() == Health(is_alive=True, is_ready=False)
        with pytest.raises(UnavailableError, match="loading"):
            await client.generate("x")
        ready = asyncio.create_task(client.wait_ready(timeout_s=60))
        is_loaded.set()
        await ready
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1
        os.kill(os.getpid(), signal.SIGTERM)
    assert await exit_code == 0


async def test_what_the_loader_raises_comes_out_and_the_port_is_free_again() -> None:
    def load() -> Engine:
        raise CheckpointError("model.gguf is cut short; download it again")

    engine, _ = build_engine()
    service = Service(load, local(engine.config), engine.metrics)
    with pytest.raises(CheckpointError, match="cut short"):
        await service.run()
    again = Server(
        engine.config.model_copy(update={"server": ServerSection(port=service.server.port)}),
        engine.metrics,
    )
    await again.start()
    await again.stop(0.0)


async def test_a_port_that_is_taken_ends_the_service_before_anything_is_loaded() -> None:
    engine, _ = build_engine()
    first = Server(local(engine.config), engine.metrics)
    await first.start()
    loads: list[int] = []

    def load() -> Engine:
        loads.append(1)
        return engine

    taken = engine.config.model_copy(update={"server": ServerSection(port=first.port)})
    with pytest.raises(ConfigError, match="cannot be bound"):
        await Service(load, taken, engine.metrics).run()
    assert loads == []
    await first.stop(0.0)


async def test_a_signal_while_loading_ends_the_process_with_0() -> None:
    program = (
        "import logging, sys, threading\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from jaxserve.config import Config, ServerSection\n"
        "from jaxserve.metrics import Metrics\n"
        "from jaxserve.server.lifecycle import serve\n"
        "config = Config(server=ServerSection(port=0))\n"
        "sys.exit(serve(threading.Event().wait, config, Metrics()))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    lines = [await process.stderr.readline()]
    assert b"listening" in lines[0]
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
