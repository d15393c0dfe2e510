"""Questions about the system: lists, which variant a query would get, and why. Pure."""

from collections.abc import Iterable, Sequence
from operator import itemgetter

from msgspec import UNSET, Struct
from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import Ensemble, PipelineEdge, VariantRecord, error_of, in_metric, is_error, value_of
from bus.messages.public import (
    Candidate,
    Error,
    Explanation,
    Listing,
    ListRequest,
    MemberShare,
    Refusal,
    Requirements,
    StageShare,
)
from services.core.actor import NOTHING, Effect, Envelope, Publish
from services.core.ensemble.base import Learnt, Member
from services.core.pipelines.items import most_of
from services.core.placement import arithmetic_words, quarantined_words
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, AppView, Ask
from services.core.selection.policy import Decision, SelectionPolicy
from services.core.selection.refusals import misstated, not_loaded
from services.core.validation import wrong_requirement
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.budgets import dearest, fitting, share, told_of
from services.dispatcher.central import CentralQueues
from services.dispatcher.composites import Composites
from services.dispatcher.contexts import Contexts, Held
from services.dispatcher.joint_answers import claim_of, found_of, records_of, refuses, told_by, too_wrong
from services.dispatcher.lists import Lists, state_of
from services.dispatcher.needs import needs_of, needs_of_member, needs_of_stage, with_arm
from services.dispatcher.pipeline_run import SeenItems
from services.dispatcher.pipelines import unserved
from services.dispatcher.stages import NESTED, ServedPipeline, Stage
from services.dispatcher.stages import unserved as unserved_app


