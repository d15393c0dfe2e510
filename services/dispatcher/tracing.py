"""A dispatcher's part in a query's trace: one span from its arrival to its end. Pure."""

from collections.abc import Mapping

from services.core.trace import Span, read, span_id
from services.dispatcher.query import Query

PART = "dispatch"


def begin(query: Query, headers: Mapping[str, str]) -> None:
    """A query came with headers: what its messages carry from now on."""
    query.trace = read(headers)
    if query.trace is not None:
        query.headers = query.trace.headers(span_id(query.uid, PART))


def span_of(query: Query, end: float, code: str = "") -> list[Span]:
    """What there is to tell of a query that has ended; nothing where nobody wants to know. code: of its refusal."""
    trace, sent = query.trace, query.sent
    if trace is None or not trace.recorded:
        return []
    attributes: dict[str, str | int] = {
        "infaas.app": query.app,
        "infaas.query.uid": query.uid.hex(),
        "infaas.query.items": query.items,
        "infaas.dispatches": query.attempt + 1,
    }
    if query.head.id is not None:
        attributes["infaas.query.id"] = query.head.id
    if sent is not None and sent.instance:
        attributes["infaas.instance"] = sent.instance
    return [
        Span(
            trace=trace,
            span=span_id(query.uid, PART),
            name="infaas query",
            kind="server",
            start=query.arrived,
            end=end,
            attributes=attributes,
            error=code,
        )
    ]
