"""A query's needs as selection reads them: the one place where an `Ask` is made, of a query, of its parts and of explain. Pure."""

from operator import attrgetter
from typing import Any

from msgspec import Raw, convert
from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import named_metric
from bus.messages.flow import Route
from bus.messages.public import QueryHead, Requirements
from services.core.ensemble.base import Member
from services.core.release import arm_of
from services.core.selection.eligibility import INFINITE, NO_WISH, AppView, Ask
from services.core.selection.instances import DEFAULT_PRIORITY
from services.core.validation import stated_in
from services.dispatcher.stages import Stage


def needs_of(
    wish: Requirements,
    app: str,
    items: int,
    length: int | None,
    objective_ms: float | None,
    now: float,
    default_s: float,
) -> Ask:
    """Of a message that was checked. app: its key in the view. objective_ms: the app's own. default_s: the limit of one with neither."""
    latency_ms = wish.latency_ms if wish.latency_ms is not None else objective_ms
    if latency_ms is None:
        latency_s, limit = INFINITE, INFINITE if wish.deadline is not None else now + default_s
    else:
        latency_s = latency_ms / 1000.0
        limit = now + latency_s
    deadline = limit if wish.deadline is None else min(limit, wish.deadline)
    return Ask(
        app,
        items,
        deadline,
        latency_s,
        wish.accuracy or 0.0,
        INFINITE if wish.cost is None else wish.cost,
        wish.model,
        wish.version,
        wish.variant,
        length,
        wish.priority or DEFAULT_PRIORITY,
        wish.context,
        wish.confidence,
        _kept(wish),
    )


def needs_again(route: Route, app: str, wish: Requirements) -> Ask:
    """Of a query that another dispatcher had, as it has put them into the route. wish: as its body states them."""
    return filled(
        Ask,
        route,
        app=app,
        latency_s=INFINITE if route.latency_ms is None else route.latency_ms / 1000.0,
        accuracy=route.accuracy or 0.0,
        cost=INFINITE if route.cost is None else route.cost,
        wish=_kept(wish),
    )


def _kept(wish: Requirements) -> Requirements:
    """The needs of a message, which selection keeps for longer than its inputs; none if no need is read there."""
    if _unrouted_of(wish) == _NONE:
        return NO_WISH
    return convert(wish, Requirements, from_attributes=True)


def needs_of_member(ask: Ask, member: Member | None, cost: float) -> Ask:
    """Of the part that one member of an ensemble answers; None: whichever variant meets the needs. cost: what is left for it.

    A member of which no variant is accurate enough is asked all the same: the answer says what it misses.
    """
    if member is None:
        return replace(ask, cost=cost)
    best = member.accuracy if ask.labels is None else ask.labels.best.get(member.model)
    reaches = best is not None and best >= ask.accuracy
    arm = ask.arm
    version = arm.version if arm is not None and arm.new and arm.model == member.model else member.version
    return replace(ask, model=member.model, version=version, accuracy=ask.accuracy if reaches else 0.0, cost=cost)


def needs_of_stage(ask: Ask, stage: Stage, items: int, length: int | None, cost: float, now: float) -> Ask:
    """Of the part that one vertex of a pipeline answers. Of both floors the stricter one counts; the query's is for those stages that are
    measured as it states it. cost: what is left for it.
    """
    stated, floor = stated_in(ask.wish.metric, stage.metrics), stage.vertex.accuracy or 0.0
    wish = ask.wish
    if stage.app.app.pipeline is not None and not stated:  # its stages read the floor, and not the query's accuracy
        wish = replace(wish, metric=named_metric(stage.metrics) or None)
    return replace(
        ask,
        app=stage.vertex.app,
        items=items,
        length=length,
        deadline=stage.deadline(ask.deadline, now),
        latency_s=INFINITE if ask.latency_s >= INFINITE else stage.share(ask.latency_s),
        accuracy=max(floor, ask.accuracy) if stated else floor,
        cost=cost,
        wish=wish,
    )


def with_arm(ask: Ask, view: AppView, uid: bytes) -> Ask:
    """A query's needs with the version that it gets, if a release of its app is under way and it names none itself."""
    release = view.app.releasing
    if release is None or ask.version is not None or ask.variant is not None:
        return ask if ask.arm is None else replace(ask, arm=None)
    return replace(ask, arm=arm_of(release, uid if ask.context is None else ask.context.encode()))


def head_of(ask: Ask, inputs: Raw) -> QueryHead:
    """A query with these needs, as a client would state them."""
    return filled(
        QueryHead,
        ask,
        inputs=inputs,
        latency_ms=None if ask.latency_s >= INFINITE else ask.latency_s * 1000.0,
        accuracy=ask.accuracy or None,
        cost=None if ask.cost >= INFINITE else ask.cost,
        **unrouted(ask),
    )


def unrouted(ask: Ask) -> dict[str, Any]:
    """The needs that selection reads as the query states them. No route has them: the body of a part states them again."""
    return {name: value for name in _UNROUTED if (value := getattr(ask.wish, name)) is not None}


_UNROUTED = tuple(name for name in Requirements.__struct_fields__ if name not in (*Ask.__struct_fields__, "latency_ms"))
_unrouted_of = attrgetter(*_UNROUTED)  # a quarter of what a loop takes
_NONE = _unrouted_of(NO_WISH)


def missed_by(ask: Ask, arrived: float, now: float, cost: float) -> list[str]:
    """Which of latency and cost an answer made of parts misses. cost: US$ of all of them. Times: Unix seconds."""
    missed = []
    if now > ask.deadline or now - arrived > ask.latency_s:
        missed.append("latency")
    if cost * 1000.0 > ask.cost:
        missed.append("cost")
    return missed