class Questions(Struct, eq=False):
    """Replies to a ListRequest or to Requirements, and changes nothing.

    slo_target: of apps without a target of their own. default_deadline_s: of a query that states none.
    """

    apps: Apps
    view: ClusterView
    policy: SelectionPolicy
    composites: Composites
    central: CentralQueues
    slo_target: float
    default_deadline_s: float

    def answer(self, envelope: Envelope) -> Iterable[Effect]:
        """Nothing if nobody waits for a reply, or another service replies."""
        if not envelope.reply:
            return NOTHING
        about, asked, now = envelope.subject.rpartition(".")[2], envelope.message, envelope.now
        if not isinstance(asked, ListRequest):
            return (Publish(envelope.reply, self.explain(about, asked, now)),)
        if about == "jobs":
            return NOTHING  # their coordinator answers
        apps = self.apps
        known = (apps.catalog, self.view, self.slo_target, apps.kept, self.central.hops)
        items = self.composites.pipelines.items.of
        book, contexts = self.composites.releases.book, self.composites.contexts

        def found(held: Held | None) -> Listing | Refusal:
            def shown(app: AppView) -> tuple[VariantRecord, ...]:
                return (
                    app.records if held is None else app.seen(contexts.in_context(Ask(app.app.app, 1, now), held, app))
                )

            return Lists(asked, now, *known, lambda app: unserved_app(app, apps), items, book, shown).of(about)

        if about == "variants" and asked.context is not None:
            return self.composites.ask(envelope, found)
        return (Publish(envelope.reply, found(None)),)

    # -- why this variant: the decision that a query would get now, with a reason for every candidate

    def explain(self, app_name: str, wish: Requirements, now: float) -> Explanation | Refusal:
        """The decision for one item with these requirements, and why each other variant is not chosen."""
        wrong = wrong_requirement(wish)
        if wrong is not None:
            return Refusal(error=Error(code="bad_request", message=str(wrong)))
        found = self.apps.of(app_name, wish.model)
        if found is None:
            return Refusal(error=self.apps.unknown(app_name, wish.model))
        key, app = found
        if (error := misstated(wish, app_name, app.measured_by(wish))) is not None:
            return Refusal(error=error)
        ask = needs_of(wish, key, 1, None, app.app.latency_ms, now, self.default_deadline_s)
        return self._explain(ask if wish.context is None else with_arm(ask, app, b""), now)

    def _explain(self, ask: Ask, now: float, depth: int = 0) -> Explanation:
        """depth: pipelines that this app is a vertex within."""
        pipeline = self.composites.pipelines.served(ask.app)
        if pipeline is not None:
            if (error := pipeline.misstated(ask)) is not None:
                return Explanation(chosen=None, candidates=[], refusal=error)
            return self._explain_stages(ask, pipeline, now, depth)
        view, rules = self.view, self.view.apps[ask.app].app.selection
        contexts = self.composites.contexts
        if rules is not None and rules.contextual and (held := contexts.held(ask.app, rules, ask.context)) is not None:
            ask = contexts.in_context(ask, held, view.apps[ask.app])
        if rules is not None and rules.policy is not None and ask.model is ask.version is ask.variant is None:
            return self._explain_members(ask, rules, now)
        decision = self._decide(ask, now)
        winner = _winner(decision, view)
        candidates = self._candidates(ask, decision, winner, now)
        candidates.sort(key=lambda c: (c.variant != winner, c.cost_per_1000))
        chosen = next((c for c in candidates if c.variant == winner), None)
        if decision.refusal is not None:
            return Explanation(chosen=None, candidates=candidates, refusal=decision.refusal)
        return Explanation(chosen=chosen, candidates=candidates)

    def _decide(self, ask: Ask, now: float) -> Decision:
        """The decision that this query would get. Where it would wait and no worker is to load anything for it, that is its refusal."""
        decision = self.policy.select(ask, now, self.view)
        return Decision(refusal=not_loaded(ask, self.view, now)) if decision == Decision() else decision

    def _candidates(self, ask: Ask, decision: Decision, winner: str | None, now: float) -> list[Candidate]:
        view, app = self.view, self.view.apps[ask.app]
        found = []
        for i, group in enumerate(app.groups):
            why_not = "" if group.record.variant == winner else _why_not(i, app, ask, now, view, decision)
            found.append(_candidate(i, app, ask, now, view, why_not))
        return found

    # -- several models that answer together

    def _explain_members(self, ask: Ask, rules: Ensemble, now: float) -> Explanation:
        """Which members are asked, and which variant answers for each."""
        view, app = self.view, self.view.apps[ask.app]
        members = members_of(self.apps.catalog, ask.app)
        learnt, note = _learnt(ask.app, ask.context, rules, members, self.composites.contexts)
        rows: list[MemberShare] = []
        parts: dict[str, tuple[Ask, Decision]] = {}  # by model
        costs: dict[str, float] = {}
        if ask.cost < INFINITE and not _one_is_asked(rules):
            weights = {model: row.weight for model, row in learnt.items()}
            costs = fitting(ask.cost, self.composites.budgets.of_members(ask, members), weights)
        left_out = "it would be left out: with the others it costs more than the query's limit"
        for member in members:
            if costs and member.model not in costs:
                rows.append(MemberShare(member=member.name, probability=0.0, weight=None, variant=None, why=left_out))
                continue
            part = needs_of_member(ask, member, costs.get(member.model, ask.cost))
            decision = self._decide(part, now)
            parts[member.model] = part, decision
            known = learnt.get(member.model)
            variant = _winner(decision, view)
            why = note if known is None else _why_asked(known, rules)
            if decision.refusal is not None:
                why += f"; it would be missing: {decision.refusal.message}"
            elif part.accuracy < ask.accuracy:
                why += f"; none of its variants has an accuracy of {ask.accuracy:g}"
            p, weight = (None, None) if known is None else (known.probability, known.weight)
            name = f"{member.model}@{part.version}"  # in a release, either version
            rows.append(MemberShare(member=name, probability=p, weight=weight, variant=variant, why=why))
        winners = {row.variant for row in rows if row.variant is not None}
        candidates = []
        for i, group in enumerate(app.groups):
            why_not = "not among the members that set-selection names"
            if costs and group.record.model not in costs:
                why_not = left_out
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
        asked = [row.variant for row in rows if row.variant is not None][: 1 if _one_is_asked(rules) else None]
        if asked:
            held = self.composites.contexts.held(ask.app, rules, ask.context)
            records = records_of(app, ask, asked)
            claim = claim_of(records)
            live = found_of(claim, records, held, self.apps.catalog.quality(ask.app))
            each = [one.production or (one.accuracy, "registered") for one in records]
            accuracy, source = told_by(each, claim, live)
            if live is not None:
                text = f"; their answers reach {live.accuracy:.4g} by {live.labels} labels"
                rows = [replace(row, why=row.why + text) if row.variant is not None else row for row in rows]
            if refuses(ask, app, accuracy, source):
                chosen, none = None, too_wrong(ask, app, records, accuracy or 0.0)
        return Explanation(chosen=chosen, candidates=candidates, refusal=none, members=rows)

    # -- pipelines

    def _explain_stages(self, ask: Ask, pipeline: ServedPipeline, now: float, depth: int) -> Explanation:
        """What would answer for each vertex if it were asked now. Stages of an inner pipeline are named `vertex/stage`."""
        least = self.composites.budgets.of_stages(ask, pipeline) if ask.cost < INFINITE else None
        error = unserved(ask, pipeline, least, self.view)
        if error is not None:
            return Explanation(chosen=None, candidates=[], refusal=error, stages=[])
        rows: list[StageShare] = []
        candidates: list[Candidate] = []
        refusal = None
        kept = self.apps.kept.get(pipeline.app.app)
        missing = {} if kept is None else kept.missing  # why replicas are not there, by vertex
        for name in pipeline.graph.order:
            cost = INFINITE if least is None else share(ask.cost, least[name], dearest(least, pipeline, [name]))
            cost /= max(1.0, pipeline.stages[name].items)
            row, found = self._explain_stage(pipeline.stages[name], ask, cost, now, depth)
            into, seen = pipeline.graph.into[name], self.composites.pipelines.items.of(ask.app, name)
            when = [] if pipeline.graph.certain([name]) else [_when(edge) for edge in into]
            when = [_for_each(edge, seen) for edge in into if edge.items] + when
            lacking = [missing[name]] if name in missing else []
            rows.append(replace(row, when=when, why="; ".join([row.why, *lacking])))
            rows += [replace(one, vertex=f"{name}/{one.vertex}") for one in found.stages or ()]
            candidates += [replace(one, stage=f"{name}/{one.stage}" if one.stage else name) for one in found.candidates]
            if found.refusal and pipeline.graph.needs(name) and refusal is None:
                refusal = told_of(found.refusal, name, ask, pipeline, self.view)
        candidates.sort(key=lambda one: bool(one.why_not))
        if refusal is not None:
            return Explanation(chosen=None, candidates=candidates, refusal=refusal, stages=rows)
        first = next((row for row in rows if row.variant is not None), None)
        chosen = None if first is None else next(one for one in candidates if one.stage == first.vertex)
        return Explanation(chosen=chosen, candidates=candidates, stages=rows)

    def _explain_stage(
        self, stage: Stage, ask: Ask, cost: float, now: float, depth: int
    ) -> tuple[StageShare, Explanation]:
        planned, vertex = stage.planned, stage.vertex
        asked = needs_of_stage(ask, stage, 1, None, cost, now)
        row = StageShare(
            vertex=vertex.name,
            app=vertex.app,
            accuracy=asked.accuracy or None,
            share_ms=None if asked.latency_s >= INFINITE else asked.latency_s * 1000.0,
            when=[],
            planned=planned is not None and self.central.serves(planned, asked),
            waiting=0 if planned is None else self.central.waiting(planned.variant),
            variant=None,
            why="",
        )
        if planned is not None and row.planned:
            serving = len(self.central.instances(planned.variant))
            why = (
                f"planned, and {serving} serve{'s' * (serving == 1)}: an idle one takes up to {planned.batch} that wait"
            )
            candidates = [
                replace(one, why_not=one.why_not and f"the plan names {planned.variant}")
                for one in self._candidates(asked, Decision(), planned.variant, now)
            ]
            chosen = next((one for one in candidates if not one.why_not), None)
            found = Explanation(chosen=chosen, candidates=candidates)
            return replace(row, variant=planned.variant, why=why), found
        if depth < NESTED:
            found = self._explain(asked, now, depth + 1)
        else:
            found = Explanation(chosen=None, candidates=[], stages=[])
        note = ""
        if planned is not None:
            serves = self.central.instances(planned.variant)
            note = f"the plan's {planned.variant} {'does not meet its needs' if serves else 'serves nowhere yet'}; "
        if found.refusal:
            return replace(row, why=f"{note}it would be refused: {found.refusal.message}", refused=True), found
        if isinstance(found.stages, list):
            return replace(row, why="a pipeline, whose own stages answer"), found
        if isinstance(found.members, list):
            return replace(row, why=f"several models answer together: explain {vertex.app} shows them"), found
        if found.chosen is None:
            return replace(row, why=f"{note}no instance can serve it now: it would wait"), found
        return replace(row, variant=found.chosen.variant, why=note + _why_first(found.chosen, stage.app)), found


