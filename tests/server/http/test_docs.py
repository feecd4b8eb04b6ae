"""docs/http.md has every field, path and status."""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.http.openapi import build_openapi
from jaxserve.server.openai import ENDPOINTS
from jaxserve.server.openai.fields import HARMLESS
from jaxserve.server.status import TABLE
from tests.fakes import CHAT_TEMPLATE
from tests.server.http.harness import CHAT, COMPLETIONS, HI, run_app

TEXT = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", TEXT))


def test_every_field_of_a_body_is_explained() -> None:
    fields = {name for body in ENDPOINTS.values() for name in body.model_fields}
    assert fields - NAMED == set()


def test_every_path_is_there() -> None:
    paths = build_openapi()["paths"]
    assert isinstance(paths, dict)
    named = {name.split()[-1] for name in NAMED}
    assert paths.keys() - named == set()


def test_every_status_and_code_is_there() -> None:
    row = TABLE[ConfigError]
    for kind, found in TABLE.items():
        reason = found.reason or getattr(kind, "reason", "")
        if found == row or kind.__name__ in (
            "RequestError",
            "ReloadError",
            "RequestCancelledError",
        ):
            continue  # none of these reaches an HTTP client as its own
        assert str(reason).lower() in NAMED, kind.__name__
        assert str(found.http) in TEXT


def properties_of(body: str) -> dict[str, dict[str, Any]]:
    document: dict[str, Any] = build_openapi()
    properties: dict[str, dict[str, Any]] = document["components"]["schemas"][body]["properties"]
    return properties


def edges_of(field: dict[str, Any]) -> list[tuple[float, bool]]:
    """Returns values at the edges of a field's range, each with whether it is in it."""
    kinds = [field.get("type"), *(kind.get("type") for kind in field.get("anyOf", ()))]
    step: float = 1 if "integer" in kinds or ["integer", "null"] in kinds else 0.01
    edges: list[tuple[float, bool]] = []
    if "minimum" in field:
        edges += [(field["minimum"], True), (field["minimum"] - step, False)]
    if "exclusiveMinimum" in field:
        least = field["exclusiveMinimum"]
        edges += [(least, False), (least + step, True)]
    if "maximum" in field:
        edges += [(field["maximum"], True), (field["maximum"] + step, False)]
    return edges


@pytest.mark.asyncio
@pytest.mark.parametrize(("url", "body"), [(CHAT, "ChatBody"), (COMPLETIONS, "CompletionBody")])
async def test_the_ranges_in_the_description_are_those_that_are_checked(
    url: str, body: str
) -> None:
    start: dict[str, Any] = {"messages": HI} if url == CHAT else {"prompt": "Hi!"}
    start |= {"max_tokens": 1}
    # what they need beside them; min_tokens may not be more than max_tokens, nor that than the rest
    beside: dict[str, dict[str, Any]] = {
        "top_logprobs": {"logprobs": True},
        "stream_interval": {"stream": True},
        "max_tokens": {"prompt_logprobs": 0},
        "max_completion_tokens": {"prompt_logprobs": 0, "max_tokens": None},
    }
    named = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}  # alike
    asked = []
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        for name, field in properties_of(body).items():
            for value, is_allowed in edges_of(field):
                if name == "min_tokens" and value > 1 and is_allowed:
                    continue
                response = await running.post(url, start | beside.get(name, {}) | {name: value})
                param = response.json()["error"]["param"] if response.status_code != 200 else None
                assert (response.status_code, param) == (
                    (200, None) if is_allowed else (400, named.get(name, name))
                ), f"{name} {value}: {response.text}"
                asked.append(name)
    assert {"temperature", "top_p", "seed", "n", "top_k", "priority", "queue_timeout"} <= {*asked}


@pytest.mark.asyncio
@pytest.mark.parametrize(("url", "body"), [(CHAT, "ChatBody"), (COMPLETIONS, "CompletionBody")])
async def test_what_the_description_lets_be_null_is_unset(url: str, body: str) -> None:
    start: dict[str, Any] = {"messages": HI} if url == CHAT else {"prompt": "Hi!"}
    properties = properties_of(body)
    nulls = {
        name: None
        for name, field in properties.items()
        if name not in HARMLESS
        and ("null" in field.get("type", ()) or {"type": "null"} in field.get("anyOf", ()))
    }
    assert properties.keys() - nulls.keys() - HARMLESS == start.keys()
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        response = await running.post(url, start | nulls | {name: {"any": 1} for name in HARMLESS})
    assert response.status_code == 200, response.text
