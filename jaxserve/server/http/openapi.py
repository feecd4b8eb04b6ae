"""The API's own description, made of the models that read its bodies."""

from collections.abc import Mapping
from typing import Any, Final

import pydantic
from pydantic.json_schema import models_json_schema

import jaxserve
from jaxserve.server.openai.bodies import ChatBody, CompletionBody
from jaxserve.server.openai.reply_models import (
    ChatReply,
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
_STREAMED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
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


def build_openapi() -> dict[str, object]:
    """Returns the document."""
    models: list[_Model] = [ErrorReply, *(reply for _, reply in _GETS.values())]
    for _, body, answer in _POSTS.values():
        models += (body, answer)
    named, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=REFERENCE
    )
    schemas = {model: schema for (model, _), schema in named.items()}
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
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _build_post(
    path: str, summary: str, body: dict[str, Any], reply: dict[str, Any]
) -> dict[str, object]:
    content = _as_json(reply)
    if path in _STREAMED:
        content = content | {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "operationId": _operation(path),
        "requestBody": {"required": True, "content": _as_json(body)},
        "responses": _build_responses(content, list(_ERRORS)),
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
    refusal = _as_json({"$ref": REFERENCE.format(model=ErrorReply.__name__)})
    refused = {status: {"description": _ERRORS[status], "content": refusal} for status in errors}
    return {"200": {"description": "Done.", "content": content}, **refused}


def _as_json(schema: dict[str, Any]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}


def _as_text() -> dict[str, object]:
    return {"text/plain": {"schema": {"type": "string"}}}


def _operation(path: str) -> str:
    words = path.strip("/").removeprefix("v1/").replace("{", "").replace("}", "")
    return words.replace("/", "_").replace(".", "_")
