"""Who may call over HTTP: keys, certificates, tenants apart, quotas."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from jaxserve.config import AuthSection, ServerSection, TenantLimits, TenantsSection
from jaxserve.errors import ConfigError
from jaxserve.server.door import Door
from jaxserve.server.http import HttpServer, listener
from tests.engines import build_engine
from tests.server.credentials import HOST, Files, sections, write_keys
from tests.server.harness import Steps, until
from tests.server.http.harness import COMPLETIONS, Running, error_of, run_app, run_listening

pytestmark = pytest.mark.asyncio

FREE = ("/health", "/ready", "/openapi.json")
GUARDED = [
    ("POST", COMPLETIONS), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
    ("GET", "/v1/models/bytes"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"), ("GET", "/metrics"), ("GET", "/no/such/path"),
]  # fmt: skip


@contextlib.asynccontextmanager
async def two_tenants(
    tmp_path: Path, steps: Steps | None = None, **limits: TenantLimits
) -> AsyncIterator[tuple[Running, dict[str, str], dict[str, str]]]:
    """A server for tenants a and b; yields the headers of each."""
    path, (first, second) = write_keys(tmp_path, "a", "b")
    config = {**sections(path), "tenants": TenantsSection(named=limits)}
    async with run_app(steps, config=config) as running:
        yield running, {"authorization": f"Bearer {first}"}, {"authorization": f"Bearer {second}"}


@pytest.mark.parametrize("wrong", ["none", "not one", "another scheme", "two"])
async def test_without_a_valid_key_nothing_is_answered_but_probes(
    tmp_path: Path, wrong: str
) -> None:
    async with two_tenants(tmp_path) as (running, key, _):
        value = key["authorization"]
        headers = {
            "none": [],
            "not one": [("authorization", f"{value}x")],
            "another scheme": [("authorization", value.replace("Bearer", "Basic"))],
            "two": [("authorization", value), ("authorization", value)],
        }[wrong]
        for method, path in GUARDED:
            response = await running.client.request(method, path, headers=headers)
            assert error_of(response) == (401, "authentication_error", None, "unauthenticated")
            assert response.headers["www-authenticate"] == "Bearer"
        for path in FREE:
            assert (await running.client.get(path, headers=headers)).status_code == 200
        assert running.num_submitted == 0
        assert running.engine.metrics.value("auth_failures_total") == len(GUARDED)


async def test_a_key_says_whose_a_request_is_and_a_body_cannot(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (running, first, second):
        body = {"prompt": "x", "max_tokens": 1, "user": "b", "metadata": {"tenant": "b"}}
        assert (await running.post(COMPLETIONS, body, **first)).status_code == 200
        assert (await running.post(COMPLETIONS, body, **second)).status_code == 200
        named = await running.post(COMPLETIONS, {**body, "tenant": "b"}, **first)
        assert error_of(named)[2] == "tenant"
        assert [request.tenant for request in running.asked] == ["a", "b"]


async def test_ids_are_a_tenants_own(tmp_path: Path) -> None:
    steps = Steps()
    async with two_tenants(tmp_path, steps) as (running, first, second):
        one = {"x-request-id": "same"}
        body = {"prompt": "x", "max_tokens": 2}
        calls = [
            asyncio.create_task(running.post(COMPLETIONS, body, **key, **one))
            for key in (first, second)
        ]
        await until(lambda: running.num_submitted == 2)
        again = await running.post(COMPLETIONS, body, **first, **one)
        assert error_of(again)[0] == 409
        steps.open()
        assert [(await call).status_code for call in calls] == [200, 200]


async def test_a_quota_that_is_used_up_is_429_for_its_tenant_alone(tmp_path: Path) -> None:
    limit = TenantLimits(requests_per_minute=2, max_priority=0, max_context_tokens=20)
    async with two_tenants(tmp_path, a=limit) as (running, first, second):
        body = {"prompt": "x", "max_tokens": 1}
        high = await running.post(COMPLETIONS, body | {"priority": 1}, **first)
        assert error_of(high) == (403, "permission_error", "priority", "permission_denied")
        long = await running.post(COMPLETIONS, body | {"max_tokens": 30}, **first)
        assert error_of(long)[::3] == (400, "context_length_exceeded")
        both = [(await running.post(COMPLETIONS, body, **first)).status_code for _ in range(2)]
        refused = await running.post(COMPLETIONS, body, **first)
        assert both == [200, 200]
        assert error_of(refused) == (429, "rate_limit_error", None, "quota_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 31
        assert (await running.post(COMPLETIONS, body, **second)).status_code == 200


async def test_certificates_of_both_sides(tmp_path: Path) -> None:
    files = Files(folder=tmp_path)
    config = sections(tls=files.section(asks_for_certificates=True))
    trusted = ssl.create_default_context(cadata=files.root.cert_pem.bytes().decode())
    known = ssl.create_default_context(cadata=files.root.cert_pem.bytes().decode())
    files.client_root.issue_cert("client").configure_cert(known)
    async with run_listening(config=config) as running:
        url = f"https://{HOST}:{running.port}"
        async with httpx.AsyncClient(verify=known, base_url=url) as client:
            body = {"prompt": "x", "max_tokens": 1, "stream": True}
            response = await client.post(COMPLETIONS, json=body)
            assert response.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(verify=trusted, base_url=url) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/health")
        with pytest.raises(httpx.HTTPError):
            await running.client.get("/health")  # without TLS
        # a new certificate holds for new connections, without a restart
        fresh = type(files.root)()
        files.write(fresh.issue_cert(HOST))
        running.door.credentials.reload()
        async with httpx.AsyncClient(verify=known, base_url=url) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.get("/health")


async def test_who_does_not_finish_his_handshake_is_soon_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    config = sections(tls=Files(folder=tmp_path).section())
    async with run_listening(config=config) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"\x16\x03\x01")  # the beginning of one
        assert await asyncio.wait_for(reader.read(-1), 10) == b""
        writer.close()


async def test_beyond_this_machine_somebody_must_be_asked_for_a_key() -> None:
    engine, _ = build_engine()
    section = ServerSection(http_host="0.0.0.0", http_port=0)
    config = engine.config.model_copy(update={"server": section})
    door = Door(config, engine.metrics)
    with pytest.raises(ConfigError, match=r"server\.http_host"):
        await HttpServer(door).start()
    opened = config.model_copy(update={"auth": AuthSection(allow_open=True)})
    server = HttpServer(Door(opened, engine.metrics))
    await server.start()
    assert server.port
    await server.stop()
