"""What is told without generating: models, tokens, health, metrics, the API's own description."""

import asyncio
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from jaxserve.engine import Engine, EngineState
from jaxserve.errors import InvalidRequestError
from jaxserve.server.door import Door
from jaxserve.server.http.call import Call
from jaxserve.server.http.edge import do_until_gone
from jaxserve.server.http.openapi import build_openapi
from jaxserve.server.http.reply import Reply, build_json, to_json
from jaxserve.server.json_text import parse_json
from jaxserve.server.metrics_http import build_metrics_app
from jaxserve.server.openai import check_model
from jaxserve.server.openai.token_bodies import detokenize, tokenize
from jaxserve.server.submitting import run_in_thread

NUM_SCRAPES: Final = 4  # at once; more wait their turn


class Facts:
    """Handlers of the calls that ask."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._openapi = to_json(build_openapi(asks_for_keys=not door.authenticator.is_open))
        self._scrapes = ThreadPoolExecutor(NUM_SCRAPES, thread_name_prefix="jaxserve-scrape")
        self._metrics = build_metrics_app(door.metrics, door.config.metrics.prefix)

    def close(self) -> None:
        """Lets the threads end when their work is done."""
        self._scrapes.shutdown(wait=False)

    async def list_models(self, call: Call) -> None:
        model = self._describe_model()
        await call.reply(build_json({"object": "list", "data": [model]}))

    async def get_model(self, call: Call) -> None:
        check_model(call.path_params["model"], self._door.get_engine().model)
        await call.reply(build_json(self._describe_model()))

    async def tokenize(self, call: Call) -> None:
        await self._answer(call, tokenize)

    async def detokenize(self, call: Call) -> None:
        await self._answer(call, detokenize)

    async def tokenizer_info(self, call: Call) -> None:
        """Returns what a client needs to know of the tokenizer, as vLLM does."""
        engine = self._door.get_engine()
        settings = await self._in_thread(
            lambda: engine.tokenizer.as_files()["tokenizer_config.json"]
        )
        facts = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": engine.model.max_model_tokens,
            **json.loads(settings),
        }
        await call.reply(build_json(facts))

    async def health(self, call: Call) -> None:
        """Liveness: the process is worth keeping."""
        engine = self._door.find_engine()
        state = EngineState.STARTING if engine is None else engine.state
        has_failed = state is EngineState.FAILED
        await call.reply(build_json({"status": state.value}, status=503 if has_failed else 200))

    async def ready(self, call: Call) -> None:
        """Readiness: requests are accepted."""
        engine = self._door.find_engine()
        state = EngineState.STARTING if engine is None else engine.state
        is_ready = state is EngineState.SERVING
        await call.reply(build_json({"status": state.value}, status=200 if is_ready else 503))

    async def metrics(self, call: Call) -> None:
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": "",
            "HTTP_ACCEPT": call.header("accept"),
            "HTTP_ACCEPT_ENCODING": "",
        }
        scraping = asyncio.get_running_loop().run_in_executor(
            self._scrapes, lambda: _run_wsgi(self._metrics, environ)
        )
        await call.reply(await scraping)

    async def openapi(self, call: Call) -> None:
        await call.reply(Reply(body=self._openapi))

    async def _answer(
        self, call: Call, answer: Callable[[object, Engine], dict[str, object]]
    ) -> None:
        self._door.get_engine()  # before a body is read that nobody could answer
        body = await call.read_body()

        async def work() -> None:
            engine = self._door.get_engine()
            reply = await self._in_thread(lambda: build_json(answer(_parse(body), engine)))
            await call.reply(reply)

        await do_until_gone(call, work())

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        return await run_in_thread(self._door.threads, call)

    def _describe_model(self) -> dict[str, object]:
        model = self._door.get_engine().model
        return {
            "id": model.name,
            "object": "model",
            "created": int(self._door.started_s),
            "owned_by": "jaxserve",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_tokens,
        }


def _parse(body: bytes) -> object:
    try:
        return parse_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error


def _run_wsgi(
    app: Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]], environ: dict[str, Any]
) -> Reply:
    start: list[Any] = []
    body = b"".join(app(environ, lambda *parts: start.extend(parts)))
    status, headers = start[0], dict(start[1])
    return Reply(
        status=int(status.partition(" ")[0]), body=body, content_type=headers["Content-Type"]
    )