def _when(edge: PipelineEdge) -> str:
    """What must hold for this edge to be followed."""
    if edge.when is not None:
        left = edge.when.output if edge.when.reduce == "first" else f"{edge.when.reduce} of {edge.when.output}"
        return f"{edge.source}: {left} {edge.when.op} {edge.when.value}"
    if edge.probability is not None and edge.probability < 1.0:
        return f"{edge.source}: {100.0 * edge.probability:g} % of its queries, by a hash"
    return f"{edge.source} is visited"


def _for_each(edge: PipelineEdge, seen: SeenItems | None) -> str:
    """For what the target of an edge with items is asked."""
    over = "further ones are cut" if edge.items_cut else "an answer with more is refused"
    text = f"{edge.source}: for each item of {edge.items}, at most {most_of(edge)}: {over}"
    if seen is None:
        return text
    return f"{text}; {seen.mean:.3g} in the mean of {seen.answers} answers, dispersion {seen.dispersion:.3g}"


def _why_first(chosen: Candidate, app: AppView) -> str:
    match chosen.state:
        case "Active":
            return f"it comes first by {app.goal} of the loaded ones that meet its needs"
        case "Overloaded" | "Interfered":
            return f"{chosen.state}, but in time; no Active one is"
        case "Loading":
            return "it is being loaded, and in time"
        case "Warm":
            return "it would come from host memory, being ready soonest"
    return "it would be loaded, being ready soonest"


