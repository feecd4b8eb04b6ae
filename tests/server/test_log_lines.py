"""The log of calls: whose each line is, one line for each request that ended, nothing that was
said."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from jaxserve.cli.log import build_formatter
from jaxserve.client import AsyncClient, ServerError
from jaxserve.request import StructuredOutput
from jaxserve.server.submitting import run_in_thread, submit_in_thread
from tests.server.credentials import sections, write_keys
from tests.server.harness import connect, run_server
from tests.server.http import harness as http

pytestmark = pytest.mark.asyncio

SECRET: Final = "QXZZY"
ENGINES: Final = ("jaxserve.engine.engine", "jaxserve.engine.pipeline")  # of no request


class Lines:
    """What the process has written, as JSON."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(build_formatter("json"))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.all if line["event"] == event]


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines, ours = Lines(), logging.getLogger("jaxserve")
    level = ours.level
    ours.addHandler(lines.handler)
    ours.setLevel(logging.DEBUG)
    yield lines
    ours.removeHandler(lines.handler)
    ours.setLevel(level)


def whose(line: dict[str, Any]) -> tuple[object, object]:
    return line.get("request_id"), line.get("tenant")


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_each_request_that_ended_has_one_line(
    lines: Lines, door: str, tmp_path: Path
) -> None:
    path, (key,) = write_keys(tmp_path, "acme")
    if door == "grpc":
        async with run_server(sections=sections(path)) as running:
            async with AsyncClient(running.target, key=key) as client:
                await client.generate(SECRET, max_tokens=2, request_id="r-1")
    else:
        async with http.run_listening(config=dict(sections(path))) as served:
            headers = {"authorization": f"Bearer {key}", "x-request-id": "r-1"}
            http.good(
                await served.post(http.COMPLETIONS, {"prompt": SECRET, "max_tokens": 2}, **headers)
            )
    (line,) = lines.of("finished")
    assert whose(line) == ("r-1", "acme")
    assert (line["reason"], line["output_tokens"]) == ("max_tokens", 2)
    assert SECRET not in lines.text
    assert key not in lines.text


async def test_a_list_of_prompts_has_a_line_for_each(lines: Lines) -> None:
    async with http.run_listening() as served:
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        http.good(await served.post(http.COMPLETIONS, body, **{"x-request-id": "r-1"}))
    assert {whose(line) for line in lines.of("finished")} == {
        ("r-1", "anonymous"),
        ("r-1-1", "anonymous"),
    }


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_call_that_fails_has_a_line_without_its_words(
    lines: Lines, door: str, tmp_path: Path
) -> None:
    path, (key,) = write_keys(tmp_path, "acme")
    if door == "grpc":
        async with run_server(sections=sections(path)) as running:
            async with AsyncClient(running.target, key=key) as client:
                with pytest.raises(ServerError, match=SECRET):
                    await client.generate("x", model=SECRET, request_id="r-1")
    else:
        async with http.run_listening(config=dict(sections(path))) as served:
            headers = {"authorization": f"Bearer {key}", "x-request-id": "r-1"}
            response = await served.post(
                http.COMPLETIONS, {"prompt": "x", "model": SECRET}, **headers
            )
            assert SECRET in response.text
    (line,) = lines.of("failed")
    assert whose(line) == ("r-1", "acme")
    assert (line["level"], line["code"], line["reason"]) == ("INFO", "NOT_FOUND", "MODEL_NOT_FOUND")
    assert SECRET not in lines.text


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_who_has_no_key_does_not_fill_the_log(
    lines: Lines, door: str, tmp_path: Path
) -> None:
    path, _ = write_keys(tmp_path, "acme")
    if door == "grpc":
        async with run_server(sections=sections(path)) as running:
            async with connect(running) as client:
                with pytest.raises(ServerError):
                    await client.generate("x")
    else:
        async with http.run_listening(config=dict(sections(path))) as served:
            assert (await served.post(http.COMPLETIONS, {"prompt": "x"})).status_code == 401
    (line,) = lines.of("failed")
    assert (line["level"], line["tenant"]) == ("DEBUG", "anonymous")


async def test_every_line_of_a_call_is_its_own_from_whichever_thread(lines: Lines) -> None:
    """Requests with a form are submitted from a thread."""
    form = StructuredOutput(kind="regex", text="[a-j]*")
    async with run_server() as running, connect(running) as client:
        start = len(lines.all)
        await client.generate("x", structured_output=form, max_tokens=3, request_id="r-1")
        own = [line for line in lines.all[start:] if line["logger"] not in ENGINES]
    assert {line["event"] for line in own} >= {"finished"}
    assert {whose(line) for line in own} == {("r-1", "anonymous")}


@pytest.mark.parametrize("run", [run_in_thread, submit_in_thread])
async def test_a_threads_lines_are_its_callers(lines: Lines, run: Any) -> None:  # noqa: ANN401
    logger = logging.getLogger("jaxserve.test")
    more = {} if run is run_in_thread else {"stream_of": lambda _: None}
    with ThreadPoolExecutor(1) as threads:
        for name in ("r-1", "r-2"):  # the thread is kept, what it carries is not
            with structlog.contextvars.bound_contextvars(request_id=name):
                await run(threads, lambda: logger.info("hello"), **more)
        await asyncio.to_thread(logger.info, "outside")
    assert [line.get("request_id") for line in lines.all] == ["r-1", "r-2", None]


async def test_a_calls_facts_are_forgotten_at_its_end(lines: Lines) -> None:
    async with http.run_app() as running:  # its calls run in this very task
        await running.complete("x", max_tokens=1)
    logging.getLogger("jaxserve.test").info("afterwards")
    assert whose(lines.of("afterwards")[0]) == (None, None)
