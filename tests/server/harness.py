"""A real gRPC server on a free port, over an engine on the fake runner."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from jaxserve.client import AsyncClient
from jaxserve.config import Config, Section, ServerSection
from jaxserve.engine import Engine, EngineState, Stream
from jaxserve.engine.stream import Delivery
from jaxserve.gen import generation_pb2, generation_pb2_grpc
from jaxserve.plan import StepPlan
from jaxserve.request import GenerationRequest, Request
from jaxserve.server.app import Server
from tests.engines import build_engine, check_accounts, check_idle
from tests.fakes import FakeRunner, say

LETTERS = say({None: b"abcdefghij" * 9})
# A conversation whose answers hold reasoning and calls, in the form that Qwen's models write.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs


class Steps:
    """Lets results come back from the fake device one by one; pass `on_result` to the engine."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()

    def on_result(self, plan: StepPlan) -> None:
        if not self._is_open.is_set():
            self._permits.acquire()

    def allow(self, count: int) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self._is_open.set()
        self._permits.release(1000)


@dataclasses.dataclass(slots=True, kw_only=True)
class Running:
    """A server under test.

    Attributes:
      target: where it listens.
      asked: what its calls submitted.
      aborts: ids of the requests that a call asked to abort; twice means twice.
    """

    engine: Engine
    runner: FakeRunner
    server: Server
    target: str
    asked: list[GenerationRequest]
    aborts: list[str]

    def finished(self, reason: str) -> float:
        return self.engine.metrics.value("requests_finished_total", reason=reason)

    @property
    def num_submitted(self) -> float:
        return self.engine.metrics.value("requests_submitted_total")

    @property
    def num_open_calls(self) -> int:
        return self.server.door.open_calls.count


@contextlib.asynccontextmanager
async def run_server(
    steps: Steps | None = None,
    *,
    sections: Mapping[str, Section] | None = None,
    read_config: Callable[[], Config] | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Running]:
    """Serves an engine; at the end everything it owned is counted (K1, K5).

    Args:
      steps: holds the device's results back.
      sections: of the configuration, by name, that the server has and the engine has not.
      read_config: see `Server`.
      options: of `build_engine`; the output is letters without an end, unless `script` is given.
    """
    options.setdefault("script", LETTERS)
    if steps is not None:
        options["on_result"] = steps.on_result
    engine, runner = build_engine(**options)
    asked, aborts = watch(engine)
    config = local(engine.config).model_copy(update=dict(sections or {}))
    server = Server(config, engine.metrics, read_config=read_config)
    await server.start()
    engine.start()
    server.attach(engine)
    target = f"127.0.0.1:{server.port}"
    try:
        yield Running(
            engine=engine, runner=runner, server=server, target=target, asked=asked, aborts=aborts
        )
    finally:
        if steps is not None:
            steps.open()
        await asyncio.to_thread(engine.stop)
        await server.stop(5.0)
    if engine.state is EngineState.STOPPED:
        check_idle(engine)
    check_accounts(engine)


def watch(engine: Engine) -> tuple[list[GenerationRequest], list[str]]:
    """Returns lists that the engine's submits and aborts will be written to."""
    submitted: list[GenerationRequest] = []
    aborts: list[str] = []
    offer, abort = engine.offer, engine._intake.abort

    def watched_offer(asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
        submitted.append(asked)
        return offer(asked, delivery=delivery)

    def watched_abort(request: Request) -> None:
        aborts.append(request.id)
        abort(request)

    engine.offer = watched_offer  # type: ignore[method-assign]
    engine._intake.abort = watched_abort  # type: ignore[method-assign]
    return submitted, aborts


def local(config: Config, **section: Any) -> Config:  # noqa: ANN401
    """Returns the configuration with a free port of this machine."""
    return config.model_copy(update={"server": ServerSection(port=0, **section)})


@contextlib.asynccontextmanager
async def connect(running: Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.target) as client:
        yield client


@contextlib.asynccontextmanager
async def raw_stub(running: Running) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    """A stub without our client's conveniences, for messages it would not send."""
    async with grpc.aio.insecure_channel(running.target) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def read_rest(
    call: Any,  # noqa: ANN401  # the stubs' calls have no types
    messages: list[generation_pb2.StreamGenerateResponse] | None = None,
) -> list[generation_pb2.StreamGenerateResponse]:
    """Returns what is left of a stream; fills `messages` even where it ends with an error."""
    messages = [] if messages is None else messages
    while (message := await call.read()) is not EOF:
        messages.append(message)
    return messages


async def until(condition: Callable[[], bool]) -> None:
    """Returns once something that must happen has happened; a hang is the test's timeout."""
    while not condition():
        await asyncio.sleep(0.001)