def _learnt(
    app: str, context: str | None, rules: Ensemble, members: Sequence[Member], contexts: Contexts
) -> tuple[dict[str, Learnt], str]:
    """What is known of each member, by model, and a note on those of which nothing is."""
    policy = contexts.policy(app, rules)
    if policy is None:
        return {}, f"{rules.policy} decides it for each query"
    held = contexts.held(app, rules, context)
    if held is None:
        return {}, "what was learnt is not in this dispatcher's memory; the next query reads it"
    return {row.member: row for row in policy.learnt(held.state, members)}, "not a member when this was learnt"


def _one_is_asked(rules: Ensemble) -> bool:
    return rules.policy == "exp3"


def _why_asked(known: Learnt, rules: Ensemble) -> str:
    asked = "one member is asked, by chance" if _one_is_asked(rules) else "every member is asked"
    match rules.policy:
        case "majority":
            return f"{asked}; all votes are equal"
        case "weighted":
            return f"{asked}; its weight follows from its accuracy"
    return f"{asked}; its weight follows from {known.n} feedback{'' if known.n == 1 else 's'}"


def _winner(decision: Decision, view: ClusterView) -> str | None:
    if decision.instance is not None:
        return view.instances[decision.instance].record.variant
    return None if decision.load is None or decision.refusal is not None else decision.load.record.variant


def _candidate(i: int, app: AppView, ask: Ask, now: float, view: ClusterView, why_not: str) -> Candidate:
    group = app.groups[i]
    record = app.seen(ask)[i]
    instances = (*group.active, *group.loading, *group.troubled)
    seconds = group.table.at(ask.length).seconds(ask.items)
    load_ms = record.profile.load_ms
    worker = None
    if group.warm:
        load_ms, worker = record.profile.transfer_ms or 0.0, view.warmest(group.warm)
    if instances:
        best = min(instances, key=lambda instance: instance.predict(ask.items, ask.length, ask.deadline, now))
        seconds = best.predict(ask.items, ask.length, ask.deadline, now)
        worker = best.worker.name
        load_ms = max(0.0, best.ready_at - now) * 1000.0 if not group.active else 0.0
    accuracy, source = record.production or (record.accuracy, "registered")
    low, high, samples = _interval(record)
    return filled(
        Candidate,
        record,
        worker=worker,
        state=state_of(group, app, view),
        accuracy=accuracy,
        accuracy_source=source,
        accuracy_low=low,
        accuracy_high=high,
        samples=samples,
        error=error_of(accuracy, record.metric),
        unit=record.signature.target[1],
        latency_ms=(seconds + app.way) * 1000.0,
        load_ms=load_ms,
        cost_per_1000=float(app.cost[i]),
        cost=float(app.charge(ask.items, ask.length)[i]),
        why_not=why_not,
        fits=bool(group.active and app.accuracies(ask)[i] >= ask.accuracy) and not _unmet(i, app, ask, now),
        functions="" if record.functions is None else record.functions.words,
        cascade="" if record.cascade is None else record.cascade.words,
    )


def _interval(record: VariantRecord) -> tuple[float | None, float | None, int]:
    """The 95 % interval of the accuracy that counts now, and of how many samples or labels it is."""
    if (live := record.truth) is not None:
        return live.low, live.high, live.labels
    return record.accuracy_low, record.accuracy_high, record.samples


