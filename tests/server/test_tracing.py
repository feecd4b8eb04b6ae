"""Spans: one for each call that generates, the same through both doors, and never in the way."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, override

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.client import AsyncClient, Finish, ScoreItem, ServerError
from jaxserve.config import TracingSection
from jaxserve.engine import EngineState
from jaxserve.errors import ConfigError
from jaxserve.gen import generation_pb2, generation_pb2_grpc
from jaxserve.metrics import Metrics
from jaxserve.plan import StepPlan
from jaxserve.request import ChatMessage, ChatPrompt
from jaxserve.server.app import Server
from jaxserve.server.tracing import conventions as names
from jaxserve.server.tracing import tracing as tracing_module
from tests.engines import Clock, build_engine
from tests.server.credentials import sections, write_keys
from tests.server.harness import Running, Steps, connect, local, run_server, until
from tests.server.http import harness as http
from tests.server.vllm_stub import ask, connect_gateway, read, run_worker

pytestmark = pytest.mark.asyncio

SECTION: Final = TracingSection(endpoint="http://127.0.0.1:4317", export_interval_s=0.01)
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED: Final = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED: Final = f"00-{TRACE_ID}-{SPAN_ID}-00"
SECRET: Final = "QXZZY"
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Exporter(InMemorySpanExporter):
    """Serves one server after the other."""

    @override
    def shutdown(self) -> None:
        pass


class Spans:
    """What was exported. An attribute's value is as it left."""

    def __init__(self) -> None:
        self.exporter = Exporter()

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def one(self) -> ReadableSpan:
        (span,) = self.all
        return span

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.one.attributes or {})


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    monkeypatch.setattr(tracing_module, "_build_exporter", lambda section: spans.exporter)
    return spans


@contextlib.asynccontextmanager
async def run_traced(
    steps: Steps | None = None,
    *,
    section: TracingSection = SECTION,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Running]:
    """A gRPC server; all its spans have left when the block is over."""
    more = options.pop("sections", {})
    async with run_server(steps, sections={"tracing": section, **more}, **options) as running:
        yield running


