"""A process with both doors: before the model, in service, while it drains, after a failure."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerSection
from jaxserve.engine import Engine
from jaxserve.plan import StepPlan
from jaxserve.server.app import Server
from jaxserve.server.lifecycle import Service
from tests.engines import build_engine, check_accounts, check_idle
from tests.server.harness import LETTERS, Steps, until
from tests.server.http.harness import COMPLETIONS, error_of, read_events

pytestmark = pytest.mark.asyncio

BODY = {"prompt": "Hi!", "max_tokens": 20, "ignore_eos": True}


@dataclasses.dataclass(slots=True, kw_only=True)
class Process:
    """A service that runs in this process, as a task."""

    engine: Engine
    steps: Steps
    server: Server
    exit_code: asyncio.Task[int]
    client: httpx.AsyncClient

    async def started_streams(self, count: int) -> list[asyncio.Task[httpx.Response]]:
        body = {**BODY, "stream": True}
        tasks = [
            asyncio.create_task(self.client.post(COMPLETIONS, json=body)) for _ in range(count)
        ]
        await until(lambda: len(self.engine._intake.live()) == count)
        while any(live.first_token_s is None for live in self.engine._intake.live()):
            self.steps.allow(1)
            await asyncio.sleep(0.001)
        return tasks


@contextlib.asynccontextmanager
async def run_service(drain_timeout_s: float, **options: Any) -> AsyncIterator[Process]:  # noqa: ANN401
    steps = Steps()
    engine, _ = build_engine(on_result=steps.on_result, num_pages=49, script=LETTERS, **options)
    section = ServerSection(port=0, http_port=0, drain_timeout_s=drain_timeout_s)
    service = Service(
        lambda: engine, engine.config.model_copy(update={"server": section}), engine.metrics
    )
    exit_code = asyncio.create_task(service.run())
    http = service.server.http
    assert http is not None
    await until(lambda: http.port != 0)
    async with httpx.AsyncClient(base_url=f"http://{http.address}") as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.001)
        yield Process(
            engine=engine, steps=steps, server=service.server, exit_code=exit_code, client=client
        )
        steps.open()
        await exit_code


async def refused(client: httpx.AsyncClient) -> httpx.Response:
    """Returns what a new request gets, once it is refused."""
    while (await client.get("/ready")).status_code == 200:
        await asyncio.sleep(0.001)
    return await client.post(COMPLETIONS, json=BODY)


async def test_before_the_model_is_loaded_everything_is_503_but_life() -> None:
    engine, _ = build_engine()
    section = ServerSection(port=0, http_port=0)
    server = Server(engine.config.model_copy(update={"server": section}), engine.metrics)
    await server.start()
    assert server.http is not None
    async with httpx.AsyncClient(base_url=f"http://{server.http.address}") as client:
        assert (await client.get("/health")).json() == {"status": "starting"}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "starting"})
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize")):
            response = await client.request(method, path, json={"prompt": "a"})
            assert error_of(response) == (503, "server_error", None, "not_serving")
            assert response.headers["retry-after"]
        assert (await client.get("/metrics")).status_code == 200
    await server.stop(0.0)
    assert engine.metrics.value("requests_refused_total", reason="not_serving") == 1


async def test_after_a_signal_running_streams_end_well_and_new_ones_are_503() -> None:
    async with run_service(drain_timeout_s=600) as process:
        streams = await process.started_streams(4)
        os.kill(os.getpid(), signal.SIGTERM)
        response = await refused(process.client)
        assert error_of(response) == (503, "server_error", None, "not_serving")
        assert int(response.headers["retry-after"]) >= 1
        assert (await process.client.get("/health")).json() == {"status": "draining"}
        await asyncio.sleep(0.3)  # uvicorn's own handlers would have closed the port by now
        async with httpx.AsyncClient(base_url=process.client.base_url) as newcomer:
            assert (await newcomer.post(COMPLETIONS, json=BODY)).status_code == 503
        process.steps.open()
        for stream in await asyncio.gather(*streams):
            *chunks, done = read_events(stream.text)
            assert done == "[DONE]"
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == "abcdefghij" * 2
        assert await process.exit_code == 0
        check_idle(process.engine)


async def test_what_is_not_done_in_time_ends_with_one_error() -> None:
    async with run_service(drain_timeout_s=0.0) as process:
        streams = await process.started_streams(3)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: process.engine._intake.is_cut)
        process.steps.open()
        for stream in await asyncio.gather(*streams):
            events = read_events(stream.text)
            assert events[-1]["error"]["code"] == "not_serving"
            assert "[DONE]" not in events
        assert await process.exit_code == 0
        check_accounts(process.engine)


async def test_a_failed_engine_ends_its_streams_and_exits_with_1() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 9:
            raise RuntimeError("a secret of the device")

    async with run_service(drain_timeout_s=600, on_launch=fail) as process:
        streams = await process.started_streams(3)
        process.steps.open()
        for stream in await asyncio.gather(*streams):
            error = read_events(stream.text)[-1]["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_dead")
            assert "secret" not in stream.text
        assert await process.exit_code == 1
        check_accounts(process.engine)


async def test_a_failed_engine_is_500_and_not_alive() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("a secret of the device")

    engine, _ = build_engine(on_launch=fail)
    section = ServerSection(port=0, http_port=0)
    server = Server(engine.config.model_copy(update={"server": section}), engine.metrics)
    await server.start()
    engine.start()
    server.attach(engine)
    assert server.http is not None
    async with httpx.AsyncClient(base_url=f"http://{server.http.address}") as client:
        for _ in range(2):  # the one that it died of, and the next
            response = await client.post(COMPLETIONS, json=BODY)
            assert error_of(response) == (500, "server_error", None, "engine_dead")
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "failed"})
    await server.wait_ended()
    await server.stop(0.0)


async def test_an_idle_server_leaves_at_once_though_connections_are_kept() -> None:
    async with run_service(drain_timeout_s=600) as process:
        await process.client.get("/health")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await process.exit_code == 0
