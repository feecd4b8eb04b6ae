"""Errors as OpenAI error bodies."""

from collections.abc import Mapping
from typing import Final

from jaxserve.errors import HttpError
from jaxserve.server.status import find_reason, find_row, public_field, public_message

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
# The engine names fields as the proto does, in groups; these are other words in an OpenAI body.
_GROUPS: Final = ("sampling.", "stop.", "output.", "chat.")
_PARAMS: Final[Mapping[str, str]] = {
    "chat": "messages",
    "include_stop_text": "include_stop_str_in_output",
    "stop_strings": "stop",
    "structured_output": "response_format",
    "template_kwargs": "chat_template_kwargs",
    "text": "prompt",
    "token_ids": "prompt",
    "tool_calls_json": "messages",
    "tools_json": "tools",
}


def http_status(error: Exception) -> int:
    """Returns the HTTP status: from the one table, unless HTTP itself is what was wrong."""
    return error.status if isinstance(error, HttpError) else find_row(error).http


def build_error(error: Exception) -> dict[str, dict[str, str | None]]:
    """Returns `{"error": {message, type, param, code}}`; what is not the client's is not told."""
    message, field = public_message(error), public_field(error)
    name = field.rpartition(".")[2] if field.startswith(_GROUPS) else field
    param = _PARAMS.get(name, name)
    if param != name and message.startswith(f"{name} "):
        message = f"{param}{message.removeprefix(name)}"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(http_status(error), "invalid_request_error"),
            "param": param or None,
            "code": find_reason(error).lower(),
        }
    }
