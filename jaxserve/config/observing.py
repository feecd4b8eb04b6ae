"""`[metrics]`, `[measure]`, `[tracing]` and `[log]`: what is told of the work."""

from pathlib import Path
from typing import Literal, Self

import pydantic

from jaxserve.config.section import MIB, Section


class MetricsSection(Section):
    """Where and under which names the metrics are read (docs/metrics.md)."""

    port: int | None = pydantic.Field(
        None,
        ge=0,
        le=65535,
        description="HTTP port of the metrics; 0 picks a free one. Unset: none.",
    )
    host: str = pydantic.Field("127.0.0.1", min_length=1, description="Address to bind.")
    prefix: Literal["jaxserve", "vllm"] = pydantic.Field(
        "jaxserve",
        description="vllm: what vLLM has too goes by its names, for tools that read those.",
    )


class MeasureSection(Section):
    """What the engine times of itself (docs/metrics.md) and records (docs/measuring.md)."""

    phases: bool = pydantic.Field(
        True, description="Time each step's phases on the host and the device."
    )
    trace_steps: int = pydantic.Field(
        0,
        ge=0,
        le=100_000,
        description="Last steps and requests that are kept for a trace; 0 is off. Needs phases.",
    )

    record_path: Path | None = pydantic.Field(
        None,
        description="File that serve records its requests in, as a workload. Unset: none.",
    )
    record_content: bool = pydantic.Field(
        False, description="Record the prompts' token ids too, not only what they share."
    )
    record_max_entries: int = pydantic.Field(
        100_000, ge=1, le=10_000_000, description="Requests of a recording; the rest is counted."
    )
    record_max_bytes: int = pydantic.Field(
        256 * MIB, ge=1, description="Bytes of a recording; what does not fit is counted."
    )

    @pydantic.model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.trace_steps and not self.phases:
            raise ValueError("trace_steps needs phases = true; or set trace_steps = 0")
        return self


class TracingSection(Section):
    """Spans of requests, sent to an OpenTelemetry collector (docs/operations.md). Extra: otel."""

    endpoint: str | None = pydantic.Field(
        None,
        description="Collector that takes OTLP over gRPC, such as http://localhost:4317; https has "
        "TLS. Unset: nothing is traced.",
    )
    sample_ratio: float = pydantic.Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests that come without a traceparent; others say themselves.",
    )
    service_name: str = pydantic.Field(
        "jaxserve", min_length=1, description="What this server is called in traces."
    )
    max_queue_spans: int = pydantic.Field(
        4096, ge=1, description="Spans that wait to be sent; what finds no room is counted."
    )
    export_interval_s: float = pydantic.Field(
        1.0, gt=0, le=60, description="Between sendings, while there are few spans."
    )
    export_timeout_s: float = pydantic.Field(
        10.0, gt=0, le=600, description="For one sending, repetitions and all."
    )

    @pydantic.field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        scheme, separator, rest = endpoint.partition("://")
        host, _, port = rest.rstrip("/").rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if scheme not in ("http", "https") or not separator or not is_port or not host:
            raise ValueError("it must be http://HOST:PORT or https://HOST:PORT of a collector")
        if "/" in host or "@" in host:
            raise ValueError("it is a host and a port alone, without a path or a user")
        return endpoint


class LogSection(Section):
    """The log on stderr; its level is a flag of each command."""

    format: Literal["text", "json"] = pydantic.Field(
        "text", description="text: a line of key=value; json: an object a line."
    )
    interval_s: float = pydantic.Field(
        10.0, ge=0, description="Between lines of throughput while requests run; 0 is off."
    )
