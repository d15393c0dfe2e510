"""Spans of traced queries on their way to an OpenTelemetry collector, by OTLP over HTTP: OpenTelemetry's own exporter and batches.

Only where `telemetry.otlp_endpoint` is set and the extra `otel` is installed; nothing of it is imported otherwise.
"""

import logging
from typing import Any
from urllib.parse import urlsplit

from services.core.trace import Span, Trace

log = logging.getLogger(__name__)

PATH = "/v1/traces"
EVERY_MS = 1000.0  # a batch of spans leaves at least so often
PATIENCE = 2.0  # s for the collector to take one, at the end, too
NS = 1_000_000_000


class SpanExporter:
    """service: this process's name there. Raises ImportError where OpenTelemetry is not installed."""

    def __init__(self, endpoint: str, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        whole = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        self._resource = Resource.create({"service.name": f"infaas-{service}", "service.namespace": "infaas"})
        self._batches: Any = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=whole, timeout=PATIENCE), schedule_delay_millis=EVERY_MS
        )

    def __call__(self, span: Span) -> None:
        """Take a span; it is sent by a thread of OpenTelemetry's, and dropped when the collector is away for long."""
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

        self._batches.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(span.trace, span.span, remote=False),
                parent=_context(span.trace, span.trace.parent, remote=True),
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind[span.kind.upper()],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=int(span.start * NS),
                end_time=int(max(span.start, span.end) * NS),
            )
        )

    def close(self) -> None:
        """Send what is left; takes as long as the collector does, some seconds at most."""
        self._batches.shutdown()


def _context(trace: Trace, span: str, *, remote: bool) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState  # noqa: PLC0415

    state = TraceState.from_header([trace.state]) if trace.state else TraceState()
    return SpanContext(int(trace.trace, 16), int(span, 16), remote, TraceFlags(trace.flags), state)


def span_exporter(endpoint: str, service: str) -> SpanExporter | None:
    """Where spans go; None where none are wanted, or OpenTelemetry is missing, which the log says."""
    if not endpoint:
        return None
    try:
        return SpanExporter(endpoint, service)
    except ImportError as error:
        log.error("telemetry.otlp_endpoint is set, but no spans are sent: %s (pip install 'infaas[otel]')", error)
        return None
