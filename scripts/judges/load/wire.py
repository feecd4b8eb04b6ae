"""An HTTP/1.1 connection of a client that may do to it what it likes."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Self

from scripts.judges.load.cutter import reset

LIMIT: Final = 1 << 20  # of a line, and of what is read ahead
KEPT_S: Final = 60.0


class ClosedError(Exception):
    """The other side has closed the connection, or it is gone."""


class Connection:
    """One connection. `is_open` is false as soon as nothing can be asked on it any more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._headers: dict[str, str] = {}
        self._used_s = time.monotonic()
        self.is_open = True

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Self:
        return cls(*await asyncio.open_connection(*address, limit=LIMIT))

    @classmethod
    async def open_narrow(cls, address: tuple[str, int]) -> Self:
        """Opens one on which little is on its way."""
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(narrow, address)
        return cls(*await asyncio.open_connection(sock=narrow, limit=4096))

    @property
    def is_usable(self) -> bool:
        """Whether another call may be made on it: the server closes what is idle for long."""
        is_fresh = time.monotonic() - self._used_s < KEPT_S
        return self.is_open and is_fresh and not self._reader.at_eof()

    def send(self, data: bytes) -> None:
        self._used_s = time.monotonic()
        self._writer.write(data)

    async def read_head(self) -> int:
        """Returns the status of the next reply."""
        try:
            status = (await self._reader.readuntil(b"\r\n")).split()[1]
            self._headers = {}
            while (line := await self._reader.readuntil(b"\r\n")) != b"\r\n":
                name, _, value = line.decode("latin-1").partition(":")
                self._headers[name.strip().lower()] = value.strip()
        except (asyncio.IncompleteReadError, OSError) as error:
            self.is_open = False
            raise ClosedError from error
        if self._headers.get("connection") == "close":
            self.is_open = False
        return int(status)

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    async def read_body(self) -> bytes:
        """Returns a body of known length."""
        return await self._read_exactly(int(self._headers["content-length"]))

    async def read_events(self) -> AsyncIterator[Any]:
        """Yields the values of a stream's events; "[DONE]" as it is.

        Raises:
          ClosedError: the stream does not end as one does.
        """
        rest = b""
        while size := int((await self._read_until(b"\r\n")).strip(), 16):
            rest += (await self._read_exactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                assert event.startswith(b"data: "), event[:50]
                text = event.removeprefix(b"data: ")
                yield "[DONE]" if text == b"[DONE]" else json.loads(text)
        await self._read_until(b"\r\n")
        assert not rest, f"a stream ends within an event: {rest[:50]!r}"

    def reset(self) -> None:
        self.is_open = False
        reset(self._writer)

    def close(self) -> None:
        self.is_open = False
        self._writer.close()

    async def _read_exactly(self, num_bytes: int) -> bytes:
        try:
            return await self._reader.readexactly(num_bytes)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.is_open = False
            raise ClosedError from error

    async def _read_until(self, mark: bytes) -> bytes:
        try:
            return await self._reader.readuntil(mark)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.is_open = False
            raise ClosedError from error


def build_request(
    method: str, path: str, headers: Mapping[str, str], body: object = None
) -> tuple[bytes, bytes]:
    """Returns the head of a request, and its body."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: jaxserve"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join((*lines, "", "")).encode(), content
