"""Spans of the calls that generate. Nothing of OpenTelemetry is imported before it is asked for."""

from jaxserve.server.tracing.request_span import RequestSpan
from jaxserve.server.tracing.tracing import TRACE_HEADERS, Operation, Tracing

__all__ = ["TRACE_HEADERS", "Operation", "RequestSpan", "Tracing"]
