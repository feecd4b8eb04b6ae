"""Bodies as bytes, and errors as replies."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Final

from jaxserve.errors import (
    DeadlineUnreachableError,
    HttpError,
    NotServingError,
    QueueFullError,
    QuotaError,
)
from jaxserve.server.openai import build_error, http_status

NOT_SERVING_RETRY_S: Final = 2.0
JSON: Final = "application/json"
DONE: Final = b"data: [DONE]\n\n"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Reply:
    """A whole answer; its length and the request id are added where it is sent."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def to_json(value: object) -> bytes:
    """Returns JSON in UTF-8; half a surrogate pair becomes JSON's own escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def to_event(value: object) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def build_json(value: object, *, status: int = 200) -> Reply:
    return Reply(status=status, body=to_json(value))


def build_refusal(error: Exception) -> Reply:
    """Returns OpenAI's body of an error, with what tells a client when to try again."""
    headers: dict[str, str] = {}
    wait_s = _retry_after_s(error)
    if wait_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))  # the SDKs read it first
    status = http_status(error)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HttpError):
        headers |= error.headers
    return Reply(status=status, body=to_json(build_error(error)), headers=headers)


def _retry_after_s(error: Exception) -> float | None:
    match error:
        case QueueFullError() | QuotaError() | DeadlineUnreachableError():
            return error.retry_after_s
        case NotServingError():
            return NOT_SERVING_RETRY_S
    return None
