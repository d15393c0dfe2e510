"""Questions about the system: which variant a query would get, and why. Pure."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.catalog import ModelSelection
from bus.messages.public import (
    Candidate,
    Error,
    Explanation,
    ListRequest,
    MemberShare,
    Refusal,
    Requirements,
)
from services.core.actor import NOTHING, Effect, Envelope, Publish
from services.core.catalog import Catalog
from services.core.ensemble.base import Learnt, Member
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, AppView, Ask
from services.core.selection.policy import Decision, SelectionPolicy
from services.core.validation import BadRequest, check_name, check_requirements
from services.dispatcher.apps import members_of
from services.dispatcher.contexts import Contexts
from services.dispatcher.lists import listing, state_of


def answer_question(
    envelope: Envelope,
    catalog: Catalog,
    view: ClusterView,
    policy: SelectionPolicy,
    slo_target: float,
    contexts: Contexts,
) -> Iterable[Effect]:
    """The reply to a ListRequest or to Requirements. Nothing if nobody waits for one, or another service replies.

    slo_target: of apps without a target of their own.
    """
    if not envelope.reply:
        return NOTHING
    about, asked, now = envelope.subject.rpartition(".")[2], envelope.message, envelope.now
    if isinstance(asked, ListRequest):
        if about == "jobs":
            return NOTHING  # their coordinator answers
        return (Publish(envelope.reply, listing(about, asked, now, catalog, view, slo_target)),)
    return (Publish(envelope.reply, explain(about, asked, now, catalog, view, policy, contexts)),)


# -- why this variant: the decision that a query would get now, with a reason for every candidate

HORIZON = 30.0  # s; the deadline of a query that states none


def explain(
    app_name: str,
    wish: Requirements,
    now: float,
    catalog: Catalog,
    view: ClusterView,
    policy: SelectionPolicy,
    contexts: Contexts,
) -> Explanation | Refusal:
    """The decision for one item with these requirements, and why each other variant is not chosen. Changes nothing."""
    try:
        check_name(app_name, "app")
        check_requirements(wish)
    except BadRequest as error:
        return Refusal(error=Error(code="bad_request", message=str(error)))
    app = view.apps.get(app_name)
    if app is None:
        return Refusal(error=Error(code="unknown_app", message=f"no app {app_name!r}: see infaas.list.apps"))
    latency_ms = wish.latency_ms if wish.latency_ms is not None else app.app.latency_ms
    latency_s = INFINITE if latency_ms is None else latency_ms / 1000.0
    deadline = min(now + min(latency_s, HORIZON), wish.deadline or INFINITE)
    cost = INFINITE if wish.cost is None else wish.cost
    ask = Ask(app_name, 1, deadline, latency_s, wish.accuracy or 0.0, cost, wish.model, wish.version, wish.variant)
    rules = app.app.selection
    if rules is not None and rules.policy is not None and wish.model is wish.version is wish.variant is None:
        return _explain_members(ask, wish.context, rules, now, catalog, view, policy, contexts)
    decision = _decide(ask, now, view, policy)
    winner = _winner(decision, view)
    candidates = [
        _candidate(
            i, app, ask, now, view, "" if group.record.variant == winner else _why_not(i, app, ask, now, view, decision)
        )
        for i, group in enumerate(app.groups)
    ]
    candidates.sort(key=lambda c: (c.variant != winner, c.cost_per_1000))
    chosen = next((c for c in candidates if c.variant == winner), None)
    if decision.refusal is not None:
        return Explanation(chosen=None, candidates=candidates, refusal=decision.refusal)
    return Explanation(chosen=chosen, candidates=candidates)


def _explain_members(
    ask: Ask,
    context: str | None,
    rules: ModelSelection,
    now: float,
    catalog: Catalog,
    view: ClusterView,
    policy: SelectionPolicy,
    contexts: Contexts,
) -> Explanation:
    """Where several models answer together: which are asked, and which variant answers for each."""
    app = view.apps[ask.app]
    members = members_of(catalog, ask.app)
    learnt, note = _learnt(ask.app, context, rules, members, contexts)
    rows: list[MemberShare] = []
    parts: dict[str, tuple[Ask, Decision]] = {}  # by model
    for member in members:
        floor = 0.0 if member.accuracy is None or member.accuracy < ask.accuracy else ask.accuracy
        part = replace(ask, model=member.model, version=member.version, accuracy=floor, cost=INFINITE)
        decision = _decide(part, now, view, policy)
        parts[member.model] = part, decision
        known = learnt.get(member.model)
        variant = _winner(decision, view)
        why = note if known is None else _why_asked(known, rules)
        if decision.refusal is not None:
            why += f"; it would be missing: {decision.refusal.message}"
        elif floor < ask.accuracy:
            why += f"; none of its variants has an accuracy of {ask.accuracy:g}"
        p, weight = (None, None) if known is None else (known.probability, known.weight)
        rows.append(MemberShare(member=member.name, probability=p, weight=weight, variant=variant, why=why))
    winners = {row.variant for row in rows if row.variant is not None}
    candidates = []
    for i, group in enumerate(app.groups):
        why_not = "not among the members that set-selection names"
        if group.record.model in parts:
            part, decision = parts[group.record.model]
            why_not = "" if group.record.variant in winners else _why_not(i, app, part, now, view, decision)
        candidates.append(_candidate(i, app, ask, now, view, why_not))
    rows.sort(key=lambda row: (-(row.probability or 0.0), -(row.weight or 0.0), row.member))
    first = next((row.variant for row in rows if row.variant is not None), None)
    candidates.sort(key=lambda c: (bool(c.why_not), c.variant != first, c.cost_per_1000))
    chosen = next((c for c in candidates if c.variant == first), None)
    refusals = [decision.refusal for _, decision in parts.values() if decision.refusal is not None]
    none = refusals[0] if refusals and chosen is None else UNSET
    return Explanation(chosen=chosen, candidates=candidates, refusal=none, members=rows)


def _learnt(
    app: str, context: str | None, rules: ModelSelection, members: Sequence[Member], contexts: Contexts
) -> tuple[dict[str, Learnt], str]:
    """What is known of each member, by model, and a note on those of which nothing is."""
    policy = contexts.policy(app, rules)
    if policy is None:
        return {}, f"{rules.policy} decides it for each query"
    held = contexts.held(app, rules, context)
    if held is None:
        return {}, "what was learnt is not in this dispatcher's memory; the next query reads it"
    return {row.member: row for row in policy.learnt(held.state, members)}, "not a member when this was learnt"


def _why_asked(known: Learnt, rules: ModelSelection) -> str:
    asked = "one member is asked, by chance" if rules.policy == "exp3" else "every member is asked"
    match rules.policy:
        case "majority":
            return f"{asked}; all votes are equal"
        case "weighted":
            return f"{asked}; its weight follows from its accuracy"
    return f"{asked}; its weight follows from {known.n} feedback{'' if known.n == 1 else 's'}"


def _decide(ask: Ask, now: float, view: ClusterView, policy: SelectionPolicy) -> Decision:
    """The decision that this query would get. It leaves no trace."""
    app = view.apps[ask.app]
    before = app.asked, app.full_since
    decision = policy.select(ask, now, view)
    app.asked, app.full_since = before
    return decision


def _winner(decision: Decision, view: ClusterView) -> str | None:
    if decision.assignments:
        return view.instances[decision.assignments[0]].record.variant
    if decision.load is not None and decision.wait:
        return decision.load.record.variant
    return None


def _candidate(i: int, app: AppView, ask: Ask, now: float, view: ClusterView, why_not: str) -> Candidate:
    group = app.groups[i]
    record = group.record
    instances = (*group.active, *group.loading, *group.troubled)
    seconds = group.table.at(ask.length).seconds(ask.items)
    load_ms = record.profile.load_ms
    worker = None
    if instances:
        best = min(instances, key=lambda instance: instance.predict(ask.items, ask.length, ask.deadline, now))
        seconds = best.predict(ask.items, ask.length, ask.deadline, now)
        worker = best.worker.name
        load_ms = max(0.0, best.ready_at - now) * 1000.0 if not group.active else 0.0
    return Candidate(
        model=record.model,
        version=record.version,
        variant=record.variant,
        hardware=record.hardware,
        worker=worker,
        state=state_of(group, app, view),
        accuracy=record.accuracy,
        latency_ms=seconds * 1000.0,
        load_ms=load_ms,
        cost_per_1000=float(app.cost[i]),
        simulated=record.simulated,
        why_not=why_not,
    )


def _why_not(i: int, app: AppView, ask: Ask, now: float, view: ClusterView, decision: Decision) -> str:
    group = app.groups[i]
    record = group.record
    if not app.pinned(ask)[i]:
        if not app.current[i]:
            return f"version {record.version} does not serve now: name it to use it"
        return "the query names another model, version or variant"
    if app.accuracy[i] < ask.accuracy:
        return f"accuracy {app.accuracy[i]:.4f} is below {ask.accuracy:g}"
    alone = float(app.latency(ask.items, ask.length)[i])
    if alone > ask.latency_s:
        return f"inference alone takes {alone * 1e3:.3g} ms, more than {ask.latency_s * 1e3:g} ms"
    if app.cost[i] > ask.cost:
        return f"costs US$ {app.cost[i]:.3g} per 1,000, more than {ask.cost:g}"
    slack = ask.deadline - now
    waits = [
        instance.predict(ask.items, ask.length, ask.deadline, now) for instance in (*group.active, *group.troubled)
    ]
    if waits and min(waits) > slack:
        return f"its queue would take {min(waits) * 1e3:.3g} ms, more than the {slack * 1e3:.3g} ms left"
    if group.active:
        if app.goal == "accuracy":
            return "meets everything, but a variant that comes first for accuracy does too"
        return "meets everything, but a cheaper variant does too"
    if group.troubled:
        return f"{group.troubled[0].state_for(app.app.app)}: avoided while others can serve"
    if state_of(group, app, view) == "Quarantined":
        worker, reason = next(iter(view.quarantines(record.variant).items()))
        return f"quarantined on {worker}: {reason}"
    if decision.assignments:
        return "not loaded, and an Active variant meets the requirements" if not group.loading else "still loading"
    ready = group.seconds_to_load + alone
    if ready > slack:
        return f"not loaded: ready in {ready * 1e3:.3g} ms, more than the {slack * 1e3:.3g} ms left"
    return "not loaded, and another variant would be ready sooner"
