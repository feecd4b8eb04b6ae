"""While grammars of some are compiled, others are answered: through both doors."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from jaxserve.client import StructuredOutput
from jaxserve.request import SamplingParams
from jaxserve.request import StructuredOutput as Form
from jaxserve.server.door import NUM_FORM_THREADS, NUM_THREADS
from jaxserve.text.constraints import Constraint, Constraints
from tests.server.harness import connect, run_server
from tests.server.http.harness import COMPLETIONS, run_app

pytestmark = pytest.mark.asyncio

JSON = {"content-type": "application/json"}
NUM_SLOW = NUM_THREADS + NUM_FORM_THREADS


class SlowBuild:
    """Takes the place of the compiler: no form is built before it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.begun = threading.Semaphore(0)
        self._build = Constraints.build

    def build(
        self, constraints: Constraints, sampling: SamplingParams, form: Form | None
    ) -> Constraint | None:
        if form is not None:
            self.begun.release()
            assert self.released.wait(20)
        return self._build(constraints, sampling, form)

    @contextlib.asynccontextmanager
    async def holding(self, tasks: list["asyncio.Task[object]"]) -> AsyncIterator[None]:
        """All threads for forms are taken while the block runs."""
        try:
            for _ in range(NUM_FORM_THREADS):
                assert await asyncio.to_thread(self.begun.acquire, timeout=20)
            yield
        finally:
            self.released.set()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowBuild:
    slow = SlowBuild()
    monkeypatch.setattr(Constraints, "build", lambda *given: slow.build(*given))
    return slow


async def test_grpc_calls_without_a_form_do_not_wait(slow: SlowBuild) -> None:
    form = StructuredOutput(kind="regex", text="a")
    async with run_server(script=None) as running, connect(running) as client:
        tasks = [
            asyncio.create_task(client.generate("x", structured_output=form))
            for _ in range(NUM_SLOW)
        ]
        async with slow.holding([*tasks]):
            assert (await client.generate("x", max_tokens=2)).text
            assert await client.tokenize("x")
            assert not any(task.done() for task in tasks)
        assert [task.result().text for task in tasks] == ["a"] * NUM_SLOW


@pytest.mark.parametrize("key", ["structured_outputs", "structured\\u005foutputs"])
async def test_http_calls_without_a_form_do_not_wait(slow: SlowBuild, key: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 4, "{key}": {{"regex": "a"}}}}'
    async with run_app(script=None) as running:
        tasks = [
            asyncio.create_task(running.client.post(COMPLETIONS, content=body, headers=JSON))
            for _ in range(NUM_SLOW)
        ]
        async with slow.holding([*tasks]):
            assert (await running.complete(max_tokens=2))["choices"]
            assert (await running.post("/tokenize", {"prompt": "x"})).status_code == 200
            assert not any(task.done() for task in tasks)
        for task in tasks:
            assert task.result().json()["choices"][0]["text"] == "a"
