"""An executor's part in a query's trace: one span from taking it to answering it, within it the batch that computed it. Pure."""

from collections.abc import Mapping

from services.core.trace import Span, read, span_id
from services.executor.work import BatchResult, Work

PART, BATCH = "execute", "compute"


def answer_headers(work: Work) -> Mapping[str, str] | None:
    """What the answer carries."""
    trace = read(work.headers)
    return None if trace is None else trace.headers(span_id(work.route.uid, PART))


def spans_of(work: Work, where: Mapping[str, str], result: BatchResult, batch: int) -> list[Span]:
    """What there is to tell of a query that was computed in a batch of so many items. where: worker, device, variant."""
    trace = read(work.headers)
    if trace is None or not trace.recorded:
        return []
    uid = work.route.uid
    whole, inner = span_id(uid, PART), span_id(uid, BATCH)
    about = {f"infaas.{key}": value for key, value in where.items()}
    error = "model_error" if result.errors is not None else ""
    more = {"infaas.app": work.route.app, "infaas.query.uid": uid.hex(), "infaas.query.items": work.items}
    return [
        Span(
            trace=trace,
            span=whole,
            name="infaas execute",
            kind="consumer",
            start=work.taken,
            end=result.finished,
            attributes={**about, **more},
            error=error,
        ),
        Span(
            trace=type(trace)(trace.trace, whole, trace.flags, trace.state),
            span=inner,
            name="infaas compute",
            kind="internal",
            start=result.started,
            end=result.finished,
            attributes={**about, "infaas.batch.items": batch},
            error=error,
        ),
    ]
