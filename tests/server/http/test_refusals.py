"""Everything that is refused has OpenAI's error body, a status that SDKs know, and no effect."""

import asyncio
import json
from typing import Any

import pytest

from jaxserve.config import LimitsSection, ServerSection
from jaxserve.server.http import sending
from jaxserve.server.openai.reply_models import ErrorReply
from tests.server.harness import Steps, until
from tests.server.http.harness import CHAT, COMPLETIONS, Running, error_of, run_app

pytestmark = pytest.mark.asyncio

JSON = {"content-type": "application/json"}


async def post_bytes(running: Running, content: bytes, **headers: str) -> Any:  # noqa: ANN401
    return await running.client.post(COMPLETIONS, content=content, headers=JSON | headers)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "the body is a list"),
        (b"null", "the body is null"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "a", "seed": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
        (b'{"prompt": ' + b"[" * 100_000, "nested deeper"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "a", "\\ud800": 1}', "not a known field"),
        (b'{"prompt": "a", "model": "\\ud800"}', "is not served here"),
    ],
)
async def test_bodies_that_are_none(content: bytes, said: str) -> None:
    async with run_app() as running:
        response = await post_bytes(running, content)
        status, kind, _, _ = error_of(response)
        assert (status, kind) == (404 if "served" in said else 400, "invalid_request_error")
        assert said in response.json()["error"]["message"]
        ErrorReply.model_validate(response.json())
        assert running.num_submitted == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_interval": 2}, "stream_interval"),
        ({"stream": True, "stream_interval": 0}, "stream_interval"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"include_usge": True}},
         "stream_options.include_usge"),
        ({"stream": "yes"}, "stream"),
        ({"timeout": 0}, "timeout"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2, "guided_regex": "a"}, "min_tokens"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"echo": True, "messages": []}, "messages"),
    ],
)  # fmt: skip
async def test_values_that_are_not_allowed_are_named(body: dict[str, Any], param: str) -> None:
    async with run_app() as running:
        response = await running.post(COMPLETIONS, {"prompt": "a"} | body)
        status, kind, found, _ = error_of(response)
        assert (status, kind, found) == (400, "invalid_request_error", param), response.text
        assert running.num_submitted == 0
        assert (await running.complete(max_tokens=1))["usage"]["completion_tokens"] == 1, "K6"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", COMPLETIONS, {}, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("POST", "/v1/models", JSON, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, {}, 405, "method_not_allowed"),
        ("GET", "/nothing", {}, 404, "not_found"),
        ("POST", "/v1/embeddings", JSON, 404, "not_found"),
        ("GET", "/v1/models/", {}, 404, "model_not_found"),
        ("GET", "/v1/models/gpt-4", {}, 404, "model_not_found"),
        ("POST", COMPLETIONS, {}, 415, "unsupported_media_type"),
        ("POST", COMPLETIONS, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", COMPLETIONS, JSON | {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ("POST", COMPLETIONS, JSON | {"x-request-id": "a\tb"}, 400, "invalid_field"),
        ("POST", COMPLETIONS, JSON | {"x-request-id": "a" * 300}, 400, "invalid_field"),
    ],
)  # fmt: skip
async def test_what_is_no_call_of_the_api(
    method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    async with run_app() as running:
        response = await running.client.request(
            method, path, content=b'{"prompt": "a"}', headers=headers
        )
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert error_of(response)
        if status == 405:
            assert response.headers["allow"]
        if "\t" in headers.get("x-request-id", ""):
            assert response.headers["x-request-id"].startswith("req-"), "that one is not echoed"
        assert running.num_submitted == 0


async def test_a_charset_is_no_other_type() -> None:
    async with run_app() as running:
        kind = {"content-type": "Application/JSON; charset=utf-8"}
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        response = await running.client.post(COMPLETIONS, content=body, headers=kind)
    assert response.status_code == 200


async def test_a_body_at_its_limit_is_read_and_one_byte_more_is_refused() -> None:
    limit = 20_000
    bounds = LimitsSection(max_message_bytes=limit)
    start, end = b'{"prompt": "a", "max_tokens": 1, "user": "', b'"}'
    async with run_app(bounds=bounds, config={"limits": bounds}) as running:
        full = start + b"u" * (limit - len(start) - len(end)) + end
        assert (await post_bytes(running, full)).status_code == 200
        more = await post_bytes(running, full[:-2] + b"u" + end)
        assert error_of(more)[::3] == (413, "body_too_large")
        assert str(limit) in more.json()["error"]["message"]


@pytest.mark.parametrize(("max_tokens", "num_aborts"), [(7, 0), (36, 1)])
async def test_a_whole_reply_beyond_the_limit_is_refused_and_a_stream_is_not(
    max_tokens: int, num_aborts: int
) -> None:
    """What is going to be far too large is given up before its end."""
    bounds = LimitsSection(max_message_bytes=4_000)
    steps = Steps()
    async with run_app(steps, config={"limits": bounds}) as running:
        body = {"prompt": "a", "max_tokens": max_tokens, "logprobs": 20, "ignore_eos": True}
        asking = asyncio.create_task(running.post(COMPLETIONS, body))
        for num_tokens in range(1, max_tokens + 1):
            steps.allow(1)
            await until(lambda n=num_tokens: running.num_output >= n or asking.done())  # type: ignore[misc]
        steps.open()
        response = await asking
        assert error_of(response)[::3] == (400, "invalid_field")
        assert "limits.max_message_bytes" in response.json()["error"]["message"]
        assert len(running.aborts) == num_aborts
        streamed = await running.stream(COMPLETIONS, **body)
        tokens = [c["choices"][0]["logprobs"]["tokens"] for c in streamed[:-1]]
        assert sum(map(len, tokens)) == max_tokens


async def test_the_request_id_goes_in_and_out() -> None:
    async with run_app() as running:
        named = await running.post(
            COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"x-request-id": "mine"}
        )
        other = await running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        wrong = await running.post(COMPLETIONS, {"prompt": 5}, **{"X-Request-Id": "bad-1"})
        assert [request.id for request in running.asked] == ["mine", other.headers["x-request-id"]]
    assert named.headers["x-request-id"] == "mine"
    assert wrong.headers["x-request-id"] == "bad-1"


