"""Logs and spans of a process.

Logs are plain sentences on a terminal and JSON lines on a pipe. Only the shell and edges log; actors record events. Spans of traced
queries go to an OpenTelemetry collector, by OTLP over HTTP, with OpenTelemetry's own exporter and batches. That needs
`telemetry.otlp_endpoint` and the extra `otel`; nothing of it is imported otherwise.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bus.messages.public import QueryHead
from services.core.trace import Span, Trace

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _more(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, service, and whatever was passed as `extra`."""

    def __init__(self, service: str = "") -> None:
        super().__init__()
        self._always = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **_more(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Sentences(logging.Formatter):
    """A line for people: time, level, logger and message, then whatever was passed as `extra`, as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the base class's name)
        more = "".join(f" {key}={value}" for key, value in _more(record).items())
        return super().formatMessage(record) + more


def set_up(level: str = "INFO", service: str = "") -> None:
    """Send all logging to stderr, in the form that fits who reads it. service: what JSON lines name as theirs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Sentences() if sys.stderr.isatty() else JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def to_file(path: Path, service: str) -> logging.Handler:
    """Send all logging to this file, too, as JSON lines, until the handler is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonLines(service))
    logging.getLogger().addHandler(handler)
    return handler


def about(message: Any) -> dict[str, Any]:
    """Which queries a message or command is about, as `extra` of a log line: uid (hexadecimal) and the client's id, or `uids`.

    message: a query's head, a route, or what holds a route, routes, uids or queries with routes.
    """
    route = getattr(message, "route", message)
    queries = getattr(message, "queries", None)
    if queries:
        return {"uids": [query.route.uid.hex() for query in queries]}
    if uids := getattr(message, "uids", None):
        return {"uids": [uid.hex() for uid in uids]}
    found: dict[str, Any] = {}
    uid = getattr(route, "uid", None)
    if isinstance(uid, bytes):
        found["uid"] = uid.hex()
    label = getattr(route, "id", None)
    if isinstance(label, str) and (found or isinstance(route, QueryHead)):
        found["query"] = label
    return found


# ---- spans

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
        """Take a span; it is sent by a thread of OpenTelemetry's, and dropped when the collector does not answer for long."""
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
