"""The API's own description, made of the models that read its bodies."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pydantic
from pydantic.json_schema import models_json_schema

import jaxserve
from jaxserve.server.edge import REQUEST_ID_KEY
from jaxserve.server.openai.bodies import ENDPOINTS, ChatBody, CompletionBody
from jaxserve.server.openai.fields import HARMLESS
from jaxserve.server.openai.reply_models import (
    ChatChunk,
    ChatReply,
    CompletionChunk,
    CompletionReply,
    DetokenizeReply,
    ErrorReply,
    ModelList,
    ModelReply,
    StatusReply,
    TokenizeReply,
    TokenizerInfo,
)
from jaxserve.server.openai.token_bodies import DetokenizeBody, TokenizeBody
from jaxserve.server.page import LoadReply

VERSION: Final = "3.1.0"
REFERENCE: Final = "#/components/schemas/{model}"

_Model = type[pydantic.BaseModel]
# path: what it does, the body it takes, the body it answers with
_POSTS: Final[Mapping[str, tuple[str, _Model, _Model]]] = {
    "/v1/chat/completions": ("Continue a conversation.", ChatBody, ChatReply),
    "/v1/completions": ("Continue texts or tokens.", CompletionBody, CompletionReply),
    "/tokenize": ("A text or a conversation as token ids.", TokenizeBody, TokenizeReply),
    "/detokenize": ("Token ids as text.", DetokenizeBody, DetokenizeReply),
}
_GETS: Final[Mapping[str, tuple[str, _Model]]] = {
    "/v1/models": ("What is served.", ModelList),
    "/v1/models/{model}": ("One model.", ModelReply),
    "/load": ("How busy the server is: levels, and sums since the start.", LoadReply),
    "/tokenizer_info": ("What a client needs to know of the tokenizer.", TokenizerInfo),
    "/health": ("Whether the process is worth keeping; without a key.", StatusReply),
    "/ready": ("Whether requests are accepted; without a key.", StatusReply),
}
# what a stream consists of
_CHUNKS: Final[Mapping[str, _Model]] = {
    "/v1/chat/completions": ChatChunk,
    "/v1/completions": CompletionChunk,
}
_EXAMPLES: Final[Mapping[str, dict[str, object]]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Name a river."}],
        "max_tokens": 20,
    },
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.7},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_FREE: Final = frozenset({"/health", "/ready", "/openapi.json"})
_ERRORS: Final[Mapping[str, str]] = {
    "400": "A field is wrong or not supported; `param` names it.",
    "401": "No valid key came with the request.",
    "403": "The key's tenant may not ask for this.",
    "404": "No such path or model.",
    "408": "The body did not arrive in time.",
    "409": "The request id is in flight.",
    "413": "The body is too large.",
    "415": "The body is not JSON by its type.",
    "429": "The queue or a quota is full; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "Starting or going away; Retry-After says when to try again.",
    "504": "The request's time was over before its first token.",
}
_RETRIED: Final = ("429", "503")
_HARMLESS: Final[dict[str, Any]] = {"description": "Accepted in any form; changes nothing."}
_HEADERS: Final[dict[str, Any]] = {
    REQUEST_ID_KEY: {"required": True, "schema": {"type": "string", "minLength": 1}}
}
_RETRY_HEADERS: Final[dict[str, Any]] = {
    "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "retry-after-ms": {"schema": {"type": "integer", "minimum": 1}},
}


def build_openapi(*, asks_for_keys: bool = False) -> dict[str, object]:
    """Returns the document."""
    bodies = [body for _, body, _ in _POSTS.values()]
    answers = [answer for _, _, answer in _POSTS.values()]
    replies: list[_Model] = [ErrorReply, *_CHUNKS.values(), *answers]
    replies += [reply for _, reply in _GETS.values()]
    schemas = {model: {"$ref": _reference(model)} for model in (*bodies, *replies)}
    asked = _define(bodies)
    for name in (body.__name__ for body in ENDPOINTS.values()):
        asked[name]["properties"] |= dict.fromkeys(sorted(HARMLESS), _HARMLESS)
    for definition in asked.values():
        _allow_null(definition)
    paths: dict[str, dict[str, object]] = {}
    for path, (summary, body, reply) in _POSTS.items():
        paths[path] = {"post": _build_post(path, summary, schemas[body], schemas[reply])}
    for path, (summary, reply) in _GETS.items():
        paths[path] = {"get": _build_get(path, summary, _as_json(schemas[reply]))}
    paths["/metrics"] = {"get": _build_get("/metrics", "Metrics for Prometheus.", _as_text())}
    paths["/openapi.json"] = {
        "get": _build_get("/openapi.json", "This document.", _as_json({"type": "object"}))
    }
    return {
        "openapi": VERSION,
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": asked | _define(replies),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if asks_for_keys else [],
    }


def _define(models: Sequence[_Model]) -> dict[str, dict[str, Any]]:
    """Returns the schemas of models, and of the models in them, by their names."""
    _, schema = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=REFERENCE
    )
    definitions: dict[str, dict[str, Any]] = schema["$defs"]
    return definitions


def _reference(model: _Model) -> str:
    return REFERENCE.format(model=model.__name__)


def _allow_null(definition: dict[str, Any]) -> None:
    """Has whatever may be left out be null too: it is unset in what we read."""
    required = definition.get("required", ())
    for name, field in definition.get("properties", {}).items():
        kinds = [kind.get("type") for kind in field.get("anyOf", ())]
        if name in required or "null" in kinds or field is _HARMLESS:
            continue
        if "type" in field and not field.keys() & {"enum", "const"}:
            field["type"] = [field["type"], "null"]
        else:
            definition["properties"][name] = {"anyOf": [field, {"type": "null"}]}


def _build_post(
    path: str, summary: str, body: dict[str, Any], reply: dict[str, Any]
) -> dict[str, object]:
    content = _as_json(reply)
    operation: dict[str, object] = {
        "summary": summary,
        "operationId": _operation(path),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": _EXAMPLES[path]}},
        },
    }
    if path in _CHUNKS:
        content = content | {"text/event-stream": {"schema": _build_event(_CHUNKS[path])}}
    return operation | {"responses": _build_responses(content, list(_ERRORS))}


def _build_event(chunk: _Model) -> dict[str, object]:
    """Returns the schema of each server-sent event of a stream."""
    parts = [{"$ref": _reference(model)} for model in (chunk, ErrorReply)]
    piece = {"contentMediaType": "application/json", "contentSchema": {"anyOf": parts}}
    return {
        "description": "Of each event. The last one's data is [DONE], unless one has an error.",
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, piece]}},
        "required": ["data"],
    }


def _build_get(path: str, summary: str, content: dict[str, object]) -> dict[str, object]:
    errors = ["401", "404", "429", "500", "503"]
    operation: dict[str, object] = {
        "summary": summary,
        "operationId": _operation(path),
        "responses": _build_responses(content, errors),
    }
    if path in _FREE:
        operation["security"] = []
    if "{model}" in path:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": schema}
        ]
    if path in ("/health", "/ready"):
        operation["responses"] = {
            "200": {"description": "Yes.", "content": content},
            "503": {"description": "No.", "content": content},
        }
    return operation


def _build_responses(content: dict[str, object], errors: list[str]) -> dict[str, object]:
    refusal = _as_json({"$ref": _reference(ErrorReply)})
    refused = {
        status: {
            "description": _ERRORS[status],
            "content": refusal,
            "headers": _RETRY_HEADERS if status in _RETRIED else {},
        }
        for status in errors
    }
    return {"200": {"description": "Done.", "content": content, "headers": _HEADERS}, **refused}


def _as_json(schema: dict[str, Any]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}


def _as_text() -> dict[str, object]:
    return {"text/plain": {"schema": {"type": "string"}}}


def _operation(path: str) -> str:
    words = path.strip("/").removeprefix("v1/").replace("{", "").replace("}", "")
    return words.replace("/", "_").replace(".", "_")
