"""A connection that can be cut: a proxy on this machine that passes bytes on until it does not."""

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Final, Self

PIECE: Final = 1 << 16
RESET: Final = struct.pack("ii", 1, 0)  # of SO_LINGER: closes with a reset, as a killed machine's


class Cutter:
    """Attributes:
    target: where to connect.
    is_cut: set as soon as the connections were cut.
    """

    def __init__(self, target: str) -> None:
        self.target = ""
        self.is_cut = asyncio.Event()
        host, _, port = target.rpartition(":")
        self._to = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cut()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        """Resets all connections, and takes no more."""
        self.is_cut.set()
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection(*self._to)
        except OSError:
            reset(writer)
            return
        self._writers.add(onward)
        if self.is_cut.is_set():
            self.cut()
        for source, sink in ((reader, onward), (onward_reader, writer)):
            pipe = asyncio.create_task(_pass_on(source, sink))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            sink.write(piece)
            await sink.drain()
    sink.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with a reset."""
    transport = writer.transport
    found = transport.get_extra_info("socket")
    if found is not None and not transport.is_closing():
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
