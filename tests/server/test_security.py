"""Who may call: keys and certificates on real connections; tenants apart; quotas as statuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from jaxserve.client import (
    AsyncClient,
    ConflictError,
    OverloadedError,
    PermissionDeniedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from jaxserve.config import (
    AuthSection,
    Config,
    LimitsSection,
    ServerSection,
    TenantLimits,
    TenantsSection,
)
from jaxserve.errors import ConfigError
from jaxserve.gen import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2
from jaxserve.metrics import Metrics
from jaxserve.server.app import GENERATION, Server
from tests.server.credentials import Files, sections, write_keys
from tests.server.harness import Running, Steps, run_server, until

pytestmark = pytest.mark.asyncio

SERVICES = [
    *generation_pb2.DESCRIPTOR.services_by_name.values(),
    *model_pb2.DESCRIPTOR.services_by_name.values(),
]
REFLECTION = "ServerReflection/ServerReflectionInfo"
METHODS = [
    *(f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods),
    f"/grpc.reflection.v1.{REFLECTION}",
    f"/grpc.reflection.v1alpha.{REFLECTION}",
]


async def call(
    target: str, method: str, metadata: tuple[tuple[str, str], ...], *, message: bytes = b""
) -> grpc.aio.AioRpcError | None:
    """Sends one message to a method; returns the error it ended with."""
    async with grpc.aio.insecure_channel(target) as channel:
        # not as a stream: a message of one that has ended already is an error of its own
        unary: Any = channel.unary_unary(method)  # type: ignore[call-arg]  # bytes as they are
        try:
            await unary(message, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error
    return None


def told(error: grpc.aio.AioRpcError) -> tuple[object, ...]:
    """Returns all that a client can see of an error."""
    return (error.code(), error.details(), tuple(error.trailing_metadata()))


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_but_health_needs_a_key(method: str, tmp_path: Path) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    async with run_server(sections=sections(keys)) as running:
        headers: list[tuple[tuple[str, str], ...]] = [
            (),
            (("authorization", ""),),
            (("authorization", f"Bearer {key}x"),),
            (("authorization", key),),
            (("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")),
            (("x-api-key", key),),
        ]
        errors = [await call(running.target, method, header) for header in headers]
        answers = {told(error) for error in errors if error is not None}
        assert len(errors) == 6
        assert None not in errors
        assert len(answers) == 1, "the answer tells what was wrong"
        assert errors[0] is not None
        assert errors[0].code() is grpc.StatusCode.UNAUTHENTICATED
        assert read_reason(errors[0]) == "UNAUTHENTICATED"
        let_in = await call(running.target, method, (("authorization", f"Bearer {key}"),))
        assert let_in is None or let_in.code() is not grpc.StatusCode.UNAUTHENTICATED
        assert running.asked == []
        name = method.rpartition("/")[2]
        count = running.engine.metrics.value("rpcs_total", method=name, code="UNAUTHENTICATED")
        assert count == 6


def read_reason(error: grpc.aio.AioRpcError) -> str:
    metadata: Any = error.trailing_metadata()  # pairs; the stubs disagree
    (value,) = [value for key, value in metadata if key == "grpc-status-details-bin"]
    facts = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(facts)
    return str(facts.reason)


async def test_without_a_key_no_message_is_read(tmp_path: Path) -> None:
    """Ten megabytes that are no message: with a key they are read and refused as such."""
    keys, (key,) = write_keys(tmp_path, "acme")
    junk = b"\xff" * 10_000_000
    async with run_server(sections=sections(keys)) as running:
        error = await call(running.target, METHODS[0], (), message=junk)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        header = (("authorization", f"Bearer {key}"),)
        error = await call(running.target, METHODS[0], header, message=junk)
        assert error is not None
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_probes_need_no_key(tmp_path: Path) -> None:
    keys, _ = write_keys(tmp_path, "acme")
    async with run_server(sections=sections(keys)) as running:
        async with AsyncClient(running.target) as client:
            await client.wait_ready(timeout_s=60)
            assert (await client.health()).is_ready
            with pytest.raises(UnauthenticatedError, match="Bearer KEY"):
                await client.generate("x")
        async with grpc.aio.insecure_channel(running.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=GENERATION)
            )
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        refused = running.engine.metrics.value("requests_refused_total", reason="unauthenticated")
        assert refused == 1


async def test_a_key_serves_and_the_engine_knows_whose_it_is(tmp_path: Path) -> None:
    keys, (acme, bolt) = write_keys(tmp_path, "acme", "bolt")
    async with run_server(sections=sections(keys)) as running:
        for key in (acme, bolt):
            async with AsyncClient(running.target, key=key) as client:
                assert (await client.generate("x", max_tokens=2)).usage.completion_tokens == 2
                async for _ in client.stream("x", max_tokens=2):
                    pass
                assert (await client.tokenize("x")).token_ids
                assert len(await client.models()) == 1
    assert [asked.tenant for asked in running.asked] == ["acme", "acme", "bolt", "bolt"]


async def test_reflection_can_be_turned_off() -> None:
    async with run_server(sections={"server": ServerSection(port=0, reflection=False)}) as running:
        for method in METHODS[-2:]:
            error = await call(running.target, method, ())
            assert error is not None
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_answers_who_has_a_key(tmp_path: Path) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    async with run_server(sections=sections(keys)) as running:
        async with grpc.aio.insecure_channel(running.target) as channel:
            method: Any = channel.stream_stream(
                METHODS[-2],
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            header = (("authorization", f"Bearer {key}"),)
            (listed,) = [answer async for answer in method(asked, metadata=header)]
            names = {service.name for service in listed.list_services_response.service}
            assert GENERATION in names
            assert "jaxserve.v1.AdminService" not in names


@pytest.mark.parametrize("has_keys", [False, True])
async def test_admin_calls_do_not_exist_on_the_public_port(has_keys: bool, tmp_path: Path) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    (service,) = admin_pb2.DESCRIPTOR.services_by_name.values()
    async with run_server(sections=sections(keys if has_keys else None)) as running:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for header in ((), (("authorization", f"Bearer {key}"),)):
                error = await call(running.target, path, header)
                assert error is not None
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(running.target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await stub.Drain(admin_pb2.DrainRequest())


# tenants


async def test_a_request_id_is_the_tenants_own(tmp_path: Path) -> None:
    """Another tenant's id is free for us, and cancels nothing of theirs."""
    keys, (acme, bolt) = write_keys(tmp_path, "acme", "bolt")
    steps = Steps()
    async with (
        run_server(steps, sections=sections(keys)) as running,
        AsyncClient(running.target, key=acme) as ours,
        AsyncClient(running.target, key=bolt) as theirs,
    ):
        first = asyncio.create_task(ours.generate("x", request_id="same", max_tokens=3))
        await until(lambda: running.num_submitted == 1)
        with pytest.raises(ConflictError):
            await ours.generate("x", request_id="same", max_tokens=3)
        second = asyncio.create_task(theirs.generate("x", request_id="same", max_tokens=3))
        await until(lambda: running.num_submitted == 2)
        assert not await cancel(running, bolt, "only-ours")
        assert await cancel(running, bolt, "same")
        steps.open()
        assert (await first).usage.completion_tokens == 3
        assert (await second).usage.completion_tokens < 3
        assert not await cancel(running, bolt, "same")


