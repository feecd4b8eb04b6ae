"""Clients of the HTTP door: a coroutine for each way to use it, to leave it, and to be refused."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from scripts.judges.load.asks import Ask, make_ask, to_body
from scripts.judges.load.books import Call
from scripts.judges.load.crowd import Crowd
from scripts.judges.load.wire import ClosedError, Connection, build_request

PATIENCE_S: Final = 120.0  # a call that takes longer hangs


class HttpClients:
    """The connections that are kept, and what is done over them and over others."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._rng = crowd.rng
        self._kept: list[Connection] = []
        rows: list[tuple[float, Callable[[str], Awaitable[None]]]] = [
            (30, self.read_stream), (12, self.read_whole), (6, self.read_prompts),
            (10, self.leave_before_reply), (14, self.leave_in_stream), (3, self.leave_in_body),
            (8, self.have_timeout), (4, self.read_slowly), (6, self.ask_facts),
            (3, self.be_refused), (1, self.have_no_key),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in rows]
        self._ways = [way for _, way in rows]

    async def close(self) -> None:
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    async def act(self, tenant: str) -> None:
        """Makes a call of a random kind, to its end."""
        (way,) = self._rng.choices(self._ways, self._weights)
        await way(tenant)

    # ways to read to the end

    async def read_stream(self, tenant: str) -> None:
        ask = self._ask()
        await self._ask_for(tenant, "reads a stream", ask, stream=True)

    async def read_whole(self, tenant: str) -> None:
        await self._ask_for(tenant, "reads a whole reply", self._ask(), stream=False)

    async def read_prompts(self, tenant: str) -> None:
        """Sends several prompts in one body: each is a request of its own."""
        ask = dataclasses.replace(
            self._ask(), more_prompts=("hello", "world"), is_chat=False, golden=None
        )
        await self._ask_for(tenant, "sends three prompts", ask, stream=self._rng.random() < 0.5)

    async def have_timeout(self, tenant: str) -> None:
        rng = self._rng
        name = rng.choice(("timeout", "queue_timeout"))
        more = {name: rng.choice((0.001, 0.02, 0.2, 1.0))}
        ask = dataclasses.replace(self._ask(), golden=None)
        kind = f"has a {name}"
        await self._ask_for(tenant, kind, ask, stream=rng.random() < 0.5, more=more)

    async def read_slowly(self, tenant: str) -> None:
        """Takes nothing for a while: its stream ends, or is cut off, or goes on."""
        tokens = self._crowd.mean_tokens * 6
        ask = Ask(prompt="hello", max_tokens=tokens, logprobs=20, n=2, ignore_eos=True)
        call, request = self._request(tenant, "reads slowly", ask, stream=True)
        with self._crowd.recording(call):
            connection = await Connection.open_narrow(self._crowd.http)
            connection.send(b"".join(request))
            pause_s = self._rng.choice((0.5, 1.0, 3.0, 10.0))
            await asyncio.sleep(pause_s)
            if pause_s > 1.0 and self._rng.random() < 0.3:
                call.kind = "reads slowly and gives up"
                connection.reset()
                call.cut = "killed"
                return
            try:
                await self._read_reply(connection, call, ask)
            except ClosedError:
                call.end, call.cut = "", "stalled"
            connection.close()

    # ways to leave

    async def leave_before_reply(self, tenant: str) -> None:
        """Leaves before there is a status: with a reset, or in good order."""
        ask, rng = self._ask(), self._rng
        call, request = self._request(tenant, "leaves early", ask, stream=rng.random() < 0.5)
        with self._crowd.recording(call):
            connection = await Connection.open(self._crowd.http)
            connection.send(b"".join(request))
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.1, 0.4)))
            self._leave(connection, call)

    async def leave_in_stream(self, tenant: str) -> None:
        ask, rng = self._ask(), self._rng
        call, request = self._request(tenant, "leaves a stream", ask, stream=True)
        num_events = rng.choice((1, 2, 3, 5, 10, 30))
        with self._crowd.recording(call):
            connection = await Connection.open(self._crowd.http)
            connection.send(b"".join(request))
            await self._read_reply(connection, call, ask, num_events=num_events)
            if not call.end:
                self._leave(connection, call)
            connection.close()

    async def leave_in_body(self, tenant: str) -> None:
        """Never sends all of its request: the server has none."""
        ask = self._ask()
        call, (head, body) = self._request(tenant, "leaves in its body", ask, stream=True)
        call.num_requests = 0
        with self._crowd.recording(call):
            connection = await Connection.open(self._crowd.http)
            connection.send(head + body[: self._rng.randrange(len(body))])
            await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1)))
            self._leave(connection, call)

    def _leave(self, connection: Connection, call: Call) -> None:
        call.cut = "killed"
        if self._rng.random() < 0.5:
            connection.reset()
        else:
            connection.close()

    # what makes no text

    async def ask_facts(self, tenant: str) -> None:
        rows: list[tuple[str, str, object]] = [
            ("GET", "/v1/models", None), ("GET", "/load", None), ("GET", "/health", None),
            ("GET", "/ready", None), ("GET", "/metrics", None),
            ("POST", "/tokenize", {"prompt": "hello"}), ("POST", "/detokenize", {"tokens": [5, 6]}),
        ]  # fmt: skip
        method, path, body = self._rng.choice(rows)
        call = self._call(path, tenant, "asks for facts", num_requests=0)
        call.is_generating = False
        await self._exchange(call, build_request(method, path, self._headers(call), body))

    async def scrape(self, tenant: str) -> None:
        call = self._call("/metrics", tenant, "scrapes", num_requests=0)
        call.is_generating = False
        await self._exchange(call, build_request("GET", "/metrics", self._headers(call)))

    async def be_refused(self, tenant: str) -> None:
        rng = self._rng
        nonsense: dict[str, Any] = rng.choice(
            (
                {"temperature": -1}, {"model": "gpt-4"}, {"max_tokens": 1 << 20},
                {"guided_regex": "("}, {"best_of": 4}, {"tempreature": 1},
            )
        )  # fmt: skip
        ask = dataclasses.replace(self._ask(), form="", more_prompts=())
        call, request = self._request(
            tenant, "asks for nonsense", ask, stream=rng.random() < 0.5, more=nonsense
        )
        await self._exchange(call, request)
        if call.end:
            assert call.end in ("400", "404", "429"), call

    async def have_no_key(self, _: str) -> None:
        call, request = self._request("", "has a wrong key", self._ask(), stream=True)
        await self._exchange(call, request)
        assert call.reason == "unauthenticated", call

    # the parts of these

    def _ask(self) -> Ask:
        return make_ask(self._rng, mean_tokens=self._crowd.mean_tokens)

    def _call(self, route: str, tenant: str, kind: str, *, num_requests: int) -> Call:
        return Call(
            id=self._crowd.next_id(), door="http", method=route, tenant=tenant, kind=kind,
            num_requests=num_requests,
        )  # fmt: skip

    def _headers(self, call: Call) -> dict[str, str]:
        key = self._crowd.keys[call.tenant]
        return {"authorization": f"Bearer {key}", "x-request-id": call.id}

    def _request(
        self, tenant: str, kind: str, ask: Ask, *, stream: bool, more: dict[str, Any] | None = None
    ) -> tuple[Call, tuple[bytes, bytes]]:
        path, body = to_body(ask, stream=stream)
        call = self._call(path, tenant, kind, num_requests=1 + len(ask.more_prompts))
        return call, build_request("POST", path, self._headers(call), body | (more or {}))

    async def _ask_for(
        self,
        tenant: str,
        kind: str,
        ask: Ask,
        *,
        stream: bool,
        more: dict[str, Any] | None = None,
    ) -> None:
        call, request = self._request(tenant, kind, ask, stream=stream, more=more)
        with self._crowd.recording(call):
            connection = await self._take()
            connection.send(b"".join(request))
            try:
                await self._read_reply(connection, call, ask)
            except ClosedError:
                self._crowd.fault(call, "its connection was closed")
            self._keep(connection)

    async def _exchange(self, call: Call, request: tuple[bytes, bytes]) -> None:
        """Sends a request and reads its whole reply, whatever it is."""
        with self._crowd.recording(call):
            connection = await self._take()
            connection.send(b"".join(request))
            async with asyncio.timeout(PATIENCE_S):
                status = await connection.read_head()
                body = await connection.read_body()
            call.end = str(status)
            if status >= 400:
                _note_error(call, json.loads(body))
            self._keep(connection)

    async def _take(self) -> Connection:
        while self._kept:
            connection = self._kept.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return await Connection.open(self._crowd.http)

    def _keep(self, connection: Connection) -> None:
        if connection.is_open and len(self._kept) < 64:
            self._kept.append(connection)
        else:
            connection.close()

    async def _read_reply(
        self, connection: Connection, call: Call, ask: Ask, *, num_events: int | None = None
    ) -> None:
        """Reads a reply to its end; a stream's perhaps only so many events."""
        async with asyncio.timeout(PATIENCE_S):
            status = await connection.read_head()
            assert connection.headers["x-request-id"] == call.id
            if connection.headers["content-type"].startswith("text/event-stream"):
                await self._read_stream(connection, call, ask, num_events)
                return
            body = json.loads(await connection.read_body())
        call.end = str(status)
        if status != 200:
            _note_error(call, body)
            return
        call.finishes = [choice["finish_reason"] for choice in body["choices"]]
        tokens = [choice["token_ids"] for choice in body["choices"]]
        _note_usage(call, body["usage"])
        call.num_tokens = sum(map(len, tokens))
        self._check_whole(call, ask, tokens[0])

    async def _read_stream(
        self, connection: Connection, call: Call, ask: Ask, num_events: int | None
    ) -> None:
        first: list[int] = []
        is_done = False
        async for event in connection.read_events():
            assert not is_done, "something follows the mark of the end"
            if event == "[DONE]":
                is_done = True
                continue
            if "error" in event:
                _note_error(call, event)
                continue
            assert not call.reason, "something follows an error"
            if event.get("usage"):
                _note_usage(call, event["usage"])
            for choice in event["choices"]:
                token_ids = choice.get("token_ids", [])  # the role's chunk has none
                call.num_tokens += len(token_ids)
                if choice["index"] == 0:
                    first += token_ids
                if choice["finish_reason"]:
                    call.finishes.append(choice["finish_reason"])
            if num_events is not None:
                num_events -= 1
                if num_events <= 0:
                    self._crowd.check_output(call, ask, first, is_whole=False)
                    return
        call.end = "200"
        assert is_done != bool(call.reason), "a stream ends with its mark or with an error"
        if is_done:
            self._check_whole(call, ask, first)

    def _check_whole(self, call: Call, ask: Ask, first: list[int]) -> None:
        assert call.usage is not None, "there is no usage"
        assert call.num_tokens == call.usage[1], f"{call.num_tokens} tokens came of {call.usage[1]}"
        wanted = ask.n * (1 + len(ask.more_prompts))
        assert len(call.finishes) == wanted, f"{len(call.finishes)} of {wanted} choices ended"
        is_whole = call.finishes[0] == "length" and call.usage[1] == ask.max_tokens
        self._crowd.check_output(call, ask, first, is_whole=is_whole)


def _note_usage(call: Call, usage: dict[str, Any]) -> None:
    call.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def _note_error(call: Call, body: dict[str, Any]) -> None:
    error = body["error"]
    call.reason = error["code"]
    if call.reason == "quota_exceeded":
        call.quota = error["message"].partition(" ")[0]
