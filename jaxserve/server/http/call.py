"""One HTTP request and its reply, over ASGI: what may come, how long it may take, who has gone."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from jaxserve.config import Config
from jaxserve.errors import HttpError
from jaxserve.server.edge import AUTHORIZATION_KEY, REQUEST_ID_KEY
from jaxserve.server.http.reply import JSON, Reply
from jaxserve.server.tracing import RequestSpan

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLIENT_GONE: Final = 499  # a word of proxies, for metrics: nobody gets it
PIECE_BYTES: Final = 1 << 16  # of a body that is sent: each must get away in time
SMALL_BYTES: Final = 1 << 16  # of a body that nobody reads: the parser passes over it
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


class Transport(Protocol):
    """The connection that a request came on, where it is a real one."""

    def abort(self) -> None: ...


class Call:
    """A request whose body is read at most once, and whose reply is sent once.

    Attributes:
      request_id: as asked, or made here where that cannot be echoed.
      tenant: whose it is, once that is known; "" where nobody is asked.
      span: of the call, where it is traced.
      arrival_s: on the monotonic clock.
      status: of the reply; None until it begins.
      is_complete: the whole reply was handed to the transport.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: Config) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._config = config
        self._headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        self._has_read = False
        self.arrival_s = time.monotonic()
        self.tenant = ""
        self.span: RequestSpan | None = None
        self.status: int | None = None
        self.is_complete = False
        self.asked_id = self.header(REQUEST_ID_KEY)
        self.request_id = self.asked_id or f"req-{secrets.token_hex(12)}"

    @property
    def path_params(self) -> dict[str, str]:
        return dict(self._scope.get("path_params", {}))

    @property
    def path(self) -> str:
        return str(self._scope["path"])

    @property
    def method(self) -> str:
        return str(self._scope["method"])

    @property
    def authorization(self) -> str | None:
        """The header; None where there is none, or more than one."""
        values = self._headers.get(AUTHORIZATION_KEY, [])
        return values[0] if len(values) == 1 else None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """All of them, by their names in lower case."""
        return [(name, value) for name, values in self._headers.items() for value in values]

    def header(self, name: str) -> str:
        """Returns a header's last value; empty where there is none."""
        return self._headers.get(name, [""])[-1]

    def make_id(self) -> None:
        """Gives up the id that was asked for: it cannot be echoed."""
        self.request_id = f"req-{secrets.token_hex(12)}"

    async def read_body(self) -> bytes:
        """Returns the request's body.

        Raises:
          HttpError: it is no JSON by its type, too large, too late, or its sender has gone.
        """
        self._check_type()
        timeout_s = self._config.server.http_read_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._read(self._config.limits.max_message_bytes)
        except TimeoutError:
            raise HttpError(
                f"the body did not arrive within {timeout_s:g} s (server.http_read_timeout_s); "
                "send it faster",
                status=408,
                reason="REQUEST_TIMEOUT",
                headers={"connection": "close"},
            ) from None
        self._has_read = True
        return body

    def _check_type(self) -> None:
        kind = self.header("content-type").partition(";")[0].strip().lower()
        encoding = self.header("content-encoding").strip().lower()
        if kind != JSON:
            raise HttpError(
                f"content-type is {kind[:64]!r}, but must be {JSON}",
                status=415,
                reason="UNSUPPORTED_MEDIA_TYPE",
            )
        if encoding not in ("", "identity"):
            raise HttpError(
                f"content-encoding is {encoding[:64]!r}, but bodies are read as they are; leave "
                "it out",
                status=415,
                reason="UNSUPPORTED_MEDIA_TYPE",
            )

    async def _read(self, limit: int) -> bytes:
        """Reads to the end; what is too much is passed over, so that the sender hears of it."""
        pieces: list[bytes] = []
        num_bytes = 0
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _gone()
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes <= limit:
                pieces.append(piece)
            else:
                pieces.clear()
            has_more = message.get("more_body", False) and num_bytes <= 4 * limit
        if num_bytes > limit:
            raise HttpError(
                f"the body is larger than {limit} bytes (limits.max_message_bytes); send less",
                status=413,
                reason="BODY_TOO_LARGE",
                headers={"connection": "close"},
            )
        return b"".join(pieces)

    async def wait_gone(self) -> None:
        """Returns when the client has gone, or has the whole reply."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, reply: Reply) -> None:
        """Sends a whole reply; a large one in pieces, each of which must get away in time."""
        headers = {"content-type": reply.content_type, "content-length": str(len(reply.body))}
        headers |= reply.headers
        if not self._has_read and (self._has_large_body() or self.header("expect")):
            headers["connection"] = "close"  # who was told nothing yet may leave the body out
        await self._start(reply.status, headers)
        first = 0
        while len(reply.body) - first > PIECE_BYTES and self.method != "HEAD":
            await self._send_body(reply.body[first : first + PIECE_BYTES], has_more=True)
            first += PIECE_BYTES
        await self._send_body(reply.body[first:], has_more=False)

    async def start_events(self) -> None:
        """Begins a stream of server-sent events."""
        headers = {
            "content-type": EVENT_STREAM,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # or nginx would gather them
        }
        await self._start(200, headers)

    async def send_events(self, events: bytes) -> None:
        """Sends events; waits while the client does not take them."""
        await self._send_body(events, has_more=True)

    async def end_events(self) -> None:
        await self._send_body(b"", has_more=False)

    def abort(self) -> None:
        """Cuts the connection off: what was sent may be lost."""
        connection: Transport | None = self._scope.get("state", {}).get("connection")
        if connection is not None:
            connection.abort()

    def _has_large_body(self) -> bool:
        length = self.header("content-length")
        if length.isascii() and length.isdigit():
            return len(length) > 9 or int(length) > SMALL_BYTES
        return bool(self.header("transfer-encoding"))

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        assert self.status is None, "a reply begins once"
        self.status = status
        headers = {REQUEST_ID_KEY: self.request_id, **headers}
        encoded = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        await self._pass_on({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send_body(self, body: bytes, *, has_more: bool) -> None:
        await self._pass_on({"type": "http.response.body", "body": body, "more_body": has_more})
        self.is_complete = not has_more

    async def _pass_on(self, message: Message) -> None:
        timeout_s = self._config.server.http_write_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(message)
        except TimeoutError:
            logger.info("a client takes nothing and is cut off request_id=%r", self.request_id)
            self.abort()
            raise _gone() from None


def _gone() -> HttpError:
    return HttpError("the client has gone", status=CLIENT_GONE, reason="CLIENT_GONE")