@contextlib.asynccontextmanager
async def run_traced_http(
    steps: Steps | None = None,
    *,
    section: TracingSection = SECTION,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[http.Running]:
    config = {"tracing": section, **options.pop("config", {})}
    async with http.run_listening(steps, config=config, **options) as running:
        yield running
        assert running.door.tracing is not None
        if steps is not None:
            steps.open()
        await until(lambda: running.door.open_calls.count == 0)
        await until(lambda: not running.engine._intake.live())
        await running.door.tracing.close(60)


def is_error(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


async def test_a_grpc_stream_is_one_span_with_what_was_asked_and_what_came(spans: Spans) -> None:
    clock = Clock()

    def pass_time(plan: StepPlan) -> None:
        clock.now_s += 0.25

    async with run_traced(clock=clock, on_launch=pass_time) as running, connect(running) as client:
        stream = client.stream(
            SECRET, request_id="r-1", max_tokens=4, temperature=0.5, top_p=0.75, top_k=3, seed=7
        )
        *_, finish = [event async for event in stream]
    assert isinstance(finish, Finish)
    assert finish.timings is not None
    span, facts = spans.one, spans.facts
    assert (span.name, span.kind, span.parent) == ("text_completion bytes", SpanKind.SERVER, None)
    assert not is_error(span)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time
    assert dict(span.resource.attributes).items() >= {"service.name": "jaxserve"}.items()
    timings = {name: facts.pop(name) for name in list(facts) if "latency" in name}
    assert (
        facts.pop(names.RESPONSE_TIME_TO_FIRST_CHUNK) == timings[names.LATENCY_TIME_TO_FIRST_TOKEN]
    )
    assert facts == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "bytes",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 3.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.n": 1,
        "gen_ai.response.id": "r-1",
        "gen_ai.response.model": "bytes",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 4,
        "jaxserve.preemptions": 0,
        "jaxserve.tenant": "anonymous",
    }
    told = finish.timings
    assert timings == {
        "gen_ai.latency.time_in_queue": pytest.approx(told.queue_s),
        "gen_ai.latency.time_to_first_token": pytest.approx(told.time_to_first_token_s),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(told.prefill_s),
        "gen_ai.latency.time_in_model_decode": pytest.approx(told.decode_s),
        "gen_ai.latency.time_in_model_inference": pytest.approx(told.prefill_s + told.decode_s),
        "gen_ai.latency.e2e": pytest.approx(told.queue_s + told.prefill_s + told.decode_s),
    }
    assert timings["gen_ai.latency.e2e"] > timings["gen_ai.latency.time_to_first_token"] > 0


async def test_a_conversation_is_a_chat_through_both_doors(spans: Spans) -> None:
    async with run_traced(chat_template=CHAT_TEMPLATE) as running, connect(running) as client:
        prompt = ChatPrompt(messages=(ChatMessage(role="user", content=SECRET),))
        await client.generate(prompt, max_tokens=2)
    async with run_traced_http(chat_template=CHAT_TEMPLATE) as served:
        await served.chat([{"role": "user", "content": SECRET}], max_tokens=2)
    grpcs, https = (dict(span.attributes or {}) for span in spans.all)
    assert [span.name for span in spans.all] == ["chat bytes", "chat bytes"]
    for own in (names.REQUEST_ID, names.RESPONSE_ID):
        assert grpcs.pop(own) != https.pop(own)
    assert grpcs == https
    assert grpcs[names.REQUEST_STREAM] is False


async def test_nothing_that_was_said_is_in_a_span(spans: Spans) -> None:
    body = {"max_tokens": 8, "stop": [f"{SECRET}s"], "logit_bias": {"65": 1}}
    async with run_traced_http(chat_template=CHAT_TEMPLATE) as running:
        await running.complete(SECRET, **body)
        await running.chat([{"role": "user", "content": SECRET}], **body)
        await running.post(http.COMPLETIONS, {"prompt": SECRET, SECRET: 1})
        await running.post(http.COMPLETIONS, {"prompt": SECRET, "model": SECRET})
    assert len(spans.all) == 4
    assert not [span for span in spans.all if SECRET in span.to_json()]
    assert "abcdefgh" not in str([dict(span.attributes or {}) for span in spans.all])


@pytest.mark.parametrize("door", ["grpc", "http"])
@pytest.mark.parametrize(
    ("headers", "ratio", "parent"),
    [
        ((("traceparent", SAMPLED),), 0.0, SPAN_ID),
        ((("traceparent", SAMPLED), ("tracestate", "vendor=1")), 1.0, SPAN_ID),
        ((("traceparent", NOT_SAMPLED),), 1.0, None),
        ((("traceparent", "00-nothing-of-the-kind"),), 1.0, ""),
        ((), 1.0, ""),
        ((), 0.0, None),
    ],
)
async def test_a_callers_trace_is_followed(
    spans: Spans, door: str, headers: tuple[tuple[str, str], ...], ratio: float, parent: str | None
) -> None:
    section = SECTION.model_copy(update={"sample_ratio": ratio})
    if door == "grpc":
        async with run_traced(section=section) as running:
            async with grpc.aio.insecure_channel(running.target) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                message = generation_pb2.GenerateRequest(text="Hi!")
                message.stop.max_tokens = 1
                await stub.Generate(message, metadata=headers)
    else:
        async with run_traced_http(section=section) as served:
            body = {"prompt": "Hi!", "max_tokens": 1}
            await served.client.post(http.COMPLETIONS, json=body, headers=list(headers))
    if parent is None:
        assert spans.all == ()
        return
    span = spans.one
    assert span.context is not None
    if not parent:
        assert span.parent is None
        assert f"{span.context.trace_id:032x}" != TRACE_ID
        return
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    wanted = [header for name, header in headers if name == "tracestate"]
    assert [span.context.trace_state.to_header()] == (wanted or [""])


async def test_of_two_callers_traces_none_is_followed(spans: Spans) -> None:
    """Over HTTP: gRPC itself keeps the last."""
    headers = [("traceparent", SAMPLED), ("traceparent", SAMPLED)]
    async with run_traced_http() as running:
        body = {"prompt": "Hi!", "max_tokens": 1}
        await running.client.post(http.COMPLETIONS, json=body, headers=headers)
    assert spans.one.parent is None


async def test_what_is_refused_has_a_span_that_says_why(spans: Spans) -> None:
    async with run_traced() as running, connect(running) as client:
        with pytest.raises(ServerError):
            await client.generate("x", temperature=-1.0)
        with pytest.raises(ServerError):
            await client.generate("x", model="none")
    async with run_traced_http() as served:
        await served.post(http.COMPLETIONS, {"prompt": "x", "temperature": -1})
        await served.post(http.COMPLETIONS, {"prompt": "x", "suffix": "y"})
    reasons = [(span.attributes or {}).get("error.type") for span in spans.all]
    assert reasons == ["INVALID_FIELD", "MODEL_NOT_FOUND", "INVALID_FIELD", "UNSUPPORTED"]
    assert not any(is_error(span) for span in spans.all)  # the callers' faults, not the server's
    assert not any(names.USAGE_INPUT_TOKENS in (span.attributes or {}) for span in spans.all)


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_fault_of_the_server_is_an_error(spans: Spans, door: str) -> None:
    def say(prompt: tuple[int, ...], output_index: int) -> Any:  # noqa: ANN401
        return "not_finite" if output_index == 2 else 97

    if door == "grpc":
        async with run_traced(script=say) as running, connect(running) as client:
            with pytest.raises(ServerError):
                await client.generate("x", max_tokens=9)
    else:
        async with run_traced_http(script=say) as served:  # told in the middle of a good stream
            body = {"prompt": "x", "max_tokens": 9, "stream": True}
            response = await served.post(http.COMPLETIONS, body)
            assert response.status_code == 200
    assert is_error(spans.one)
    assert spans.facts["error.type"] == "NUMERICS"
    assert spans.facts[names.USAGE_OUTPUT_TOKENS] == 2
    assert names.RESPONSE_FINISH_REASONS not in spans.facts


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_call_that_is_given_up_says_how_far_it_came(spans: Spans, door: str) -> None:
    steps = Steps()
    if door == "grpc":
        async with run_traced(steps) as running, connect(running) as client:
            stream = client.stream("Hi!", max_tokens=30)
            reading = asyncio.create_task(anext(stream))
            await feed(steps, reading)
            await stream.aclose()
            await until(lambda: running.num_open_calls == 0)
            steps.open()
            await until(lambda: running.finished("cancelled") == 1)
    else:
        async with run_traced_http(steps) as served:
            body = {"prompt": "Hi!", "max_tokens": 30, "stream": True}
            request = served.client.build_request("POST", http.COMPLETIONS, json=body)
            sending = asyncio.create_task(served.client.send(request, stream=True))
            await feed(steps, sending)  # the reply begins with the first token
            await sending.result().aclose()
            await until(lambda: served.door.open_calls.count == 0)
            steps.open()
            await until(lambda: served.finished("cancelled") == 1)
    assert not is_error(spans.one)
    assert spans.facts["error.type"] == "CANCELLED"
    assert spans.facts[names.RESPONSE_FINISH_REASONS] == ("abort",)
    assert 1 <= spans.facts[names.USAGE_OUTPUT_TOKENS] < 30


async def feed(steps: Steps, reading: "asyncio.Future[Any]") -> None:
    while not reading.done():
        steps.allow(1)
        await asyncio.sleep(0.001)
    reading.result()


async def test_choices_and_lists_of_prompts_are_one_span(spans: Spans) -> None:
    async with run_traced_http() as running:
        await running.complete(["a", "bb", "ccc"], max_tokens=2)
        await running.complete("dddd", max_tokens=2, n=2, seed=1, temperature=1)
    prompts, choices = (dict(span.attributes or {}) for span in spans.all)
    assert prompts[names.USAGE_INPUT_TOKENS] == 1 + 2 + 3
    assert prompts[names.USAGE_OUTPUT_TOKENS] == 3 * 2
    assert prompts[names.RESPONSE_FINISH_REASONS] == ("length",) * 3
    assert names.REQUEST_CHOICE_COUNT not in prompts
    assert choices[names.USAGE_INPUT_TOKENS] == 4
    assert choices[names.USAGE_OUTPUT_TOKENS] == 4
    assert choices[names.RESPONSE_FINISH_REASONS] == ("length", "length")
    assert (choices[names.REQUEST_CHOICE_COUNT], choices[names.REQUEST_N]) == (2, 2)


async def test_a_score_is_one_span_for_all_its_items(spans: Spans) -> None:
    async with run_traced() as running, connect(running) as client:
        await client.score(
            [
                ScoreItem(context="ab", continuation="c"),
                ScoreItem(context="d", continuation="ef"),
            ]
        )
    assert spans.one.name == "score bytes"
    assert spans.facts[names.USAGE_INPUT_TOKENS] == 6
    assert spans.facts[names.USAGE_OUTPUT_TOKENS] == 0


async def test_a_gateways_call_is_a_span_too(spans: Spans) -> None:
    async with run_worker(sections={"tracing": SECTION}) as running:
        async with connect_gateway(running) as stub:
            await read(stub.Generate(ask(request_id="g-1", stream=True, max_tokens=2)))
    assert spans.one.name == "text_completion bytes"
    assert (spans.facts[names.REQUEST_ID], spans.facts[names.REQUEST_STREAM]) == ("g-1", True)
    assert spans.facts[names.USAGE_OUTPUT_TOKENS] == 2


async def test_who_has_no_key_has_no_span_and_others_have_their_tenants(
    spans: Spans, tmp_path: Path
) -> None:
    path, (key,) = write_keys(tmp_path, "acme")
    async with run_traced(sections=sections(path)) as running:
        async with AsyncClient(running.target) as nobody:
            with pytest.raises(ServerError):
                await nobody.generate("x")
        async with AsyncClient(running.target, key=key) as client:
            await client.generate("x", max_tokens=1)
    assert spans.facts["jaxserve.tenant"] == "acme"


async def test_what_finds_no_room_is_counted_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector that takes nothing: requests are answered as ever."""
    is_open = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:  # noqa: ANN401
            asyncio.run_coroutine_threadsafe(is_open.wait(), loop).result()
            return super().export(spans)

    stuck = Stuck()
    monkeypatch.setattr(tracing_module, "_build_exporter", lambda section: stuck)
    section = SECTION.model_copy(update={"max_queue_spans": 3})
    async with run_traced(section=section) as running, connect(running) as client:
        metrics = running.engine.metrics
        for _ in range(20):
            assert (await client.generate("x", max_tokens=1)).text == "a"
        dropped = metrics.value("trace_spans_dropped_total", reason="queue_full")
        assert dropped >= 20 - 2 * 3  # a batch on its way, and the queue
        is_open.set()
    sent = metrics.value("trace_spans_exported_total")
    assert sent == len(stuck.get_finished_spans()) > 0
    assert sent + metrics.value("trace_spans_dropped_total") == 20


async def test_spans_arrive_at_a_real_collector() -> None:
    """OTLP over gRPC, with the library's own exporter."""
    arrived: list[trace_service_pb2.ExportTraceServiceRequest] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        @override
        async def Export(self, request: Any, context: Any) -> Any:
            arrived.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        Collector(), collector
    )
    port = collector.add_insecure_port("127.0.0.1:0")
    await collector.start()
    section = SECTION.model_copy(
        update={"endpoint": f"http://127.0.0.1:{port}", "service_name": "two"}
    )
    async with run_traced(section=section) as running, connect(running) as client:
        await client.generate("x", max_tokens=2, request_id="r-7")
    await collector.stop(0)
    ((resource_spans,),) = [request.resource_spans for request in arrived]
    assert [
        a.value.string_value for a in resource_spans.resource.attributes if a.key == "service.name"
    ] == ["two"]
    ((span,),) = [scope.spans for scope in resource_spans.scope_spans]
    assert span.name == "text_completion bytes"
    assert {a.key: a.value for a in span.attributes}["gen_ai.request.id"].string_value == "r-7"
    assert running.engine.metrics.value("trace_spans_exported_total") == 1


