"""OpenTelemetry: a span for each call that generates, sent to a collector. The extra `otel`."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import jaxserve
from jaxserve.config import TracingSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.tracing import conventions as names
from jaxserve.server.tracing.request_span import Ended, RequestSpan, Value
from jaxserve.server.tracing.span_queue import SpanQueue

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

Operation = Literal["chat", "text_completion", "score"]
TRACE_HEADERS: Final = ("traceparent", "tracestate")
POLL_S: Final = 0.01
LIBRARY_LOGGERS: Final = "opentelemetry"  # says each failure by itself; we say when it begins


class Tracing:
    """Makes spans, and owns what sends them; nothing of OpenTelemetry's is global.

    A caller's `traceparent` is followed, and so is its word whether the trace is sampled; where
    there is none, the ratio decides. What is not sampled costs that decision and no more.
    """

    def __init__(
        self,
        section: TracingSection,
        metrics: Metrics,
        *,
        exporter: "SpanExporter | None" = None,
    ) -> None:
        """Args:
          exporter: None sends to the section's endpoint.

        Raises:
          ConfigError: the extra is not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._exporter = exporter or _build_exporter(section)
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}); install "
                "jaxserve[otel], or leave the key out"
            ) from error
        ready: list[ReadableSpan] = []

        class Collect(SpanProcessor):
            """Gives the exporting thread what it has just ended, in the form that is exported."""

            def on_end(self, span: "ReadableSpan") -> None:
                ready.append(span)

        resource = Resource.create(
            {
                names.SERVICE_NAME: section.service_name,
                names.SERVICE_VERSION: jaxserve.__version__,
            }
        )
        sampler = ParentBased(TraceIdRatioBased(section.sample_ratio))
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Collect())
        self._tracer = provider.get_tracer("jaxserve", jaxserve.__version__)
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract
        self._ready = ready
        self._queue: SpanQueue[Ended] = SpanQueue(
            self._export,
            metrics=metrics,
            max_items=section.max_queue_spans,
            interval_s=section.export_interval_s,
        )
        logging.getLogger(LIBRARY_LOGGERS).setLevel(logging.CRITICAL)
        logger.info("tracing endpoint=%s sample_ratio=%g", section.endpoint, section.sample_ratio)

    def open(
        self,
        headers: Iterable[tuple[str, str | bytes]],
        *,
        operation: Operation,
        model: str,
        request_id: str,
    ) -> RequestSpan | None:
        """Returns the span of a call that begins now; None where it is not sampled.

        Args:
          headers: of the call, whose traceparent and tracestate count.
          model: empty where none is served yet.
        """
        attributes: dict[str, Value] = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_ID: request_id,
        }
        if model:
            attributes[names.REQUEST_MODEL] = model
        span = self._tracer.start_span(
            f"{operation} {model}".rstrip(),
            context=self._extract(_trace_headers(headers)),
            kind=self._kind,
            attributes=attributes,
            start_time=time.time_ns(),
        )
        if not span.is_recording():
            return None
        return RequestSpan(span, model=model, on_complete=self._queue.put)

    def end(self) -> None:
        """Opens no more room for spans; what there is is sent by the time."""
        self._queue.close()

    async def close(self, grace_s: float) -> None:
        """Sends what is left, within the grace, and lets the exporter go."""
        self._queue.close()
        deadline_s = time.monotonic() + grace_s
        while not self._queue.is_done and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        if num_lost := self._queue.give_up():
            logger.warning("the last spans are lost: the collector is too slow spans=%d", num_lost)
        self._exporter.shutdown()

    def _export(self, batch: Sequence[Ended]) -> bool:
        """Ends the spans and sends them; the exporting thread's alone."""
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import Status, StatusCode

        for ended in batch:
            ended.span.set_attributes(ended.attributes)
            if ended.is_fault:
                ended.span.set_status(Status(StatusCode.ERROR))
            ended.span.end(ended.end_ns)
        spans, self._ready[:] = tuple(self._ready), ()
        return self._exporter.export(spans) is SpanExportResult.SUCCESS


def _build_exporter(section: TracingSection) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    assert section.endpoint is not None, "without it nothing is traced"
    is_plain = section.endpoint.startswith("http://")
    return OTLPSpanExporter(
        endpoint=section.endpoint, insecure=is_plain, timeout=section.export_timeout_s
    )


def _trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Returns the headers of the trace; none where they are there more than once."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in TRACE_HEADERS and isinstance(value, str):
            if name in found:
                return {}
            found[name] = value
    return found
