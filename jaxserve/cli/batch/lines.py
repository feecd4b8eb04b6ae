"""The input of a batch: its lines, and each line as requests or as the error that it is."""

import dataclasses
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError, RequestError, UnsupportedError
from jaxserve.request import GenerationRequest
from jaxserve.server.json_text import parse_json
from jaxserve.server.openai import ENDPOINTS, Asked, read_asked
from jaxserve.server.openai.fields import did_you_mean, shorten, show_name

SKIP_BYTES: Final = 1 << 20  # a line that is too long is passed over in such pieces
BOM: Final = b"\xef\xbb\xbf"
_BATCH_FIELDS: Final = ("custom_id", "method", "url", "body")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RawLine:
    """A line as it stands in the file.

    Attributes:
      number: from 1, blank lines counted.
      content: without a byte order mark; None where it is too long to be read.
    """

    number: int
    content: bytes | None


class RawLines:
    """Reads a file once, front to back, in memory for one line.

    Attributes:
      digest: of all bytes read so far.
    """

    def __init__(self, file: BinaryIO, *, max_bytes: int) -> None:
        self.digest = hashlib.sha256()
        self._file = file
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[RawLine]:
        """Yields the lines that are not blank."""
        number = 0
        while content := self._read(self._max_bytes + 1):
            number += 1
            is_long = len(content) > self._max_bytes and not content.endswith(b"\n")
            rest = content
            while is_long and rest and not rest.endswith(b"\n"):
                rest = self._read(SKIP_BYTES)
            if number == 1:
                content = content.removeprefix(BOM)
            if is_long or content.strip():
                yield RawLine(number=number, content=None if is_long else content)

    def _read(self, num_bytes: int) -> bytes:
        content = self._file.readline(num_bytes)
        self.digest.update(content)
        return content


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Line:
    """A line of the input, read.

    Attributes:
      custom_id: None where the line has none that could be used.
      asked: None where it is an error.
      has_body: whether it got as far as a request's body: its error is a reply to that.
    """

    number: int
    custom_id: str | None
    request_id: str
    asked: Asked | None = None
    error: RequestError | None = None
    has_body: bool = False

    @property
    def num_requests(self) -> int:
        return 1 if self.asked is None else len(self.asked.requests)

    def requests(self) -> Iterator[GenerationRequest | RequestError]:
        """Yields what the engine has to do, or the error in its stead: one thing at least."""
        if self.error is not None:
            yield self.error
        if self.asked is not None:
            yield from self.asked.requests


class LineReader:
    """Turns raw lines into requests. Knows the ids that were there before: each comes once."""

    def __init__(
        self,
        *,
        engine: Engine,
        model_name: str,
        run_seed: int,
        max_bytes: int,
        max_id_bytes: int,
    ) -> None:
        """Args:
        model_name: what the model may be called besides its own name.
        run_seed: requests without a seed get one that follows from this and their id.
        max_bytes: of a line, for the message.
        """
        self._engine = engine
        self._model_name = model_name
        self._run_seed = run_seed
        self._max_bytes = max_bytes
        self._max_id_bytes = max_id_bytes
        self._numbers: dict[bytes, int] = {}  # by a digest of the id: ids may be long

    def read(self, raw: RawLine) -> Line:
        """Returns the line; whatever is wrong with it is in it."""
        custom_id, document, error = self._identify(raw)
        request_id = f"req-{secrets.token_hex(12)}"
        line = Line(number=raw.number, custom_id=custom_id, request_id=request_id, error=error)
        if error is not None or document is None:
            return line
        try:
            url, body = _find_body(document)
        except RequestError as found:
            return dataclasses.replace(line, error=found)
        try:
            asked = read_asked(url, body, engine=self._engine, names=(self._model_name,))
            _refuse_live(asked)
        except RequestError as found:
            return dataclasses.replace(line, error=found, has_body=True)
        requests = tuple(
            self._complete(request, line, index) for index, request in enumerate(asked.requests)
        )
        return dataclasses.replace(
            line, asked=dataclasses.replace(asked, requests=requests), has_body=True
        )

    def skip(self, raw: RawLine) -> str | None:
        """Notes a line that was answered before, and returns its id."""
        return self._identify(raw)[0]

    def _identify(
        self, raw: RawLine
    ) -> tuple[str | None, Mapping[str, object] | None, RequestError | None]:
        """Returns the id, the object and the error of a line, as far as there are any."""
        try:
            document = self._parse(raw)
            custom_id = _find_id(document, raw.number)
            self._take_id(custom_id, raw.number)
        except RequestError as error:
            return None, None, error
        return custom_id, document, None

    def _parse(self, raw: RawLine) -> Mapping[str, object]:
        if raw.content is None:
            raise InvalidRequestError(
                f"the line is longer than {self._max_bytes} bytes (limits.max_message_bytes); "
                "shorten it, or raise the limit"
            )
        try:
            document = parse_json(raw.content)
        except ValueError as error:
            raise InvalidRequestError(f"the line is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise InvalidRequestError("the line is JSON, but must be an object: {…}")
        return document

    def _take_id(self, custom_id: str, number: int) -> None:
        try:
            encoded = custom_id.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "custom_id holds a lone surrogate, but must be valid Unicode", field="custom_id"
            ) from None
        if len(encoded) > self._max_id_bytes:
            raise InvalidRequestError(
                f"custom_id is {len(encoded)} bytes, but the limit is {self._max_id_bytes} "
                "(limits.max_request_id_bytes); shorten it",
                field="custom_id",
            )
        first = self._numbers.setdefault(hashlib.sha256(encoded).digest()[:16], number)
        if first != number:
            raise InvalidRequestError(
                f"custom_id {shorten(custom_id)!r} stands on line {first} already; "
                "give each line an id of its own",
                field="custom_id",
            )

    def _complete(self, request: GenerationRequest, line: Line, index: int) -> GenerationRequest:
        """Returns the request with its own id, and with a seed that any run would give it."""
        sampling = request.sampling
        if sampling.seed is None:
            words = f"{self._run_seed}\0{line.custom_id}\0{index}"
            seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8])
            sampling = dataclasses.replace(sampling, seed=seed)
        request_id = f"{line.request_id}-{index}" if index else line.request_id
        return dataclasses.replace(request, sampling=sampling, id=request_id)


