"""The HTTP server of a process: uvicorn on the event loop that gRPC runs on."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Final, override

import uvicorn

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.server.door import Door
from jaxserve.server.http.app import App
from jaxserve.server.http.connection import BoundedConfig, Bounds, Connection
from jaxserve.server.listeners import check_exposure, format_address

logger = logging.getLogger(__name__)

BACKLOG: Final = 512
KEEP_ALIVE_S: Final = 120  # longer than clients keep a connection: they close it first
HANDSHAKE_S: Final = 10.0  # as gRPC's
LAST_WORDS_S: Final = 1  # for replies to leave


class HttpServer:
    """Listens before there is an engine, and outlives its end.

    Attributes:
      port: the bound one, once started.
    """

    def __init__(self, door: Door) -> None:
        self.port = 0
        self._door = door
        self._app = App(door)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return format_address(self._door.config.server.http_host, self.port)

    async def start(self) -> None:
        """Listens; what needs an engine is answered with 503 until there is one.

        Raises:
          ConfigError: the address cannot be bound, or may not be without credentials.
        """
        config, credentials = self._door.config, self._door.credentials
        check_exposure(config, credentials, key="server.http_host", host=config.server.http_host)
        listener = _bind(config)
        self.port = listener.getsockname()[1]
        self._server = _Server(self._build_config())
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0)
            if self._serving.done():
                await self._serving  # it raises what went wrong
        scheme = "http" if credentials.certificates is None else "https"
        logger.info("serving HTTP url=%s", f"{scheme}://{self.address}")

    async def stop(self) -> None:
        """Closes the listener and idle connections, and cuts off what does not end soon."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        self._app.close()

    def _build_config(self) -> uvicorn.Config:
        config, certificates = self._door.config, self._door.certificates
        bounds = Bounds(
            max_connections=config.limits.max_connections,
            max_header_bytes=config.limits.max_header_bytes,
            patience_s=config.server.http_read_timeout_s,
        )
        return BoundedConfig(
            self._app.asgi,
            bounds,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            loop="none",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
            ssl_context_factory=(
                None if certificates is None else lambda *_: certificates.build_ssl_context()
            ),
        )


class _Server(uvicorn.Server):
    """Leaves the signals to the process's own handlers, and bounds the time of a handshake."""

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, where asyncio gives each handshake a minute."""

        def connect() -> Connection:
            return Connection(self.config, self.server_state, app_state={})

        ssl = self.config.ssl
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connect,
                sock=listener,
                ssl=ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=None if ssl is None else HANDSHAKE_S,
            )
            for listener in sockets or ()
        ]
        self.started = True

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(config: Config) -> socket.socket:
    section = config.server
    assert section.http_port is not None, "no port was asked for"
    try:
        infos = socket.getaddrinfo(
            section.http_host,
            section.http_port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        family, _, _, _, address = infos[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"server.http_host {section.http_host!r}, server.http_port {section.http_port}: "
            f"cannot be bound ({error.strerror}); is the host an address of this machine, and no "
            "other server on the port? --http-port 0 picks a free one"
        ) from error
    listener.setblocking(False)
    return listener
