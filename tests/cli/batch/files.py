"""Inputs for batches: good lines, bad ones of every kind, and what their answers must be."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def good(custom_id: str, prompt: str | list[int] = "hi", **body: Any) -> dict[str, Any]:  # noqa: ANN401
    """A line of the OpenAI Batch format, for a few tokens."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 4, "return_token_ids": True} | body,
    }


# What may stand on a line and cannot be answered, with what the answer must say.
BAD: tuple[tuple[bytes, str], ...] = (
    (b"nonsense", "the line is not JSON"),
    (b'{"prompt": "a"', "the line is not JSON"),
    (b'{"prompt": "\xff"}', "it is not UTF-8 at byte 12"),
    (b"[1, 2]", "must be an object"),
    (b"{}", "none of body, prompt and messages"),
    (b'{"custom_id": "m1", "method": "POST", "body": {}}', "url is missing"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id is missing"),
    (b'{"custom_id": "m2", "method": "GET", "url": "/v1/completions", "body": {}}', '"POST"'),
    (b'{"custom_id": "m3", "method": "POST", "url": "/v1/embeddings", "body": {}}', "url '/v1/emb"),
    (b'{"custom_id": "m4", "methud": "POST", "url": "x", "body": {}}', "did you mean method?"),
    (b'{"custom_id": "m4e", "": 1, "url": "x", "body": {}}', '"" is not a known field of a batch'),
    (b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}', "must be a text"),
    (b'{"custom_id": "", "prompt": "a"}', "must be a text, and not empty"),
    (b'{"id": "x", "custom_id": "y", "prompt": "a"}', "leave one out"),
    (b'{"id": "m5", "prompt": "a", "best_of": 2}', "best_of is not supported"),
    (b'{"id": "m6", "prompt": "a", "temprature": 1}', "did you mean temperature?"),
    (b'{"id": "m7", "prompt": "a", "stream": true}', "stream is not supported"),
    (b'{"id": "m7t", "prompt": "a", "timeout": 5.0}', "timeout is not supported"),
    (b'{"id": "m8", "prompt": "a", "max_tokens": 100000}', "max_tokens is 100000"),
    (b'{"id": "m9", "prompt": "a", "model": "gpt-4"}', "model 'gpt-4' is not served here"),
    (b'{"id": "m10", "prompt": ""}', "the prompt is empty"),
    (b'{"id": "m11", "prompt": "\\ud800"}', "lone surrogate"),
    (b'{"id": "\\ud800", "prompt": "a"}', "custom_id holds a lone surrogate"),
    (b'{"prompt": "a", "\\ud800": 1}', "is not a known field"),
    (b'{"id": "' + b"i" * 300 + b'", "prompt": "a"}', "custom_id is 300 bytes"),
    (b"[" * 5000 + b"]" * 5000, "nested deeper"),
    (b'{"id": "m12", "prompt": "a", "seed": NaN}', "NaN is not JSON"),
)


def write(path: Path, lines: Sequence[dict[str, Any] | bytes]) -> Path:
    """Writes objects as JSON, and bytes as they are, one a line."""
    contents = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(content + b"\n" for content in contents))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    assert not content or content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def outcome(line: dict[str, Any]) -> object:
    """What must be the same in every run: all but the ids and the time that a run makes up."""
    if line["error"] is not None:
        return line["custom_id"], line["error"], (line["response"] or {}).get("status_code")
    body = line["response"]["body"]
    return line["custom_id"], body["choices"], body["usage"], line["response"]["status_code"]
