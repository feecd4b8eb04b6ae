"""The judge schemathesis's check of our own, and the count of what it saw: its hooks.

Runs under schemathesis's interpreter, which has not this project's packages.
"""

import atexit
import collections
import json
from typing import Any

import schemathesis  # type: ignore[import-not-found]  # of its own venv

REFUSALS = {
    400: {
        "invalid_field", "context_length_exceeded", "bad_grammar", "unsupported",
        "no_chat_template", "bad_http",
    },
    401: {"unauthenticated"},
    403: {"permission_denied"},
    404: {"model_not_found", "not_found"},
    405: {"method_not_allowed"},
    408: {"request_timeout"},
    409: {"duplicate_request_id"},
    413: {"body_too_large"},
    415: {"unsupported_media_type"},
    429: {"queue_full", "quota_exceeded", "slow_reader"},
    431: {"headers_too_large"},
    503: {"not_serving"},
    504: {"deadline"},
}  # fmt: skip
# These are about a field, so they name it.
NAMING = {"invalid_field", "context_length_exceeded", "bad_grammar", "unsupported"}
seen: collections.Counter[str] = collections.Counter()


@schemathesis.check  # type: ignore[untyped-decorator]
def refusals_say_why(ctx: Any, response: Any, case: Any) -> None:  # noqa: ANN401  # its types
    """A refusal has a documented code, names the field at fault, and a stream its last event."""
    operation = f"{case.method} {case.operation.path}"
    seen[f"{operation} {response.status_code}"] += 1
    kind = response.headers.get("content-type", [""])[0]
    if response.status_code == 200 and kind.startswith("text/event-stream"):
        seen[f"{operation} 200 as a stream"] += 1
        last = response.text.rstrip("\n").rpartition("\n\n")[2]
        is_error = last.startswith('data: {"error"')
        assert last == "data: [DONE]" or is_error, f"a stream ends with {last!r}"
    if response.status_code < 400 or not response.content:  # of HEAD there is no more to see
        return
    if case.operation.path in ("/health", "/ready") and response.status_code == 503:
        return
    error = json.loads(response.content)["error"]
    code = error["code"]
    assert code in REFUSALS.get(response.status_code, ()), f"{response.status_code} with {code!r}"
    assert error["message"], "a refusal without a word"
    has_field = error["param"] or "the body is" in error["message"]
    assert code not in NAMING or has_field, f"{code} without a field: {error['message']}"
    if code in ("queue_full", "quota_exceeded", "not_serving"):
        assert "retry-after" in response.headers, f"{code} without Retry-After"


@atexit.register
def print_seen() -> None:
    for name, number in sorted(seen.items()):
        print(f"{number:6d}  {name}")