async def cancel(running: Running, key: str, request_id: str) -> bool:
    async with grpc.aio.insecure_channel(running.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer: generation_pb2.CancelGenerationResponse = await stub.CancelGeneration(
            generation_pb2.CancelGenerationRequest(request_id=request_id),
            metadata=(("authorization", f"Bearer {key}"),),
        )
        return answer.found


async def test_a_body_cannot_name_a_tenant(tmp_path: Path) -> None:
    """There is no such field; one that an attacker makes up is refused, not ignored."""
    keys, (acme,) = write_keys(tmp_path, "acme")
    message = generation_pb2.GenerateRequest(text="x")
    assert not [f for f in message.DESCRIPTOR.fields_by_name if "tenant" in f]
    made_up = message.SerializeToString() + b"\x9a\x3f\x04bolt"  # field 1011, "bolt"
    header = (("authorization", f"Bearer {acme}"), ("x-tenant", "bolt"), ("tenant", "bolt"))
    async with run_server(sections=sections(keys)) as running:
        error = await call(running.target, METHODS[0], header, message=made_up)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "1011" in str(error.details())
        plain = generation_pb2.GenerateRequest(text="x").SerializeToString()
        assert await call(running.target, METHODS[0], header, message=plain) is None
    assert [asked.tenant for asked in running.asked] == ["acme"]


async def test_quotas_are_statuses_that_say_which_how_much_and_when(tmp_path: Path) -> None:
    keys, (acme, bolt) = write_keys(tmp_path, "acme", "bolt")
    limits = TenantLimits(requests_per_minute=1, max_priority=0)
    tenants = TenantsSection(named={"acme": limits})
    async with (
        run_server(sections={**sections(keys), "tenants": tenants}) as running,
        AsyncClient(running.target, key=acme) as ours,
        AsyncClient(running.target, key=bolt) as theirs,
    ):
        with pytest.raises(PermissionDeniedError) as denied:
            await ours.generate("x", priority=1, max_tokens=1)
        assert (denied.value.reason, denied.value.field) == ("PERMISSION_DENIED", "priority")
        await ours.generate("x", max_tokens=1)
        with pytest.raises(OverloadedError) as caught:
            await ours.generate("x", max_tokens=1)
        assert caught.value.reason == "QUOTA_EXCEEDED"
        assert caught.value.retry_after_s == pytest.approx(60.0)
        assert "requests_per_minute is used up: 1 of 1" in str(caught.value)
        for _ in range(3):
            await theirs.generate("x", max_tokens=1, priority=7)


# certificates


async def generates(client: AsyncClient) -> bool:
    async with client:
        return (await client.generate("x", max_tokens=1, timeout_s=60)).usage.completion_tokens == 1


async def test_with_tls_only_encrypted_connections_come_in(tmp_path: Path) -> None:
    files = Files(folder=tmp_path)
    keys, (key,) = write_keys(tmp_path, "acme")
    async with run_server(sections=sections(keys, files.section())) as running:
        assert await generates(AsyncClient(running.target, tls=files.trust(), key=key))
        with pytest.raises(UnauthenticatedError):
            await generates(AsyncClient(running.target, tls=files.trust()))
        with pytest.raises(UnavailableError):
            await generates(AsyncClient(running.target, key=key))
        stranger = Files(folder=make_folder(tmp_path / "other"))
        with pytest.raises(UnavailableError):
            await generates(AsyncClient(running.target, tls=stranger.trust(), key=key))


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


async def test_with_a_client_root_only_its_certificates_come_in(tmp_path: Path) -> None:
    files = Files(folder=tmp_path)
    tls = files.section(asks_for_certificates=True)
    files.root, right = files.root, files.client_root.issue_cert("client")
    wrong_root = trustme.CA().issue_cert("client")
    servers_root = files.root.issue_cert("client")
    files_of_clients = Files(folder=make_folder(tmp_path / "x"), root=files.client_root)
    expired = files_of_clients.expired()
    async with run_server(sections=sections(None, tls)) as running:
        assert await generates(AsyncClient(running.target, tls=files.trust(right)))
        for leaf in (None, wrong_root, servers_root, expired, self_signed()):
            with pytest.raises(ServerError) as caught:
                await generates(AsyncClient(running.target, tls=files.trust(leaf)))
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(running.asked) == 1


def self_signed() -> trustme.LeafCert:
    """A root that shows itself as if it were a client."""
    root = trustme.CA()
    return trustme.LeafCert(
        private_key_pem=root.private_key_pem.bytes(),
        server_cert_pem=root.cert_pem.bytes(),
        chain_to_ca=[],
    )


# who may listen where


def exposed(host: str, **updates: Any) -> Server:  # noqa: ANN401
    config = Config(server=ServerSection(host=host, port=0)).model_copy(update=updates)
    return Server(config, Metrics())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "2001:db8::1"])