async def test_an_id_in_flight_is_409() -> None:
    steps = Steps()
    async with run_app(steps) as running:
        first = asyncio.create_task(
            running.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-id": "one"})
        )
        await until(lambda: running.num_submitted == 1)
        second = await running.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-id": "one"})
        assert error_of(second)[::3] == (409, "duplicate_request_id")
        steps.open()
        assert (await first).status_code == 200


async def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    steps = Steps()
    bounds = LimitsSection(max_waiting_requests=1)
    async with run_app(steps, bounds=bounds) as running:
        first = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "a"}))
        await until(lambda: running.num_submitted == 1)
        refused = await running.post(COMPLETIONS, {"prompt": ["b", "c", "d"]})
        assert error_of(refused) == (429, "rate_limit_error", None, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert 0 < float(refused.headers["retry-after-ms"]) <= 60_000
        steps.open()
        assert (await first).status_code == 200


async def test_too_many_open_calls_are_429_but_probes_are_answered() -> None:
    steps = Steps()
    bounds = LimitsSection(max_open_calls=2)
    async with run_app(steps, bounds=bounds) as running:
        body = {"prompt": "a", "max_tokens": 1}
        open_calls = [asyncio.create_task(running.post(COMPLETIONS, body)) for _ in range(2)]
        await until(lambda: running.num_submitted == 2)
        refused = await running.post(COMPLETIONS, body)
        assert error_of(refused) == (429, "rate_limit_error", None, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert (await running.client.get("/v1/models")).status_code == 429
        assert (await running.client.get("/health")).status_code == 200
        assert (await running.client.get("/ready")).status_code == 200
        steps.open()
        assert [(await call).status_code for call in open_calls] == [200, 200]
    refused_total = running.engine.metrics.value("requests_refused_total", reason="queue_full")
    assert refused_total == 1


async def test_an_error_that_is_not_ours_is_500_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_app() as running:
        submit = running.engine.submit

        def broken(*_: object, **__: object) -> None:
            raise KeyError("a secret of the server")

        running.engine.submit = broken  # type: ignore[assignment, method-assign]
        response = await running.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-id": "r7"})
        running.engine.submit = submit  # type: ignore[method-assign]
        assert error_of(response) == (500, "server_error", None, "internal")
        assert "secret" not in response.text
        (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert "r7" in record.getMessage()
        assert (await running.complete(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_what_fails_before_the_first_event_is_read_gives_its_request_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a secret of the server")

    steps = Steps()
    async with run_app(steps) as running:
        monkeypatch.setattr(sending, "open_chat", fail)
        for stream in (True, False):
            response = await running.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
            assert error_of(response)[0] == 500
        assert len(running.aborts) == 4
        steps.open()


async def test_every_request_is_counted_by_route_and_status() -> None:
    async with run_app() as running:
        await running.complete(max_tokens=1)
        await running.post(COMPLETIONS, {"prompt": 5})
        await running.client.get("/v1/models/gpt-4")
        await running.client.get("/nothing/here")
        await running.client.get("/health")
        counted = running.engine.metrics.http_requests.collect()
    samples = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for family in counted
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert samples == {
        (COMPLETIONS, "200"): 1,
        (COMPLETIONS, "400"): 1,
        ("/v1/models/{model}", "404"): 1,
        ("other", "404"): 1,
        ("/health", "200"): 1,
    }
    assert running.engine.metrics.value("requests_refused_total", reason="invalid_field") == 1


async def test_pages_of_other_origins_may_call_only_where_the_configuration_says_so() -> None:
    asks = {"origin": "http://a.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    async with run_app() as running:
        closed = await running.client.options(CHAT, headers=asks)
        plain = await running.client.get("/v1/models", headers={"origin": "http://a.example"})
    assert closed.status_code == 405
    assert not [name for name in plain.headers if name.startswith("access-control")]
    section = ServerSection(http_port=0, http_cors_origins=("http://a.example",))
    async with run_app(section=section) as running:
        opened = await running.client.options(CHAT, headers=asks)
        got = await running.client.get("/v1/models", headers={"origin": "http://a.example"})
        other = await running.client.get("/v1/models", headers={"origin": "http://b.example"})
    assert opened.status_code == 200
    assert got.headers["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.nip.io", "", "[", "::1"]
)
async def test_a_page_that_has_its_name_point_here_is_refused(host: str) -> None:
    async with run_app() as running:
        for path in ("/v1/models", "/load", "/metrics"):
            response = await running.client.get(path, headers={"host": host})
            assert (response.status_code, response.json()["error"]["code"]) == (421, "wrong_host")
        response = await running.client.get("/health", headers={"host": host})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "127.8.8.8", "a.example"]
)
async def test_this_machine_and_hosts_that_are_named_are_answered(host: str) -> None:
    async with run_app(section=ServerSection(http_allowed_hosts=("a.example",))) as running:
        response = await running.client.get("/v1/models", headers={"host": host})
        assert response.status_code == 200
