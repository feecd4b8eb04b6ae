"""What VllmEngine tells of itself, to whom, and where it is served at all."""

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

import jaxserve
from jaxserve.config import load_config
from jaxserve.engine import ServedModel
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.app import Server
from jaxserve.server.tracing import tracing as tracing_module
from jaxserve.server.vllm_engine import SERVICE
from jaxserve.server.vllm_engine.tokenizer_bundle import CHUNK_BYTES, TokenizerBundle, build_bundle
from jaxserve.text.hf_folder import load_tokenizer
from tests.fakes import BOS_ID, CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, build_byte_tokenizer
from tests.server.credentials import sections, write_keys
from tests.server.harness import Steps, local, run_server, until
from tests.server.test_tracing import SAMPLED, SECTION, TRACE_ID, Spans
from tests.server.vllm_stub import ON, PREFIX, ask, connect_gateway, read, reason_of, run_worker

METHODS = [
    method.name for method in vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods
]


@pytest.mark.asyncio
async def test_the_model_is_told_by_name() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        model = running.engine.model
    assert (info.served_model_name, info.model_path) == (model.name, model.name)
    assert (info.tokenizer_path, info.is_generation, info.supports_vision) == ("", True, False)
    assert (info.max_context_length, info.max_req_input_len) == (40, 39)
    assert (info.vocab_size, list(info.eos_token_ids)) == (VOCAB_SIZE, [EOS_ID])
    assert info.default_sampling_params_json == ""


@pytest.mark.asyncio
async def test_the_load_is_the_engines() -> None:
    steps = Steps()
    async with run_worker(steps) as running, connect_gateway(running) as stub:
        calls = [
            asyncio.create_task(read(stub.Generate(ask(tuple(b"Hello"), max_tokens=4))))
            for _ in range(6)
        ]
        value = running.engine.metrics.value
        await until(lambda: 0 < value("requests_running") == 6 - value("requests_waiting"))
        reply = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["core"], dp_rank=0))
        info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        steps.open()
        await asyncio.gather(*calls)
        await until(lambda: running.engine.metrics.value("requests_running") == 0)
        idle = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    (load,) = reply.loads
    assert (reply.dp_rank_count, reply.version) == (1, jaxserve.__version__)
    counts = (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs)
    assert counts == (load.num_running_reqs, 6 - load.num_running_reqs, 6)
    assert 0 < load.num_running_reqs <= 4
    assert load.num_waiting_uncached_tokens == 5 * load.num_waiting_reqs > 0
    assert 0 < load.token_usage <= 1
    assert 0 < load.utilization <= 1
    assert (info.active_requests, info.is_paused, info.data_parallel_size) == (6, False, 1)
    assert (info.block_size, info.constrained_decoding_start) == (4, "first_token")
    assert info.uptime_seconds > 0
    assert (idle.loads[0].num_total_reqs, idle.loads[0].token_usage) == (0, 0.0)


@pytest.mark.asyncio
async def test_what_the_load_has_not_is_refused() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="section core alone") as caught:
            await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["memory"]))
        assert reason_of(caught.value) == ("UNSUPPORTED", "include")
        with pytest.raises(grpc.aio.AioRpcError, match="one rank, 0") as caught:
            await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1))
        assert reason_of(caught.value) == ("INVALID_FIELD", "dp_rank")


@pytest.mark.asyncio
async def test_what_there_is_not_is_unimplemented_by_name() -> None:
    asks = {
        "Embed": vllm_engine_pb2.EmbedRequest(),
        "FlushCache": common_pb2.FlushCacheRequest(),
        "StartProfile": common_pb2.StartProfileRequest(),
        "StopProfile": common_pb2.StopProfileRequest(),
        "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest(),
    }
    async with run_worker() as running, connect_gateway(running) as stub:
        for method, message in asks.items():
            call = getattr(stub, method)(message)
            with pytest.raises(grpc.aio.AioRpcError, match=f"{method} is not supp") as caught:
                await (call.read() if method == "SubscribeKvEvents" else call)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            name = f"VllmEngine/{method}"
            count = running.engine.metrics.value("rpcs_total", method=name, code="UNIMPLEMENTED")
            assert count == 1