async def test_a_server_that_asks_nobody_stays_on_this_machine(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await exposed(host).start()
    for word in (f"server.host is {host!r}", "jaxserve keys new", "auth.allow_open"):
        assert word in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
async def test_on_this_machine_nobody_need_be_asked(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = exposed(host)
    await server.start()
    await server.stop(0.0)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_an_open_server_must_be_meant_and_is_told_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = exposed("0.0.0.0", auth=AuthSection(allow_open=True))
    await server.start()
    await server.stop(0.0)
    assert "EVERYONE" in caplog.text
    assert "NO TLS" in caplog.text


async def test_keys_in_the_clear_are_told_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _ = write_keys(tmp_path, "acme")
    server = exposed("0.0.0.0", **sections(keys))
    await server.start()
    await server.stop(0.0)
    assert "NO TLS: whoever listens on the network can read keys" in caplog.text
    assert "EVERYONE" not in caplog.text


async def test_with_client_certificates_no_keys_are_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Files(folder=tmp_path).section(asks_for_certificates=True)
    server = exposed("0.0.0.0", **sections(None, tls))
    await server.start()
    await server.stop(0.0)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_more_connections_than_the_limit_are_closed() -> None:
    bounds = LimitsSection(max_connections=2)
    async with run_server(sections={"limits": bounds}) as running:
        async with greeted(running.target) as first:
            async with greeted(running.target) as second, greeted(running.target) as third:
                assert (first, second, third) == (True, True, False)
            is_let_in = False
            while not is_let_in:  # the second one's place comes free soon
                async with greeted(running.target) as is_let_in:
                    pass


@contextlib.asynccontextmanager
async def greeted(target: str) -> AsyncIterator[bool]:
    """Connects as HTTP/2 does, while the block runs; yields whether the server answered."""
    host, _, port = target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    is_greeted = False
    with contextlib.suppress(ConnectionResetError):
        is_greeted = bool(await reader.read(1))
    yield is_greeted
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()