def _refuse_live(asked: Asked) -> None:
    """Raises for what has a meaning only while somebody waits."""
    for name, is_set in (("stream", asked.stream is not None), ("timeout", bool(asked.timeout_s))):
        if is_set:
            raise UnsupportedError(f"{name} is not supported in a batch; leave it out", field=name)


def _find_id(document: Mapping[str, object], number: int) -> str:
    """Returns the id of a line; a line of `{"prompt": …}` may have none, and gets "line-N"."""
    names = [name for name in ("custom_id", "id") if document.get(name) is not None]
    if len(names) == 2:
        raise InvalidRequestError("the line has custom_id and id; leave one out", field="id")
    if not names:
        if is_batch_line(document):
            raise InvalidRequestError("custom_id is missing, but required", field="custom_id")
        return f"line-{number}"
    value = document[names[0]]
    if names == ["id"] and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{names[0]} must be a text, and not empty", field=names[0])
    return value


def is_batch_line(document: Mapping[str, object]) -> bool:
    """Returns whether it is a line of the OpenAI Batch format, or means to be one."""
    return any(name in document for name in ("method", "url", "body"))


def _find_body(document: Mapping[str, object]) -> tuple[str, object]:
    """Returns the endpoint's URL and the body.

    Raises:
      InvalidRequestError: the line is neither of the forms.
      UnsupportedError: another endpoint.
    """
    if is_batch_line(document):
        return _find_batch_body(document)
    body = {name: value for name, value in document.items() if name not in ("id", "custom_id")}
    if "messages" in body and "prompt" not in body:
        return "/v1/chat/completions", body
    if "prompt" in body:
        return "/v1/completions", body
    raise InvalidRequestError(
        "the line has none of body, prompt and messages; send "
        '{"custom_id": …, "method": "POST", "url": …, "body": {…}} or {"prompt": …}'
    )


def _find_batch_body(document: Mapping[str, object]) -> tuple[str, object]:
    for name in document:
        if name not in _BATCH_FIELDS:
            shown = shorten(show_name(name))
            raise InvalidRequestError(
                f"{shown} is not a known field of a batch line{did_you_mean(name, _BATCH_FIELDS)}",
                field=shown,
            )
    for name in _BATCH_FIELDS:
        if document.get(name) is None:
            raise InvalidRequestError(f"{name} is missing, but required", field=name)
    method, url = document["method"], document["url"]
    if method != "POST":
        raise InvalidRequestError('method must be "POST"', field="method")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise UnsupportedError(
            f"url {shorten(repr(url))} is not supported; use {' or '.join(ENDPOINTS)}", field="url"
        )
    return url, document["body"]
