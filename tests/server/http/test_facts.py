"""What is told without generating: models, tokens, health, metrics, the API's description."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from jaxserve.config import MetricsSection
from jaxserve.server.openai.reply_models import (
    DetokenizeReply,
    ModelList,
    ModelReply,
    StatusReply,
    TokenizeReply,
    TokenizerInfo,
)
from tests.fakes import CHAT_TEMPLATE
from tests.server.http.harness import HI, error_of, good, run_app

pytestmark = pytest.mark.asyncio


async def test_models() -> None:
    async with run_app() as running:
        listed = good(await running.client.get("/v1/models"))
        one = good(await running.client.get("/v1/models/bytes"))
        head = await running.client.head("/v1/models")
    assert listed["data"] == [one]
    assert (one["id"], one["object"], one["max_model_len"]) == ("bytes", "model", 40)
    assert head.status_code == 200
    ModelList.model_validate(listed)
    ModelReply.model_validate(one)


async def test_a_text_as_tokens_and_back() -> None:
    async with run_app() as running:
        told = good(await running.post("/tokenize", {"prompt": "aé", "return_token_strs": True}))
        plain = good(await running.post("/tokenize", {"model": "bytes", "prompt": "a<s>"}))
        back = good(await running.post("/detokenize", {"tokens": [97, 256, 0xC3, 0xA9]}))
    assert told == {
        "count": 3, "max_model_len": 40, "tokens": [97, 0xC3, 0xA9], "token_strs": ["a", "�", "�"]
    }  # fmt: skip
    assert (plain["tokens"], plain["token_strs"]) == ([97, 256], None)
    assert back == {"prompt": "a<s>é"}
    TokenizeReply.model_validate(told)
    DetokenizeReply.model_validate(back)


async def test_a_conversation_as_tokens_is_what_generation_sees() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        told = good(await running.post("/tokenize", {"messages": HI}))
        reply = await running.chat(max_tokens=1, return_token_ids=True)
        bare = {"messages": HI, "add_generation_prompt": False}
        short = good(await running.post("/tokenize", bare))
    assert told["tokens"] == reply["prompt_token_ids"]
    assert told["count"] == reply["usage"]["prompt_tokens"]
    assert bytes(id_ for id_ in short["tokens"] if id_ < 256) == b"user: hi"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-4"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "x": 1}, "x"),
    ],
)
async def test_what_cannot_be_turned_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        content = json.dumps(body)
        kind = {"content-type": "application/json"}
        response = await running.client.post(path, content=content, headers=kind)
    status, _, found, _ = error_of(response)
    assert (status, found) == (404 if param == "model" else 400, param)


async def test_what_clients_need_to_know_of_the_tokenizer() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        told = good(await running.client.get("/tokenizer_info"))
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert told["chat_template"] == CHAT_TEMPLATE
    TokenizerInfo.model_validate(told)


async def test_metrics_are_those_of_the_other_port() -> None:
    async with run_app(config={"metrics": MetricsSection(prefix="vllm")}) as running:
        running.engine.metrics.model_name = "bytes"
        await running.complete(max_tokens=3)
        response = await running.client.get("/metrics", headers={"accept": "text/plain"})
        again = await running.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in read_text(response.text)}
    (sample,) = families["vllm:generation_tokens"].samples
    assert sample.value == 3
    assert again.status_code == 200


async def test_health_and_readiness() -> None:
    async with run_app() as running:
        for path in ("/health", "/ready"):
            StatusReply.model_validate(good(await running.client.get(path)))


async def test_the_description_is_whole_and_says_what_is_refused() -> None:
    async with run_app() as running:
        document = good(await running.client.get("/openapi.json"))
        for path, item in document["paths"].items():
            for method in item:
                response = await running.client.request(method, path.replace("{model}", "bytes"))
                allowed = item[method]["responses"].keys()
                assert str(response.status_code) in allowed, (method, path)
    schemas = document["components"]["schemas"]
    references = set()

    def walk(value: object) -> None:
        match value:
            case {"$ref": str(reference)}:
                references.add(reference.removeprefix("#/components/schemas/"))
            case dict():
                for part in value.values():
                    walk(part)
            case list():
                for part in value:
                    walk(part)

    walk(document)
    assert references <= schemas.keys()
    assert {"ChatBody", "CompletionBody", "ErrorReply"} <= references
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert schemas["JsonSchema"]["required"] == ["schema"]
    assert schemas["CompletionBody"]["required"] == ["prompt"]
