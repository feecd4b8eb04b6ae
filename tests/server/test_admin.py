"""AdminService: what it tells and does, and where alone it listens."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2

import jaxserve
from jaxserve.client import AsyncClient, Finish, ServerError, UnavailableError
from jaxserve.config import AdminSection, Config, ServerSection, TenantLimits, TenantsSection
from jaxserve.errors import ConfigError
from jaxserve.gen import admin_pb2, admin_pb2_grpc
from jaxserve.metrics import Metrics
from jaxserve.server.app import Server
from jaxserve.server.lifecycle import Service
from jaxserve.server.load import LoadMeter, list_buckets
from tests.engines import Clock, build_engine, check_idle
from tests.server.credentials import Files, add_line, sections, write_keys
from tests.server.harness import Running, Steps, connect, run_server, until

pytestmark = pytest.mark.asyncio

ADDRESSES = ["unix", "127.0.0.1:0", "[::1]:0", "localhost:0"]


@pytest.fixture
def path() -> Any:  # noqa: ANN401
    """A short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="adm") as folder:
        yield Path(folder) / "s"


@contextlib.asynccontextmanager
async def run_admin(
    address: str,
    steps: Steps | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[Running, Any]]:
    """Yields the server and a stub of its AdminService."""
    chosen = {"admin": AdminSection(address=address), **options.pop("sections", {})}
    async with run_server(steps, sections=chosen, **options) as running:
        assert running.server.admin is not None
        async with grpc.aio.insecure_channel(running.server.admin.address) as channel:
            yield running, admin_pb2_grpc.AdminServiceStub(channel)


def reason(error: grpc.aio.AioRpcError) -> str:
    metadata: Any = error.trailing_metadata()  # pairs; the stubs disagree
    (value,) = [value for key, value in metadata if key == "grpc-status-details-bin"]
    facts = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(facts)
    return str(facts.reason)


@pytest.mark.parametrize("address", ADDRESSES)
async def test_it_listens_where_it_is_told_to(address: str, path: Path) -> None:
    address = f"unix:{path}" if address == "unix" else address
    async with run_admin(address) as (running, stub):
        told: admin_pb2.GetServerInfoResponse = await stub.GetServerInfo(
            admin_pb2.GetServerInfoRequest()
        )
        assert (told.version, told.state) == (jaxserve.__version__, "serving")
        assert running.server.admin is not None
        assert running.server.admin.address.rpartition(":")[0] == address.rpartition(":")[0]


async def test_the_socket_is_this_users_alone_and_goes_with_the_server(path: Path) -> None:
    before = os.umask(0)
    try:
        async with run_admin(f"unix:{path}"):
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
        assert os.umask(0) == 0, "the process's umask is as it was"
    finally:
        os.umask(before)
    assert not path.exists()


async def test_a_socket_that_a_killed_server_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with run_admin(f"unix:{path}") as (_, stub):
        await stub.GetLoad(admin_pb2.GetLoadRequest())


async def test_a_socket_that_is_in_use_and_a_file_are_not_replaced(path: Path) -> None:
    async with run_admin(f"unix:{path}") as (_, stub):
        config = Config(server=ServerSection(port=0), admin=AdminSection(address=f"unix:{path}"))
        with pytest.raises(ConfigError, match="another server listens on"):
            await Server(config, Metrics()).start()
        await stub.GetLoad(admin_pb2.GetLoadRequest())
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        await Server(config, Metrics()).start()
    assert path.read_text() == "mine"


async def test_a_folder_that_is_not_there_is_an_error_before_anything_is_loaded() -> None:
    config = Config(server=ServerSection(port=0), admin=AdminSection(address="unix:/none/x.sock"))
    with pytest.raises(ConfigError, match=r"admin.address 'unix:/none/x.sock' cannot be bound"):
        await Server(config, Metrics()).start()


async def test_its_listener_has_nothing_else(path: Path) -> None:
    async with run_admin(f"unix:{path}") as (running, _):
        assert running.server.admin is not None
        async with AsyncClient(running.server.admin.address) as client:
            with pytest.raises(ServerError) as caught:
                await client.generate("x")
            assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(running.server.admin.address) as channel:
            method: Any = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            (listed,) = [answer async for answer in method(iter([question]))]
        names = {service.name for service in listed.list_services_response.service}
        assert {n for n in names if "reflection" not in n} == {"jaxserve.v1.AdminService"}


