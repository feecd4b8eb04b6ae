"""What a span costs a request: its door, the engine's thread, the exporting thread.

    .venv/bin/python bench/spans.py [NUM_SPANS]

A collector on loopback takes them in, as OTLP over gRPC, and does nothing with them.
"""

import argparse
import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, override

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from jaxserve.config import TracingSection
from jaxserve.metrics import Metrics
from jaxserve.request import FinishReason, Request, RequestEnd, SamplingParams
from jaxserve.server.tracing import RequestSpan, Tracing

HEADERS: Final = (
    ("user-agent", "bench"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes everything."""

    @override
    def Export(self, request: Any, context: Any) -> Any:
        return trace_service_pb2.ExportTraceServiceResponse()


def build_end() -> RequestEnd:
    request = Request(
        id="req-0123456789abcdef01234567",
        prompt=(1,) * 512,
        sampling=SamplingParams(temperature=0.7, top_p=0.9),
        seed=1,
        max_tokens=128,
        ends_by_context=False,
        stop_ids={},
        arrival_s=0.0,
    )
    return RequestEnd(
        request=request,
        outcome=FinishReason.EOS,
        reasons=(FinishReason.EOS,),
        completion_tokens=128,
        queue_s=0.001,
        time_to_first_token_s=0.1,
        prefill_s=0.099,
        decode_s=4.0,
        e2e_s=4.1,
        preemptions=0,
    )


def time_each(name: str, calls: Sequence[Callable[[], object]]) -> None:
    start_s = time.perf_counter()
    for call in calls:
        call()
    say(name, (time.perf_counter() - start_s) / len(calls))


def say(name: str, seconds: float) -> None:
    print(f"{name:<44} {1e6 * seconds:7.2f} us")


def measure(endpoint: str, num_spans: int) -> None:
    section = TracingSection(endpoint=endpoint, max_queue_spans=num_spans, export_interval_s=60)
    metrics, end = Metrics(), build_end()
    unsampled = Tracing(section.model_copy(update={"sample_ratio": 0.0}), metrics)
    time_each("door: open, not sampled", [functools.partial(open_one, unsampled, ())] * num_spans)
    asyncio.run(unsampled.close(1))
    tracing = Tracing(section, metrics)
    spans: list[RequestSpan] = []

    def open_sampled() -> None:
        span = open_one(tracing, HEADERS)
        assert span is not None
        spans.append(span)

    time_each("door: open, sampled", [open_sampled] * num_spans)
    for span in spans:
        span.accept()
    time_each("engine's thread: the end", [functools.partial(s.note_end, end) for s in spans])
    leaving = [functools.partial(span.leave, "OK", None) for span in spans]
    time_each("door: leave, and into the queue", leaving)
    start_s = time.perf_counter()
    asyncio.run(tracing.close(600))
    say("exporting thread: a span, to the collector", (time.perf_counter() - start_s) / num_spans)
    sent, lost = (metrics.value(f"trace_spans_{what}_total") for what in ("exported", "dropped"))
    print(f"{sent:.0f} spans arrived, {lost:.0f} were dropped")


def open_one(tracing: Tracing, headers: tuple[tuple[str, str], ...]) -> RequestSpan | None:
    return tracing.open(headers, operation="chat", model="m", request_id="req-1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_spans", nargs="?", type=int, default=10_000)
    num_spans = parser.parse_args().num_spans
    collector = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        Collector(), collector
    )
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    measure(f"http://127.0.0.1:{port}", num_spans)
    collector.stop(0)


if __name__ == "__main__":
    main()