@pytest.mark.asyncio
async def test_health_is_the_engines_from_the_first_moment() -> None:
    config = local(load_config()).model_copy(update={"server": ON})
    server = Server(config, Metrics())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            loading = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            ready = await health_pb2_grpc.HealthStub(channel).Check(asked)
    finally:
        await server.stop(0.0)
    assert (loading.healthy, loading.message) == (False, "starting")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
    async with run_worker() as running, connect_gateway(running) as stub:
        serving = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (serving.healthy, serving.message) == (True, "serving")


async def fetch(stub: Any) -> tuple[bytes, list[str]]:  # noqa: ANN401
    """Returns the archive, and the digest of each chunk."""
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert all(0 < len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    return b"".join(chunk.data for chunk in chunks), [chunk.sha256 for chunk in chunks]


@pytest.mark.asyncio
async def test_the_tokenizer_comes_as_a_folder_that_makes_the_same_one(tmp_path: Path) -> None:
    async with run_worker(chat_template=CHAT_TEMPLATE) as running:
        async with connect_gateway(running) as stub:
            (archive, digests), again = await asyncio.gather(fetch(stub), fetch(stub))
        served = running.engine.tokenizer
    assert (archive, digests) == again
    assert digests == [*[""] * (len(digests) - 1), hashlib.sha256(archive).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.testzip() is None
        files.extractall(tmp_path)
    assert load_tokenizer(tmp_path, eos_ids=served.eos_ids).digest == served.digest
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == ([EOS_ID], VOCAB_SIZE)


@pytest.mark.parametrize(
    "size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]
)
def test_the_digest_is_on_the_last_chunk_alone(size: int) -> None:
    chunks = [*TokenizerBundle(archive=bytes(size), sha256="x").chunks()]
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), "x"]
    assert sum(len(chunk.data) for chunk in chunks) == size


def test_a_bundle_is_cut_and_is_the_same_anywhere() -> None:
    model = ServedModel(
        name="m", max_model_tokens=40, vocab_size=VOCAB_SIZE, eos_ids=frozenset({EOS_ID}),
        bos_id=BOS_ID, architecture="llama", sampling_defaults={"temperature": 0.6},
    )  # fmt: skip
    long = build_byte_tokenizer(chat_template=f"{CHAT_TEMPLATE}{'{# #}' * 5}")
    noise = "".join(hashlib.sha256(b"%d" % i).hexdigest() for i in range(3000))
    large = long.with_chat_template(f"{{# {noise} #}}{CHAT_TEMPLATE}")
    bundle = build_bundle(large, model)
    chunks = [*bundle.chunks()]
    assert len(chunks) > 1
    assert b"".join(chunk.data for chunk in chunks) == bundle.archive
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), bundle.sha256]
    assert build_bundle(large, model) == bundle
    assert build_bundle(long, model) != bundle
    with zipfile.ZipFile(io.BytesIO(bundle.archive)) as files:
        generation = json.loads(files.read("generation_config.json"))
        config = json.loads(files.read("config.json"))
    assert generation == {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID], "temperature": 0.6}
    assert config["model_type"] == "llama"


