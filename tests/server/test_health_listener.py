"""A port with health alone, for probes without TLS and keys; and the command that asks."""

import asyncio
from pathlib import Path

import grpc
import pytest

from jaxserve.cli.main import main
from jaxserve.client import AsyncClient, Health, ServerError
from jaxserve.config import ServerSection
from jaxserve.errors import ConfigError
from jaxserve.server.app import Server
from tests.engines import build_engine
from tests.server.credentials import HOST, Files, sections, write_keys

pytestmark = pytest.mark.asyncio


def ask(*options: str) -> int:
    return main(["health", *options])


async def test_a_probe_without_tls_and_key_learns_what_the_public_port_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, (keys, _) = Files(folder=tmp_path), write_keys(tmp_path, "acme")
    engine, _ = build_engine()
    server = ServerSection(port=0, health_port=0)
    config = engine.config.model_copy(
        update={
            **sections(keys),
            "tls": files.section(asks_for_certificates=True),
            "server": server,
        }
    )
    running = Server(config, engine.metrics)
    await running.start()
    assert running.probes is not None
    target = running.probes.address
    assert running.probes.port not in (0, running.port)
    async with AsyncClient(target) as client:
        assert await client.health() == Health(is_alive=True, is_ready=False)
        assert await asyncio.to_thread(ask, "--target", target) == 1
        assert await asyncio.to_thread(ask, "--target", target, "--alive") == 0
        engine.start()
        running.attach(engine)
        await client.wait_ready(timeout_s=60)
        assert await asyncio.to_thread(ask, "--target", target) == 0
        with pytest.raises(ServerError) as caught:  # there is nothing else on it
            await client.generate("x")
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        await asyncio.to_thread(engine.stop)
        await running.wait_ended()
        assert await client.health() == Health(is_alive=True, is_ready=False)
    await running.stop(0.0)
    assert await asyncio.to_thread(ask, "--target", target, "--timeout", "1") == 1
    assert capsys.readouterr().out.splitlines() == [
        "alive=true ready=false",
        "alive=true ready=false",
        "alive=true ready=true",
        "alive=false ready=false error=UNAVAILABLE",
    ]


async def test_the_command_asks_a_public_port_that_has_tls(tmp_path: Path) -> None:
    files = Files(folder=tmp_path)
    engine, _ = build_engine()
    config = engine.config.model_copy(
        update={"tls": files.section(), "server": ServerSection(host="127.0.0.1", port=0)}
    )
    server = Server(config, engine.metrics)
    await server.start()
    engine.start()
    server.attach(engine)
    root = tmp_path / "root.pem"
    root.write_bytes(files.root.cert_pem.bytes())
    target = f"{HOST}:{server.port}"
    async with AsyncClient(target, tls=files.trust()) as client:
        await client.wait_ready(timeout_s=60)
    assert await asyncio.to_thread(ask, "--target", target, "--ca-file", str(root)) == 0
    assert await asyncio.to_thread(ask, "--target", target, "--timeout", "1") == 1  # in plaintext
    await asyncio.to_thread(engine.stop)
    await server.stop(0.0)


async def test_a_port_that_is_taken_ends_the_start() -> None:
    engine, _ = build_engine()
    first = Server(
        engine.config.model_copy(update={"server": ServerSection(port=0, health_port=0)}),
        engine.metrics,
    )
    await first.start()
    assert first.probes is not None
    section = ServerSection(port=0, health_port=first.probes.port)
    second = Server(engine.config.model_copy(update={"server": section}), engine.metrics)
    with pytest.raises(ConfigError, match=r"server\.health_port .* cannot be bound"):
        await second.start()
    await second.stop(0.0)
    await first.stop(0.0)


async def test_wrong_options_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(ask, "--timeout", "0") == 2
    assert await asyncio.to_thread(ask, "--ca-file", "/nowhere/root.pem") == 2
    errors = capsys.readouterr().err.splitlines()
    assert [("--timeout" in errors[0]), ("/nowhere/root.pem" in errors[1])] == [True, True]
