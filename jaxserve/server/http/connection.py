"""uvicorn's connection with what it leaves open: bounds on headers and on patience, errors as JSON,
and an end for clients that take nothing."""

import asyncio
import dataclasses
import logging
from http import HTTPStatus
from typing import Any, Final, override

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from jaxserve.errors import HttpError, JaxserveError, QueueFullError
from jaxserve.server.http.reply import build_refusal

logger = logging.getLogger(__name__)

CONNECT: Final = b"CONNECT"
LINGER_S: Final = 30.0  # for what was sent last to get away, once the connection is to be closed


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Bounds:
    """What a connection may cost.

    Attributes:
      max_connections: open at once.
      patience_s: for a request's headers.
    """

    max_connections: int
    max_header_bytes: int
    patience_s: float


class BoundedConfig(uvicorn.Config):
    """uvicorn's own, with the bounds of its connections."""

    def __init__(self, app: Any, bounds: Bounds, **options: Any) -> None:  # noqa: ANN401
        super().__init__(app, **options)
        self.bounds = bounds


class Connection(HttpToolsProtocol):
    """One client's connection.

    A call finds it in its scope's state, to cut it off.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(config, BoundedConfig), "the listener makes one"
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._bounds = config.bounds
        self._num_parsed = 0  # bytes of the request line and the headers
        self._num_unparsed = 0  # bytes that came while a head was not complete
        self._is_in_head = False
        self._refusal: JaxserveError | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Ends the connection at once, whatever is still to be sent."""
        self.transport.abort()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            limit = self._bounds.max_connections
            self._close_with(
                QueueFullError(
                    f"{limit} connections are open, which is the limit "
                    "(limits.max_connections); try again later"
                )
            )
            return
        self._wait_for_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        if self._is_in_head:  # not all of it is there: a single header may be endless
            self._num_unparsed += len(data)
            if self._is_head_too_large:
                self.send_400_response("")
                return
        if self._patience is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def _feed(self, data: memoryview) -> None:
        """Parses what came; who wishes for another protocol is served in this one.

        Java's client and `curl --http2` wish so with every first request. The parser takes all
        behind such a head for the other protocol: the body would be lost, or read as the next
        request. So it gets the head once more, without the wish.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.transport.is_closing() or not self._has_wish:
                    return
                head = self._spell_head()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
                self.parser.feed_data(head)
            else:
                return

    def _spell_head(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b" ".join((method, self.url, b"HTTP/" + version))]
        lines += [b": ".join(header) for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    @property
    def _has_wish(self) -> bool:
        """Whether the head asks for another protocol; CONNECT does too, but has no other form."""
        return self.parser.should_upgrade() and self.parser.get_method() != CONNECT

    @override
    def on_message_begin(self) -> None:
        self._is_in_head, self._num_parsed, self._num_unparsed = True, 0, 0
        super().on_message_begin()

    @override
    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._is_in_head:  # a field behind the body may not say whose a call is
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_parsed, self._num_unparsed = False, 0, 0
        self._stop_waiting()
        if self._has_wish:
            return
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise HttpError("nothing else is decoded")
        super().on_headers_complete()
        if self.parser.get_method() == CONNECT:
            self.cycle.keep_alive = False  # what follows is no HTTP

    @override
    def on_message_complete(self) -> None:
        if not self._has_wish:
            super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self._linger is None:
            # its last bytes may wait for a client that takes nothing
            self._linger = self.loop.call_later(LINGER_S, self.transport.abort)

    @override
    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    @override
    def send_400_response(self, msg: str) -> None:
        """Called for bytes that are no HTTP, or too many; it closes the connection."""
        if self._is_head_too_large:
            error = HttpError(
                "the request line and the headers are larger than "
                f"{self._bounds.max_header_bytes} bytes "
                "(limits.max_header_bytes); send less",
                status=431,
                reason="HEADERS_TOO_LARGE",
            )
        else:
            error = HttpError("the bytes that came are no HTTP/1.1 request", reason="BAD_HTTP")
        self._close_with(error)

    def _count(self, num_bytes: int) -> None:
        """The parser calls it with whole parts; an error in it ends the request."""
        self._num_parsed += num_bytes
        if self._is_head_too_large:
            raise HttpError("too many")

    @property
    def _is_head_too_large(self) -> bool:
        return max(self._num_parsed, self._num_unparsed) > self._bounds.max_header_bytes

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(self._bounds.patience_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        self._close_with(
            HttpError(
                f"no whole request came within {self._bounds.patience_s:g} s "
                "(server.http_read_timeout_s)",
                status=408,
                reason="REQUEST_TIMEOUT",
            )
        )

    def _close_with(self, error: JaxserveError) -> None:
        """Answers without the application, and closes."""
        if self.transport.is_closing():
            return
        reply = build_refusal(error)
        headers = {
            "content-type": reply.content_type,
            "content-length": str(len(reply.body)),
            "connection": "close",
            **reply.headers,
        }
        status = HTTPStatus(reply.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join((*lines, "", "")).encode("latin-1") + reply.body)
        self.transport.close()
        self._linger = self.loop.call_later(LINGER_S, self.transport.abort)