async def test_it_tells_the_configuration_in_force_and_no_secret(
    path: Path, tmp_path: Path
) -> None:
    files = Files(folder=tmp_path)
    keys, (key,) = write_keys(tmp_path, "acme")
    chosen = {
        **sections(keys, files.section()),
        "tenants": TenantsSection(named={"acme": TenantLimits(queue_share=0.25)}),
    }
    async with run_admin(f"unix:{path}", sections=chosen) as (running, stub):
        told = await stub.GetServerInfo(admin_pb2.GetServerInfoRequest())
        config = Config.model_validate_json(told.config_json)
        assert config.tenants.limits_of("acme").queue_share == 0.25
        assert config.auth.keys_file == keys
        assert len(told.config_sha256) == 64
        assert told.start_time.ToNanoseconds() == int(running.server.door.started_s * 1e9)
        secrets = [key, json.loads(keys.read_text().splitlines()[1])["sha256"]]
        secrets += (tmp_path / "key.pem").read_text().splitlines()[1:-1]
        for secret in secrets:
            assert secret not in str(told)


async def test_it_tells_the_load(path: Path) -> None:
    steps = Steps()
    async with run_admin(f"unix:{path}", steps) as (running, stub), connect(running) as client:
        idle = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
        assert (idle.running_requests, idle.max_running_requests) == (0, 4)
        assert idle.total_kv_tokens == 48
        calls = [asyncio.create_task(client.generate("abc", max_tokens=9)) for _ in range(6)]
        await until(lambda: running.num_submitted == 6)
        while running.engine.metrics.value("requests_running") < 4:
            num_steps = running.runner.num_steps
            steps.allow(1)
            await until(lambda before=num_steps: running.runner.num_steps > before)  # type: ignore[misc]
        busy = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
        assert (busy.running_requests, busy.waiting_requests) == (4, 2)
        assert busy.waiting_prompt_tokens == 6
        assert 0 < busy.kv_cache_usage <= 1
        steps.open()
        await asyncio.gather(*calls)
        done = (await stub.GetLoad(admin_pb2.GetLoadRequest())).load
        assert (done.running_requests, done.finished_requests) == (0, 6)
        assert done.generation_tokens_per_second > 0


async def test_a_watch_goes_on_until_it_is_given_up(path: Path) -> None:
    async with run_admin(f"unix:{path}") as (running, stub), connect(running) as client:
        interval = duration_pb2.Duration(nanos=100_000_000)
        call = stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=interval))
        first = await call.read()
        assert first.load.finished_requests == 0
        await client.generate("x", max_tokens=4)
        while (seen := (await call.read()).load).finished_requests == 0:
            pass
        assert seen.generation_tokens_per_second > 0
        call.cancel()
        count = running.engine.metrics.value
        await until(lambda: count("rpcs_total", method="WatchLoad", code="CANCELLED") == 1)


@pytest.mark.parametrize("seconds", [0.09, 60.1, -1.0])
async def test_a_watch_has_bounds(seconds: float, path: Path) -> None:
    async with run_admin(f"unix:{path}") as (_, stub):
        interval = duration_pb2.Duration()
        interval.FromNanoseconds(int(seconds * 1e9))
        with pytest.raises(grpc.aio.AioRpcError, match=r"interval is .* must be in") as caught:
            await stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=interval)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_rate_is_of_the_window_or_since_the_last_look() -> None:
    metrics, clock = Metrics(), Clock()
    meter = LoadMeter(metrics, window_s=10.0, clock=clock)
    between = LoadMeter(metrics, window_s=0.0, clock=clock)
    engine, _ = build_engine(metrics=metrics)

    def rates() -> tuple[float, float]:
        return tuple(  # type: ignore[return-value]
            m.read(engine).generation_tokens_per_second for m in (meter, between)
        )

    assert rates() == (0.0, 0.0)  # no time has passed
    clock.now_s += 2
    metrics.output_tokens.inc(10)
    assert rates() == (5.0, 5.0)
    clock.now_s += 2
    assert rates() == (2.5, 0.0)
    for _ in range(10):
        clock.now_s += 2
        metrics.output_tokens.inc(4)
        assert rates()[1] == 2.0
    assert rates()[0] == 2.0  # the first ten tokens are long ago


