"""The answer, or the refusal, that the members of an ensemble give together, and what labels say of it. Pure."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from bus.messages.catalog import SHARES, VariantRecord, named_metric
from bus.messages.public import Answer, Code, Error, Tensor
from bus.messages.quality import AppQuality, LiveAccuracy
from bus.tensors import from_array, to_array
from services.core.ensemble.base import Combined, Member
from services.core.ensemble.outputs import class_names
from services.core.selection.eligibility import INFINITE, AppView, Ask
from services.core.selection.refusals import offered, offered_s
from services.dispatcher.contexts import Held
from services.dispatcher.needs import missed_by
from services.dispatcher.predictions import Claim
from services.dispatcher.query import Join, PartReply, answer_of_none

# Of parts that all failed, the first of these is told: the sender's own fault first, then what time and load explain.
TELLING: tuple[Code, ...] = (
    "bad_request", "too_large", "unknown_model", "unsatisfiable", "model_error", "internal", "overloaded", "deadline",
)  # fmt: skip

EXACT = 12  # decimals of a mean: further ones are the rounding of binary fractions, by which 0.7 of each of three is below 0.7


def records_of(app: AppView, ask: Ask, variants: Sequence[str]) -> list[VariantRecord]:
    """As labels show them in the query's context. Those that are not there any more are left out."""
    seen = app.seen(ask)
    return [seen[app.index[name]] for name in variants if name in app.index]


def claim_of(records: Sequence[VariantRecord]) -> Claim | None:
    """What variants of several members claim to reach together. None: labels do not say it."""
    if not records or not {one.metric for one in records} <= SHARES:
        return None
    mean = round(sum(one.measured or 0.0 for one in records) / len(records), EXACT)
    by = ", ".join(sorted(one.twins for one in records))
    return Claim(mean, mean, f"={by}" if len(records) > 1 else by, records[0].metric, records[0].labels)


def found_of(
    claim: Claim | None, records: Sequence[VariantRecord], held: Held | None, quality: AppQuality | None
) -> LiveAccuracy | None:
    """What labels say of such an answer: those of its context, or the app's. None: nothing, or less than of its variants. quality: the app's."""
    if claim is None:
        return None
    found = None if quality is None else quality.variants.get(claim.by)
    own = None if held is None else held.of_answers(claim.by)
    if own is not None and own.wins(found, claim.product):
        found = own
    widths = [one.truth.high - one.truth.low for one in records if one.truth is not None]
    if found is not None and widths and found.high - found.low > max(widths) and not found.excludes(claim.product):
        return None
    return found


def told_by(
    each: Sequence[tuple[float | None, str]], claim: Claim | None, live: LiveAccuracy | None
) -> tuple[float | None, str]:
    """The accuracy that an answer says, and its source. each: those of its variants. live: what labels say of such answers."""
    known = [accuracy for accuracy, _ in each if accuracy is not None]
    mean = round(sum(known) / len(known), EXACT) if known else None
    source = next((source for _, source in each if source != "registered"), "registered")
    if claim is None or live is None:
        return mean, source
    if live.excludes(claim.product):
        return live.accuracy, live.source
    return (mean if source == "registered" else claim.product), "registered"


def refuses(ask: Ask, app: AppView, accuracy: float | None, source: str) -> bool:
    """Whether an app refuses what its members answer together, for what labels say of that or of them."""
    return app.app.quality_act == "refuse" and source != "registered" and (accuracy or 0.0) < ask.accuracy


def too_wrong(ask: Ask, app: AppView, records: Sequence[VariantRecord], accuracy: float) -> Error:
    """The refusal of what these variants answer together. accuracy: what such answers reach. Its field is UNSET: what was promised is no mistake of who asks
    for it.
    """
    text = f"the answers of app {ask.app!r} reach {accuracy:.4g} by their labels: ask for less accuracy"
    groups = [app.groups[app.index[one.variant]] for one in records]
    if not groups:
        return Error(code="unsatisfiable", message=text)
    least = max(offered_s(group, ask.items, ask.length) for group in groups)
    closest = offered(
        groups[0].record,
        accuracy,
        max(least, ask.latency_s if ask.latency_s < INFINITE else 0.0),
        sum(app.offered_charge(app.index[one.record.variant], ask.items, ask.length) for one in groups),
        model=ask.app,
        variant=", ".join(one.record.variant for one in groups),
    )
    return Error(code="unsatisfiable", message=text, closest=closest)


