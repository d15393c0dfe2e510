"""The caller's place in a trace (W3C `traceparent`), which travels with queries in their NATS headers."""

import re
import sys
from collections.abc import Mapping

from infaas.errors import BadInput

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def current() -> str | None:
    """The traceparent of OpenTelemetry's current span, where the program uses OpenTelemetry; it is not imported for this."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def headers(traceparent: str | None) -> Mapping[str, str] | None:
    """Headers with this traceparent, else with the current span's; None where there is neither. Raises BadInput."""
    if traceparent is None:
        traceparent = current()
        if traceparent is None:
            return None
    elif not _FORM.fullmatch(traceparent):
        raise BadInput(
            f"traceparent is {traceparent[:80]!r}; it is written 00-<32 hex digits>-<16 hex digits>-<2 hex digits>"
        )
    return {"traceparent": traceparent}