async def test_programs_come_with_their_use_the_slowest_first(path: Path) -> None:
    async with run_admin(f"unix:{path}") as (running, stub), connect(running) as client:
        metrics = running.engine.metrics
        for kind, bucket, seconds in (("forward", "1x1+0", 2.0), ("output", "4 greedy", 5.0)):
            metrics.compile_seconds.labels(kind=kind, bucket=bucket).inc(seconds)
        metrics.output_programs.labels(bucket="4 greedy", variant="greedy").inc(3)
        await client.generate("x", max_tokens=3)
        told = list((await stub.ListBuckets(admin_pb2.ListBucketsRequest())).buckets)
        assert [(row.program, row.shape) for row in told[:2]] == [
            ("output", "4 greedy"),
            ("forward", "1x1+0"),
        ]
        assert (told[0].steps, told[0].compile_time.seconds) == (3, 5)
        by_shape = {row.shape: row for row in told if row.program == "forward"}
        assert by_shape["1x1+0"].steps == metrics.value("steps_total", bucket="1x1+0")
        assert sum(row.real_tokens for row in told) == metrics.value("step_real_tokens_total")
        assert sum(row.padded_tokens for row in told) == metrics.value("step_padded_tokens_total")
        assert len(told) == len(list_buckets(metrics))


async def test_the_logs_level_is_set_and_the_one_before_told(path: Path) -> None:
    ours = logging.getLogger("jaxserve")
    before = ours.level
    try:
        ours.setLevel("INFO")
        async with run_admin(f"unix:{path}") as (_, stub):
            told = await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="DEBUG"))
            assert (told.previous_level, ours.level) == ("info", logging.DEBUG)
            for wrong in ("", "loud", "10", "critical"):
                with pytest.raises(grpc.aio.AioRpcError, match="must be one of debug") as caught:
                    await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level=wrong))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert ours.level == logging.DEBUG
    finally:
        ours.setLevel(before)


async def test_credentials_are_reloaded_or_the_fault_is_told(path: Path, tmp_path: Path) -> None:
    keys, (old,) = write_keys(tmp_path, "acme")
    limits = TenantsSection(named={"acme": TenantLimits(requests_per_minute=1)})

    def read_config() -> Config:
        return Config(tenants=limits)

    async with run_admin(f"unix:{path}", sections=sections(keys), read_config=read_config) as (
        running,
        stub,
    ):
        async with AsyncClient(running.target, key=old) as client:
            for _ in range(3):
                await client.generate("x", max_tokens=1)
            add_line(keys, tenant="acme", sha256="short")
            with pytest.raises(grpc.aio.AioRpcError, match="line 3: sha256") as caught:
                await stub.ReloadCredentials(admin_pb2.ReloadCredentialsRequest())
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason(caught.value) == "RELOAD_FAILED"
            await client.generate("x", max_tokens=1)  # nothing has changed
            keys.unlink()
            _, (new, _) = write_keys(tmp_path, "acme", "bolt")
            told = await stub.ReloadCredentials(admin_pb2.ReloadCredentialsRequest())
            assert (told.num_keys, told.num_tenants) == (2, 2)
            with pytest.raises(ServerError, match="valid key"):
                await client.generate("x", max_tokens=1)
        async with AsyncClient(running.target, key=new) as client:
            await client.generate("x", max_tokens=1)
            with pytest.raises(ServerError, match="requests_per_minute is used up"):
                await client.generate("x", max_tokens=1)


async def test_what_this_version_has_not_is_refused_by_name(path: Path) -> None:
    async with run_admin(f"unix:{path}") as (_, stub):
        newer = admin_pb2.GetLoadRequest.FromString(b"\x9a\x3f\x04what")
        with pytest.raises(grpc.aio.AioRpcError, match="1011 is not supported"):
            await stub.GetLoad(newer)
        with pytest.raises(grpc.aio.AioRpcError, match="send it SIGTERM"):
            await stub.Drain(admin_pb2.DrainRequest())  # a bare Server, without a process


# the end of a process, and SIGHUP


