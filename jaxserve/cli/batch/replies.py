"""The lines of a batch's output."""

import json
import secrets
from collections.abc import Sequence

from jaxserve.cli.batch.lines import Line
from jaxserve.engine import Completion, Engine
from jaxserve.errors import RequestError
from jaxserve.server.openai import build_error, build_reply, http_status, open_chat


def build_line(
    line: Line, results: Sequence[Completion | RequestError], *, engine: Engine, created_s: float
) -> tuple[bytes, bool]:
    """Returns the output's line, its newline with it, and whether the line failed.

    A line that failed has `error`; if it got as far as a request's body, the same stands in
    `response`, with the status that a server would have sent.
    """
    errors = [result for result in results if isinstance(result, RequestError)]
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None
    if errors:
        body = build_error(errors[0])
        error = {**body["error"], "line": line.number}
        if line.has_body:
            response = {"status_code": http_status(errors[0]), "body": body}
    else:
        assert line.asked is not None
        completions = [result for result in results if isinstance(result, Completion)]
        reply = build_reply(
            line.asked,
            completions,
            model_name=engine.model.name,
            created_s=created_s,
            tokenizer=engine.tokenizer,
            chat=open_chat(line.asked, engine, completions[0].prompt_ids),
        )
        response = {"status_code": 200, "body": reply}
    if response is not None:
        response = {
            "status_code": response["status_code"],
            "request_id": line.request_id,
        } | response
    whole = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    # a lone surrogate, quoted from the input, is written as \udXXX: JSON's own escape
    text = json.dumps(whole, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return text + b"\n", bool(errors)