async def test_a_collector_that_is_not_there_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    section = SECTION.model_copy(update={"endpoint": "http://127.0.0.1:9", "export_timeout_s": 0.2})
    with caplog.at_level("INFO"):
        async with run_traced(section=section) as running, connect(running) as client:
            metrics = running.engine.metrics
            for count in (1, 2):
                await client.generate("x", max_tokens=1)
                await until(lambda: metrics.value("trace_spans_dropped_total") == count)  # noqa: B023
    assert metrics.value("trace_spans_dropped_total", reason="export_failed") == 2
    lines = [record.getMessage() for record in caplog.records if "span" in record.getMessage()]
    assert lines == ["spans CANNOT BE EXPORTED and are dropped"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_the_end_of_the_process_waits_for_the_last_spans_and_no_longer(
    spans: Spans,
) -> None:
    section = SECTION.model_copy(update={"export_interval_s": 60.0})
    async with run_traced(section=section) as running, connect(running) as client:
        await client.generate("x", max_tokens=1)
        assert not len(spans.all)  # it waits for more
    assert len(spans.all) == 1
    assert running.engine.state is EngineState.STOPPED


async def test_without_the_extra_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = build_engine()
    config = local(engine.config).model_copy(update={"tracing": SECTION})
    for module in (
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match=r"tracing\.endpoint .* install jaxserve\[otel\]"):
                Server(config, Metrics())


async def test_where_it_is_off_nothing_of_it_is_imported_or_asked() -> None:
    program = (
        "import sys, jaxserve.server.app as app\n"
        "from jaxserve.config import Config, ServerSection\n"
        "from jaxserve.metrics import Metrics\n"
        "server = app.Server(Config(server=ServerSection(http_port=0)), Metrics())\n"
        "assert server.door.tracing is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
    async with run_server() as running, connect(running) as client:
        await client.generate("x", max_tokens=1)
        assert [asked.on_end for asked in running.asked] == [None]