@pytest.mark.asyncio
@pytest.mark.parametrize("method", METHODS)
async def test_every_method_asks_for_a_key(tmp_path: Path, method: str) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    async with run_worker(sections=sections(keys)) as running:
        async with grpc.aio.insecure_channel(running.target) as channel:
            call: Any = channel.unary_stream(f"{PREFIX}{method}")  # type: ignore[call-arg]  # stubs
            for headers in ((), (("authorization", f"Bearer {key}x"),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", metadata=headers).read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            name = f"VllmEngine/{method}"
            metrics = running.engine.metrics
            assert metrics.value("rpcs_total", method=name, code="UNAUTHENTICATED") == 2
            refused = metrics.value("requests_refused_total", reason="unauthenticated")
            assert refused == (2 if method == "Generate" else 0), "only Generate makes requests"
            with_key = call(b"", metadata=(("authorization", f"Bearer {key}"),))
            if method in ("Generate", "Embed", *NOT_THERE):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await with_key.read()
                assert caught.value.code() is not grpc.StatusCode.UNAUTHENTICATED
            else:
                assert await with_key.read() is not None


NOT_THERE = ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")


@pytest.mark.asyncio
async def test_an_id_is_its_tenants_alone(tmp_path: Path) -> None:
    keys, (mine, other) = write_keys(tmp_path, "acme", "umbrella")
    headers = [(("authorization", f"Bearer {key}"),) for key in (mine, other)]
    steps = Steps()
    async with run_worker(steps, sections=sections(keys)) as running:
        async with connect_gateway(running) as stub:
            message = ask(request_id="same", stream=True, max_tokens=30)
            first = stub.Generate(message, metadata=headers[0])
            steps.allow(1)
            await first.read()
            abort = vllm_engine_pb2.AbortRequest(request_ids=["same"])
            await stub.Abort(abort, metadata=headers[1])
            assert running.aborts == []
            second = stub.Generate(ask(request_id="same", max_tokens=1), metadata=headers[1])
            await until(lambda: running.num_submitted == 2)
            await stub.Abort(abort, metadata=headers[0])
            steps.open()
            _, (ended,) = await read(first)
            _, (whole,) = await read(second)
        assert (ended.finish_reason, whole.finish_reason) == ("abort", "length")
        assert [request.tenant for request in running.asked] == ["acme", "umbrella"]
        assert running.finished("cancelled") == 1


@pytest.mark.asyncio
async def test_it_is_served_where_the_configuration_says_so() -> None:
    async with run_server() as running, connect_gateway(running) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="Method not found") as caught:
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert SERVICE not in await list_services(running.target)
    async with run_worker() as running:
        assert SERVICE in await list_services(running.target)


async def list_services(target: str) -> list[str]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        await call.done_writing()
        return [service.name for service in reply.list_services_response.service]


MISSING = """
import sys
sys.modules["smg_grpc_proto"] = None
from jaxserve.cli.main import main
sys.exit(main(["serve", "--port", "0", "--vllm-engine"]))
"""


def test_without_the_extra_the_message_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "server.vllm_engine" in last
    assert "pip install 'jaxserve[smg]'" in last
    assert "Traceback" not in done.stderr


@pytest.mark.asyncio
async def test_a_package_that_does_not_fit_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("The grpc package installed is at version 1.76.0")

    for name in [name for name in sys.modules if name.startswith("jaxserve.server.vllm_engine.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", Old())
    config = local(load_config()).model_copy(update={"server": ON})
    with pytest.raises(ConfigError, match=r"does not go with the installed grpcio.*1\.76\.0"):
        Server(config, Metrics())


def test_nothing_of_the_extra_is_imported_unless_it_is_served() -> None:
    program = (
        "import sys, jaxserve.server.lifecycle; "
        "sys.exit(any('smg' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.asyncio
async def test_a_request_is_a_span_of_the_gateways_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setattr(tracing_module, "_build_exporter", lambda section: spans.exporter)
    async with run_worker(sections={"tracing": SECTION}) as running:
        async with connect_gateway(running) as stub:
            message = ask(request_id="r-1", stream=True, max_tokens=4)
            await read(stub.Generate(message, metadata=(("traceparent", SAMPLED),)))
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert spans.one.parent is not None
    assert f"{spans.one.parent.trace_id:032x}" == TRACE_ID
    facts = spans.facts
    assert (facts["gen_ai.request.id"], facts["gen_ai.request.stream"]) == ("r-1", True)
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 4)