@contextlib.asynccontextmanager
async def run_service(
    steps: Steps,
    **updates: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[Service, asyncio.Task[int]]]:
    engine, _ = build_engine(on_result=steps.on_result)
    update = {"server": ServerSection(port=0, drain_timeout_s=600), **updates}
    service = Service(lambda: engine, engine.config.model_copy(update=update), engine.metrics)
    exit_code = asyncio.create_task(service.run())
    await until(lambda: service.server.port != 0)
    yield service, exit_code
    steps.open()
    assert await exit_code == 0
    check_idle(engine)


async def test_a_drain_is_what_sigterm_is_and_its_answer_comes_first(path: Path) -> None:
    steps = Steps()
    async with (
        run_service(steps, admin=AdminSection(address=f"unix:{path}")) as (service, exit_code),
        AsyncClient(service.server.address) as client,
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        await client.wait_ready(timeout_s=60)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        call = asyncio.create_task(client.generate("x", max_tokens=5))
        engine = service.server.door.get_engine()
        await until(lambda: engine.metrics.value("requests_submitted_total") == 1)
        told = await stub.Drain(admin_pb2.DrainRequest())
        assert told.in_flight == 1
        while (await client.health()).is_ready:
            await asyncio.sleep(0.001)
        with pytest.raises(UnavailableError, match="draining"):
            await client.generate("x")
        assert (await stub.GetServerInfo(admin_pb2.GetServerInfoRequest())).state == "draining"
        assert not exit_code.done()
        steps.open()
        assert (await call).usage.completion_tokens == 5


async def test_a_second_drain_can_cut_the_first_short(path: Path) -> None:
    steps = Steps()
    async with (
        run_service(steps, admin=AdminSection(address=f"unix:{path}")) as (service, _),
        AsyncClient(service.server.address) as client,
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        await client.wait_ready(timeout_s=60)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        call = asyncio.create_task(client.generate("x", max_tokens=5))
        engine = service.server.door.get_engine()
        await until(lambda: engine.metrics.value("requests_submitted_total") == 1)
        long = duration_pb2.Duration(seconds=3600)
        await stub.Drain(admin_pb2.DrainRequest(grace=long))
        while (await client.health()).is_ready:
            await asyncio.sleep(0.001)
        await stub.Drain(admin_pb2.DrainRequest())  # goes on as the first said
        assert not engine._intake.is_cut
        await stub.Drain(admin_pb2.DrainRequest(grace=duration_pb2.Duration()))
        await until(lambda: engine._intake.is_cut)
        steps.open()
        with pytest.raises(UnavailableError, match="stopped before"):
            await call


async def test_sighup_reads_the_keys_again_and_disturbs_nobody(tmp_path: Path) -> None:
    keys, (old,) = write_keys(tmp_path, "acme")
    steps = Steps()
    async with run_service(steps, **sections(keys)) as (service, exit_code):
        target = service.server.address
        async with AsyncClient(target, key=old) as before:
            await before.wait_ready(timeout_s=60)
            stream = before.stream("x", max_tokens=5)
            events = asyncio.create_task(read(stream))
            engine = service.server.door.get_engine()
            await until(lambda: engine.metrics.value("requests_submitted_total") == 1)
            _, (new,) = write_keys(tmp_path, "bolt")
            keys.write_text(keys.read_text().splitlines()[2] + "\n")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: engine.metrics.value("credential_reloads_total", outcome="ok") == 1)
            async with AsyncClient(target, key=new) as client:
                await client.tokenize("x")
            with pytest.raises(ServerError, match="valid key"):
                await before.tokenize("x")
            add_line(keys, tenant="acme")
            os.kill(os.getpid(), signal.SIGHUP)
            failed = {"outcome": "failed"}
            await until(lambda: engine.metrics.value("credential_reloads_total", **failed) == 1)
            steps.open()
            assert isinstance((await events)[-1], Finish)
            assert not exit_code.done()
        os.kill(os.getpid(), signal.SIGTERM)


async def read(stream: AsyncIterator[object]) -> list[object]:
    return [event async for event in stream]


async def test_sighup_still_ends_a_process_that_has_nothing_to_read_again() -> None:
    steps = Steps()
    async with run_service(steps) as (service, exit_code):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert not service.server.door.credentials.has_sources
        assert not exit_code.done()
        os.kill(os.getpid(), signal.SIGTERM)
