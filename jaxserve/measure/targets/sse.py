"""Server-sent events out of bytes, as far as a stream of completions needs them.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Iterator
from typing import Final

MAX_EVENT_BYTES: Final = 16 << 20


class EventReader:
    """Takes bytes as they come and gives whole events' data.

    Lines end with LF, CR or both, and with nothing else: other characters that Python calls line
    ends may stand in a JSON text.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._has_cr = False  # the last byte was a CR: a LF now belongs to it

    def feed(self, content: bytes) -> Iterator[str]:
        """Yields the data of each event that is complete now.

        Raises:
          ValueError: an event is longer than MAX_EVENT_BYTES, or is not UTF-8.
        """
        if self._has_cr and content:
            content = content.removeprefix(b"\n")
            self._has_cr = False
        self._has_cr |= content.endswith(b"\r")
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                data, self._data = b"\n".join(self._data), []
                yield data.decode()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