def _unmet(i: int, app: AppView, ask: Ask, now: float) -> str:
    """Which need this variant does not meet, also while its instances are as full as they are. Empty: none."""
    group = app.groups[i]
    record = app.seen(ask)[i]
    if not app.pinned(ask)[i]:
        if not app.current[i]:
            new = app.app.releasing
            if new is not None and app.app.serves(record.model, record.version):
                copies = f", and copies of {new.mirror:g}" * new.mirrors
                return (
                    f"version {record.version} is in a release: a share of {new.share:g} of the queries gets it{copies}"
                )
            return f"version {record.version} does not serve now: name it to use it"
        return "the query names another model, version or variant"
    if ask.accuracy and not app.accurate(ask)[i]:
        low, high, samples = _interval(record)
        within = low is not None and high is not None and low <= app.accuracies(ask)[i] and ask.accuracy <= high
        unsure = f", but within its 95 % interval{f' of {samples:,}' * bool(samples)}" * within
        if record.metric in ("top1", "top5"):
            return f"accuracy {app.accuracies(ask)[i]:.4f} is below {ask.accuracy:g}{unsure}"
        than = "above" if is_error(record.metric) else "below"
        unit = record.signature.target[1] if is_error(record.metric) else ""
        most = f"{value_of(ask.accuracy, record.metric):.4g}{' ' * bool(unit)}{unit}"
        return f"{in_metric(record.accuracy, record.metric)} is {than} {most}{unsure}"
    if not app.accurate(ask)[i]:
        if record.differing:
            name, share = min(record.differing.items(), key=itemgetter(1))
            return f"its output {name!r} agrees with the model's in {share:.1%} of the answers: state an accuracy to use it"
        if record.metric not in ("top1", "top5"):
            own = in_metric(record.model_accuracy, record.metric)
            return (
                f"{in_metric(record.accuracy, record.metric)}, its model's own {own}: state a {record.metric} to use it"
            )
        return f"accuracy {app.accuracies(ask)[i]:.4f} is below its model's own, {record.model_accuracy or 0.0:.4f}: state an accuracy to use it"
    alone = float(app.latency(ask.items, ask.length)[i]) + app.way
    if alone > ask.latency_s:
        return f"inference and the way to it take {alone * 1e3:.3g} ms, more than {ask.latency_s * 1e3:g} ms"
    charged = float(app.charge(ask.items, ask.length)[i])
    if charged > ask.cost:
        return f"costs US$ {charged:.3g} per 1,000 queries, more than {ask.cost:.6g}"
    slack = ask.deadline - now
    waits = [
        instance.predict(ask.items, ask.length, ask.deadline, now) for instance in (*group.active, *group.troubled)
    ]
    if waits and min(waits) > slack:
        return f"its queue would take {min(waits) * 1e3:.3g} ms, more than the {slack * 1e3:.3g} ms left"
    return ""


def _why_not(i: int, app: AppView, ask: Ask, now: float, view: ClusterView, decision: Decision) -> str:
    group = app.groups[i]
    record = app.seen(ask)[i]
    unmet = _unmet(i, app, ask, now)
    if unmet:
        return unmet
    if group.active:
        winner = _winner(decision, view)
        if winner is None:
            text = "the query would wait for it" if decision.refusal is None else decision.refusal.message
            return f"meets everything, but {text}"
        if (place := app.index.get(winner)) is None or (app.goal == "cost" and app.cost[place] > app.cost[i]):
            return f"meets everything, but the query would go to {winner}"
        if app.goal == "accuracy":
            return "meets everything, but a variant that comes first for accuracy does too"
        return "meets everything, but a cheaper variant does too"
    if group.troubled:
        return f"{group.troubled[0].state_for(app.app.app)}: avoided while others can serve"
    if state_of(group, app, view) == "Quarantined":
        worker, reason = next(iter(view.quarantines(record.variant).items()))
        return quarantined_words(record.variant, f"on {worker}", reason)
    others = view.adding_otherwise(record)
    if others and not any(view.able(record)):
        return arithmetic_words(record, *next(iter(others.items())))
    if decision.instance is not None:
        return "not loaded, and an Active variant meets the requirements" if not group.loading else "still loading"
    slack = ask.deadline - now
    ready = group.seconds_to_load + float(app.latency(ask.items, ask.length)[i]) + app.way
    where = "only in host memory" if group.warm else "not loaded"
    if ready > slack:
        return f"{where}: ready in {ready * 1e3:.3g} ms, more than the {slack * 1e3:.3g} ms left"
    return f"{where}, and another variant would be ready sooner"