def answer_of(
    join: Join, combined: Combined | None, max_inline: int, now: float, claim: Claim | None = None, live: LiveAccuracy | None = None
) -> Answer | Error:  # fmt: skip
    """The answer to the client. combined: None for one part's own answer. max_inline: bytes that its outputs may have. claim, live: as in `told_by`."""
    query, ask = join.query, join.query.ask
    replies = [part.reply for part in join.parts if part.reply is not None]
    one = replies[0] if len(join.parts) == 1 else None
    cost, seconds = join.cost, now - query.arrived
    if combined is None:
        outputs: dict[str, Tensor] = replies[0].outputs
    else:
        outputs = {name: from_array(array) for name, array in combined.outputs.items()}
    accuracy, source = told_by([(one.accuracy, one.accuracy_source) for one in replies], claim, live)
    if sum(len(tensor.data) for tensor in outputs.values()) > max_inline:
        return Error(code="too_large", message="the members' outputs together are too large for a message")
    group = join.plan.group
    signature = group.app.app.signature
    target, unit = ("", "") if signature is None else signature.target
    missed = missed_by(ask, query.arrived, now, cost)
    if ask.accuracy and (accuracy is None or accuracy < ask.accuracy):
        missed.append("accuracy")
    judged: dict[str, Any] = {"confidence": UNSET if combined is None and ask.confidence is None else 1.0}
    if combined is not None:
        judged = _judged(join, replies, combined, missed)
    names = ("model", "version", "variant", "hardware", "worker", "batch")
    return answer_of_none(
        query,
        outputs,
        seconds,
        **({} if one is None else {name: getattr(one, name) for name in names}),
        accuracy=accuracy,
        accuracy_source=source,
        queue_ms=max(reply.queue_ms for reply in replies),
        compute_ms=max(reply.compute_ms for reply in replies),
        cached=all(reply.cached for reply in replies),
        simulated=any(reply.simulated for reply in replies),
        cost=cost,
        missed=missed,
        reason=UNSET if one is None else one.reason or UNSET,
        zeros=UNSET if one is None else one.zeros or UNSET,
        labels=(None if any(reply.zeros for reply in replies) else _labels(outputs, group.members)) or UNSET,
        target=target or UNSET,
        unit=unit or UNSET,
        metric=named_metric(group.app.metrics) or UNSET,
        **judged,
    )


def _labels(outputs: dict[str, Tensor], members: list[Member]) -> list[str] | None:
    """The names of the items' classes, where all members have the same ones."""
    first = members[0].labels if members else []
    if not first or any(one.labels != first for one in members):
        return None
    return class_names([to_array(tensor, name) for name, tensor in outputs.items()], first)


def shares_of(join: Join, combined: Combined) -> list[float]:
    """Of each item, the share of all asked members that agree with the answer. One that is missing does not agree."""
    return [int(count) / len(join.parts) for count in combined.agree]


def _judged(join: Join, replies: Sequence[PartReply], combined: Combined, missed: list[str]) -> dict[str, Any]:
    """What its members say of an answer, by the answer's field. missed: gets `confidence` where they agree less than is wanted."""
    query, shares = join.query, shares_of(join, combined)
    confidence = min(shares, default=0.0)
    rules, wanted = query.ensemble, query.ask.confidence or 0.0
    assert rules is not None
    if confidence < max(rules.confidence, wanted):
        missed.append("confidence")
    return {
        "confidence": confidence,
        "members": [f"{reply.model}@{reply.version}" for reply in replies],  # in a release, either version
        "missing": len(join.parts) - len(replies),
        "confidences": shares if len(shares) > 1 else UNSET,
    }


def refusal_of(join: Join) -> Error:
    """Why no member has answered: the refusal that says most."""
    errors = [part.error for part in join.parts if part.error is not None]
    if not join.parts:
        text = "the members had not been chosen when the time was up: allow more time or ask again"
        return Error(code="deadline", message=text, retry_after_ms=1000.0)
    if len(errors) < len(join.parts) or not errors:
        text = f"none of {len(join.parts)} models had answered when the time was up: allow more time or ask again"
        return Error(code="deadline", message=text, retry_after_ms=1000.0)
    return min(errors, key=lambda error: TELLING.index(error.code) if error.code in TELLING else 0)
