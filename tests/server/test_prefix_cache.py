"""The prefix cache through both doors: what a client may say of it, and what it is told."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.client import AsyncClient, Finish, Start
from jaxserve.config import AdminSection, PrefixCacheSection, ServerSection
from jaxserve.gen import admin_pb2, admin_pb2_grpc
from tests.server.credentials import sections, write_keys
from tests.server.harness import Running, connect, run_server

pytestmark = pytest.mark.asyncio

PROMPT = "sixteen letters and one"  # 23 bytes, which are tokens: five pages of four


async def ask(client: AsyncClient, **options: Any) -> int:  # noqa: ANN401
    """Returns how many prompt tokens were found."""
    result = await client.generate(PROMPT, max_tokens=2, **options)
    return result.usage.cached_prompt_tokens


async def test_usage_tells_what_was_found_and_a_salt_keeps_apart() -> None:
    async with run_server(num_pages=60) as running, connect(running) as client:
        found = [await ask(client) for _ in range(2)]
        found += [await ask(client, cache_salt=salt) for salt in ("a", "b", "a")]
    assert found == [0, 22, 0, 0, 22]


async def test_the_start_of_a_stream_tells_it_too() -> None:
    async with run_server() as running, connect(running) as client:
        await ask(client)
        events = [event async for event in client.stream(PROMPT, max_tokens=2)]
    start, *_, finish = events
    assert isinstance(start, Start)
    assert isinstance(finish, Finish)
    assert finish.usage is not None
    assert start.cached_prompt_tokens == finish.usage.cached_prompt_tokens == 22


async def test_keys_of_two_tenants_share_nothing_and_a_salt_does_not_help(tmp_path: Path) -> None:
    keys, (acme, bolt) = write_keys(tmp_path, "acme", "bolt")
    async with run_server(sections=sections(keys), num_pages=60) as running:
        async with AsyncClient(running.target, key=acme) as client:
            found = [await ask(client), await ask(client, cache_salt="x"), await ask(client)]
        async with AsyncClient(running.target, key=bolt) as client:
            found += [await ask(client, cache_salt=salt) for salt in ("", "x", "acme")]
    assert found == [0, 0, 22, 0, 0, 0]


async def test_http_tells_it_as_openai_does() -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    listening = {"server": ServerSection(port=0, http_port=0)}
    async with run_server(sections=listening, num_pages=60) as running:
        assert running.server.http is not None
        async with httpx.AsyncClient(base_url=f"http://{running.server.http.address}") as http:
            replies = [
                (await http.post("/v1/completions", json=body | more)).json()
                for more in ({}, {}, {"cache_salt": "x"}, {"cache_salt": "x"}, {"cache_salt": None})
            ]
    found = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert found == [0, 22, 0, 22, 22]


async def flush(running: Running) -> int:
    assert running.server.admin is not None
    async with grpc.aio.insecure_channel(running.server.admin.address) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        reply = await stub.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
        return int(reply.freed_pages)


async def test_the_administrator_empties_it(tmp_path: Path) -> None:
    admin = {"admin": AdminSection(address=f"unix:{tmp_path}/admin")}
    async with run_server(sections=admin) as running, connect(running) as client:
        await ask(client)
        assert await flush(running) == 6  # five of the prompt, and one that its output filled
        assert await flush(running) == 0
        assert await ask(client) == 0


async def test_there_is_nothing_to_empty_with_the_switch_off(tmp_path: Path) -> None:
    off = PrefixCacheSection(enabled=False)
    chosen = {"admin": AdminSection(address=f"unix:{tmp_path}/admin"), "prefix_cache": off}
    async with run_server(sections=chosen, prefix_cache=off) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="nothing is kept") as caught:
            await flush(running)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
