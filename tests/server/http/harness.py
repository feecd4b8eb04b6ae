"""The HTTP application in this process, and the same behind a real socket."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from jaxserve.config import Config, ServerSection
from jaxserve.engine import Engine, EngineState
from jaxserve.request import GenerationRequest
from jaxserve.server.door import Door
from jaxserve.server.http import HttpServer
from jaxserve.server.http.app import App
from jaxserve.server.openai.reply_models import ChatChunk, CompletionChunk
from tests.engines import build_engine, check_accounts, check_idle
from tests.fakes import FakeRunner
from tests.server.harness import LETTERS, Steps, watch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclasses.dataclass(slots=True, kw_only=True)
class Running:
    """A server under test.

    Attributes:
      client: in this process, or over a socket.
      port: None where there is no socket.
      asked: what its calls submitted.
      aborts: ids of the requests that a call asked to abort; twice means twice.
    """

    engine: Engine
    runner: FakeRunner
    door: Door
    client: httpx.AsyncClient
    asked: list[GenerationRequest]
    aborts: list[str]
    port: int | None = None
    server: HttpServer | None = None

    @property
    def num_connections(self) -> int:
        assert self.server is not None
        assert self.server._server is not None
        return len(self.server._server.server_state.connections)

    async def post(self, url: str, body: object, **headers: str) -> httpx.Response:
        return await self.client.post(url, json=body, headers=headers)

    async def complete(self, prompt: object = "Hi!", **body: Any) -> dict[str, Any]:  # noqa: ANN401
        return good(await self.post(COMPLETIONS, {"prompt": prompt} | body))

    async def chat(self, messages: object = None, **body: Any) -> dict[str, Any]:  # noqa: ANN401
        return good(await self.post(CHAT, {"messages": messages or HI} | body))

    async def stream(self, url: str, **body: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Returns the chunks of a stream that ends well."""
        start: dict[str, Any] = {"messages": HI} if url == CHAT else {"prompt": "Hi!"}
        response = await self.post(url, start | body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, done = read_events(response.text)
        assert done == "[DONE]"
        kind = ChatChunk if url == CHAT else CompletionChunk
        for chunk in chunks:
            kind.model_validate(chunk)
        return chunks

    def finished(self, reason: str) -> float:
        return self.engine.metrics.value("requests_finished_total", reason=reason)

    @property
    def num_output(self) -> float:
        return self.engine.metrics.value("output_tokens_total")

    @property
    def num_submitted(self) -> float:
        return self.engine.metrics.value("requests_submitted_total")


def good(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    return body


def error_of(response: httpx.Response) -> tuple[int, str, str | None, str]:
    """Returns (status, type, param, code) of a refusal whose body is key for key OpenAI's."""
    error = response.json()["error"]
    assert list(response.json()) == ["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error["type"], error["param"], error["code"]


def read_events(text: str) -> list[Any]:
    """Returns the values of a stream's events; [DONE] as it is."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [_parse(event.removeprefix("data: ")) for event in events]


def _parse(text: str) -> object:
    return text if text == "[DONE]" else json.loads(text)


@contextlib.asynccontextmanager
async def run_app(
    steps: Steps | None = None,
    *,
    section: ServerSection | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Running]:
    """Serves an engine in this process; at the end everything it owned is counted (K1, K5).

    Args:
      steps: holds the device's results back.
      config: more sections.
      options: of `build_engine`; the output is letters without an end, unless `script` is given.
    """
    async with _run(steps, section, config or {}, options) as (door, engine, runner):
        app = App(door)
        transport = httpx.ASGITransport(app.asgi)
        asked, aborts = watch(engine)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield Running(
                engine=engine, runner=runner, door=door, client=client, asked=asked, aborts=aborts
            )
        app.close()


@contextlib.asynccontextmanager
async def run_listening(
    steps: Steps | None = None,
    *,
    section: ServerSection | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Running]:
    """The same behind a socket of this machine."""
    async with _run(steps, section, config or {}, options) as (door, engine, runner):
        server = HttpServer(door)
        await server.start()
        asked, aborts = watch(engine)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                yield Running(
                    engine=engine,
                    runner=runner,
                    door=door,
                    client=client,
                    asked=asked,
                    aborts=aborts,
                    port=server.port,
                    server=server,
                )
        finally:
            if steps is not None:
                steps.open()
            await asyncio.to_thread(engine.stop)
            await server.stop()


@contextlib.asynccontextmanager
async def _run(
    steps: Steps | None,
    section: ServerSection | None,
    sections: dict[str, Any],
    options: dict[str, Any],
) -> AsyncIterator[tuple[Door, Engine, FakeRunner]]:
    options.setdefault("script", LETTERS)
    if steps is not None:
        options["on_result"] = steps.on_result
    engine, runner = build_engine(**options)
    config: Config = engine.config.model_copy(
        update={"server": section or ServerSection(http_port=0), **sections}
    )
    door = Door(config, engine.metrics)
    engine.start()
    door.attach(engine)
    try:
        yield door, engine, runner
    finally:
        if steps is not None:
            steps.open()
        await asyncio.to_thread(engine.stop)
        door.close()
    assert door.open_calls.count == 0
    if engine.state is EngineState.STOPPED:
        check_idle(engine)
    check_accounts(engine)
