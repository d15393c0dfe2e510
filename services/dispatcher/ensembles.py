"""Apps of which several models answer a query together: who is asked, and how their outputs become one answer (paper 002, section 5). Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw, convert
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import Ensemble, VariantRecord
from bus.messages.public import Error, QueryHead, Requirements
from bus.tensors import BadTensor, to_array
from services.core.actor import NOTHING, Do, Done, Effect, Failed, TimedOut
from services.core.ensemble.base import Combined, EnsemblePolicy, Learnt, Member, Outputs
from services.core.ensemble.outputs import said
from services.core.outcomes import GRACE
from services.core.selection.eligibility import INFINITE, AppView, Ask
from services.core.settings import DispatcherSettings, EnsembleSettings
from services.core.validation import WrongField, count_items
from services.dispatcher.answered import LABELLED, AnsweredQueries
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.budgets import Budgets, Least, fitting
from services.dispatcher.cache import CachedParts
from services.dispatcher.central import FULL
from services.dispatcher.commands import PolicyMethod, RunPolicy
from services.dispatcher.contexts import Contexts, Held, context_key
from services.dispatcher.default_output import default_due
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.join import Joins, answer_part, chance, refuse_part
from services.dispatcher.joint_answers import (
    answer_of,
    claim_of,
    found_of,
    records_of,
    refusal_of,
    refuses,
    shares_of,
    too_wrong,
)
from services.dispatcher.needs import head_of, needs_of, needs_of_member
from services.dispatcher.predictions import Claim, Prediction, Predictions, digest_of
from services.dispatcher.query import Join, PartReply, Query, QueryPart

NO_MEMBERS = "the app links none of its members: see infaas.list.apps, or use infaas.admin.link-model"
TOO_SLOW = Error(
    code="deadline",
    message="the selection policy had not combined its members' answers when the time was up: allow more time, or set another policy",
)
LOWEST = 9  # priority
MOST_CLAIMS = 1024  # sets of variants that have answered together, whose claim is kept


class Group:
    """An app's members and its policy, for as long as the catalogue does not change.

    policy: None where one variant answers, and of a user's own class, which runs in a process of its own.
    """

    def __init__(self, app: AppView, members: list[Member], policy: EnsemblePolicy[Any] | None) -> None:
        self.app = app
        self.members = members
        self.policy = policy
        self.by_model = {member.model: (place, member) for place, member in enumerate(members)}
        self._claims: dict[tuple[str, ...], tuple[list[VariantRecord], Claim | None]] = {}

    def claim(self, ask: Ask, variants: tuple[str, ...]) -> tuple[list[VariantRecord], Claim | None]:
        """What these variants, each of a member, reach together for such a query; found once, where labels of its context do not decide."""
        found = self._claims.get(variants) if ask.labels is None else None
        if found is None:
            records = records_of(self.app, ask, variants)
            found = records, claim_of(records) if len(records) == len(variants) else None
            if ask.labels is None and len(self._claims) < MOST_CLAIMS:
                self._claims[variants] = found
        return found


class EnsemblePlan:
    """What an answer is made with. held: of its context, as it was when the members were asked; state: the policy's. p, weights: each member's probability and weight then.

    evaluates: it is for a feedback, and nobody waits for an answer. members: those that may be asked. least: what each costs at least, if the query's
    cost is limited.
    """

    __slots__ = ("evaluates", "group", "held", "least", "members", "p", "state", "weights")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.held: Held | None = None
        self.state: Any = None
        self.p: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.evaluates = False
        self.members = group.members
        self.least: Least | None = None

    def learnt(self, rows: Iterable[Learnt]) -> None:
        """Keep what the policy knows of the members."""
        for row in rows:
            self.p[row.member], self.weights[row.member] = row.probability, row.weight


@dataclass(slots=True, eq=False)
class Ensembles:
    """decide: dispatches a part, or refuses it. evaluated: gets what came of `evaluate`."""

    name: str
    joins: Joins
    contexts: Contexts
    predictions: Predictions
    apps: Apps
    settings: EnsembleSettings
    dispatcher: DispatcherSettings
    outcomes: OutcomeRecorder
    cached: CachedParts
    budgets: Budgets
    answered: AnsweredQueries
    decide: Callable[[Query, float], Iterable[Effect]]
    evaluated: Callable[[bytes, Prediction | Error], Iterable[Effect]] = field(init=False)
    _groups: dict[str, Group] = field(default_factory=dict)
    _waiting: dict[str, list[Join]] = field(default_factory=dict)  # by the key of the context that is being read
    # By app and member. missing: answers without its output; late: outputs that came after their answer.
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    late: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def by_app(self) -> tuple[Any, ...]:
        return self._groups, self.asked, self.missing, self.late

    # -- a query begins

    def start(self, query: Query, now: float) -> list[Effect]:
        """Ask the members. The query ends with their answers, or at its time."""
        rules = query.ensemble
        assert rules is not None, "its app has several models that answer together"
        group = self._group(query.ask.app, rules)
        if group is None or not group.members:
            return self._refused(query, Error(code="unknown_model", message=NO_MEMBERS), now)
        if len(self.joins.open) >= self.dispatcher.max_queue:
            return self._refused(query, FULL, now)
        due, patient = self._due(query, rules)
        last = query.ask.deadline + GRACE if query.fallback is None else max(default_due(query), due + GRACE)
        join = Join(self, query, due, last, patient=patient, dispatcher=self.name, policy=rules.policy or "")
        join.plan = EnsemblePlan(group)
        if rules.cache_mb and query.head.inputs_ref is None and query.refs is None:
            join.digest = digest_of(query.head.inputs)
        effects = list(self.joins.begin(join, now))
        if rules.policy is None:
            effects.extend(self._ask(join, [None], now))
        else:
            effects.extend(self._select(join, now))
        return effects

    def alone(self, query: Query) -> Iterable[Effect]:
        """One variant answers it: labels of its context decide, as soon as they are in memory."""
        ask, view = query.ask, self.apps.view.apps.get(query.ask.app)
        rules = None if view is None else view.app.selection
        if view is None or rules is None or rules.policy is None or not rules.contextual:
            return NOTHING
        held = self.contexts.held(ask.app, rules, ask.context)
        if held is None:
            return self.contexts.read(ask.app, rules, ask.context)
        query.ask = self.contexts.in_context(ask, held, view)
        return NOTHING

    def evaluate(self, uid: bytes, app: str, context: str | None, inputs: bytes, now: float) -> Iterable[Effect]:
        """Ask all members about these inputs again, at the lowest priority, for a feedback whose prediction is not known any more."""
        view = self.apps.view.apps.get(app)
        rules = None if view is None else view.app.selection
        if view is None or rules is None or rules.policy is None:
            return self.evaluated(uid, Error(code="unknown_app", message=f"app {app} has no selection any more"))
        head = QueryHead(inputs=Raw(inputs), context=context, priority=LOWEST)
        try:
            items = count_items(head, view.app)
        except WrongField as error:
            return self.evaluated(uid, Error(code="bad_request", message=str(error)))
        ask = needs_of(head, app, items, None, None, now, self.dispatcher.default_deadline_s)
        query = Query(uid, app, head, ask, "", encode({"inputs": Raw(inputs)}), now)
        query.ensemble = rules
        group = self._group(app, rules)
        assert group is not None, "the app was found above"
        if not group.members:
            return self.evaluated(uid, Error(code="unknown_model", message=NO_MEMBERS))
        join = Join(
            self, query, ask.deadline, ask.deadline + GRACE, patient=False, dispatcher=self.name, policy=rules.policy
        )
        join.plan = EnsemblePlan(group)
        join.plan.evaluates = True
        return (*self.joins.begin(join, now), *self._select(join, now))

    def _due(self, query: Query, rules: Ensemble) -> tuple[float, bool]:
        """When the answer is made of what is there, and whether the first part is waited for if nothing is: it may still be in time."""
        ask, arrived = query.ask, query.arrived
        if (
            rules.policy is None
        ):  # as without a selection: a late answer is better than none, unless there is a default output
            return (ask.deadline, True) if query.fallback is None else (default_due(query), False)
        share = arrived + rules.wait_share * (ask.deadline - arrived)
        if ask.latency_s < INFINITE:
            return share, query.fallback is None
        return min(arrived + self.settings.wait_s, share), True

    def _group(self, key: str, rules: Ensemble) -> Group | None:
        app = self.apps.view.apps.get(key)
        known = self._groups.get(key)
        if app is None or (known is not None and known.app is app):
            return known if app is not None else None
        policy = None if rules.policy is None else self.contexts.policy(key, rules)
        group = self._groups[key] = Group(app, members_of(self.apps.catalog, key), policy)
        return group

    def _select(self, join: Join, now: float) -> Iterable[Effect]:
        """Choose who is asked, by what is known of the query's context. If that is not in memory, the query waits for it."""
        plan, query = join.plan, join.query
        app, rules, context = query.ask.app, query.ensemble, query.ask.context
        assert rules is not None
        held = self.contexts.held(app, rules, context)
        if held is None:
            self._waiting.setdefault(context_key(app, rules, context), []).append(join)
            return self.contexts.read(app, rules, context)
        group: Group = plan.group
        query.ask = self.contexts.in_context(query.ask, held, group.app)
        if query.ask.cost < INFINITE:
            plan.least = self._least(join)
            plan.members = [one for one in group.members if (plan.least[one.model] or 0.0) <= query.ask.cost]
            if not plan.members:
                return self._refuse(join, self.budgets.too_dear(query.ask, group.members, plan.least), now)
        plan.held, plan.state, members = held, held.state, plan.members
        if group.policy is None:
            return self._run(join, "learnt", plan.state, members)
        plan.learnt(group.policy.learnt(held.state, members))
        if plan.evaluates:
            return self._ask(join, [member.model for member in members], now)
        return self._ask(join, group.policy.select(held.state, members, query.head, chance(query.uid)), now)

    def _least(self, join: Join) -> dict[str, float | None]:
        """What each member costs at least; a kept answer costs nothing."""
        ask, members = join.query.ask, join.plan.group.members
        free = [one.model for one in members if self.cached.holds(join.digest, needs_of_member(ask, one, INFINITE))]
        return self.budgets.of_members(ask, members) | dict.fromkeys(free, 0.0)

    def _run(self, join: Join, method: PolicyMethod, *args: Any) -> Iterable[Effect]:
        """Call a user's policy, in its own process. `ran` goes on."""
        rules = join.query.ensemble
        assert rules is not None
        assert rules.policy is not None
        return (Do(("policy", join, method), RunPolicy(rules.policy, method, args)),)

    def ran(self, done: Done | Failed | TimedOut, now: float) -> Iterable[Effect]:
        """A user's policy has a result, or none."""
        _, join, method = done.id
        plan, query = join.plan, join.query
        if query.uid not in self.joins.open or (join.ended and method != "combine"):
            return NOTHING  # its time is up
        if not isinstance(done, Done):
            text = done.error if isinstance(done, Failed) else "the selection policy took too long"
            return self._refuse(join, Error(code="model_error", message=text), now)
        if method == "learnt":
            plan.learnt(done.result)
            if plan.evaluates:
                return self._ask(join, [member.model for member in plan.group.members], now)
            ask = convert(head_of(query.ask, Raw()), Requirements, from_attributes=True)
            return self._run(join, "select", plan.state, plan.members, ask, chance(query.uid))
        if method == "select":
            return self._ask(join, done.result, now)
        return self._finish(join, done.result, now)

    def known(self, key: str, now: float) -> Iterable[Effect]:
        """A context is in memory now: ask the members of the queries that wait for it."""
        effects: list[Effect] = []
        for join in self._waiting.pop(key, ()):
            if not join.ended:
                effects.extend(self._select(join, now))
        return effects

    def _ask(self, join: Join, models: Sequence[str | None], now: float) -> Iterable[Effect]:
        """Ask these members, or those of them that the query's cost allows together; None: whichever variant of the app meets its needs."""
        plan, limit = join.plan, join.query.ask.cost
        costs: dict[str, float] = {}
        if plan.least is not None:
            costs = fitting(limit, {model: plan.least[model] for model in models if model}, plan.weights)
            models = [model for model in models if model in costs]
            if not models:
                return self._refuse(join, self.budgets.too_dear(join.query.ask, plan.group.members, plan.least), now)
        head, parts = replace(join.query.head, id=None), []
        for model in models:
            place, member = (0, None) if model is None else plan.group.by_model[model]
            parts.append(self._part(join, head, place, member, costs.get(model or "", limit)))
        return [effect for part in parts for effect in self._take(part, now)]

    def _part(self, join: Join, head: QueryHead, place: int, member: Member | None, cost: float) -> Query:
        """The same query for one member; None: for whichever variant meets its needs. place: among all members, whoever is asked. cost: its share of what
        the query may cost.
        """
        query = join.query
        ask = needs_of_member(query.ask, member, cost)
        part = self.joins.part(join, place, ask.model or "", query.app, head, ask, query.body, query.arrived)
        part.refs = query.refs
        return part

    def _take(self, part: Query, now: float) -> Iterable[Effect]:
        """Ask a part. One whose answer is kept has it at once; one that equals a part under way gets that one's."""
        kept = self.cached.find(part)
        if kept is not None:
            return self.replied(part.uid, kept, now)
        return NOTHING if self.cached.waits(part, now) else self.decide(part, now)

    # -- its parts end

    def replied(self, uid: bytes, reply: PartReply, now: float) -> Iterable[Effect]:
        """An executor answered or refused a part."""
        if reply.outputs_ref is not None:
            text = "a part's outputs are too large for a message: ask its model by name, or make its outputs smaller"
            reply = PartReply(error=Error(code="too_large", message=text))
        part = self.joins.replied(uid, reply, now)
        ended = NOTHING if part is None else self._ended(part, now)
        return (*ended, *self._pass_on(uid, reply, now))

    def refused(self, part: QueryPart, error: Error, now: float) -> Iterable[Effect]:
        """A part was refused here."""
        self.joins.refused(part, error)
        return (*self._ended(part, now), *self._pass_on(part.uid, None, now))

    def _pass_on(self, uid: bytes, reply: PartReply | None, now: float) -> list[Effect]:
        """Give a part's answer to those that waited for it. Those that it does not suit are asked themselves."""
        effects: list[Effect] = []
        for part, kept in self.cached.ended(uid, reply):
            if kept is not None:
                effects.extend(self.replied(part.uid, kept, now))
            elif part.part is not None and not part.part.join.ended:
                effects.extend(self._take(part, now))
        return effects

    def overdue(self, before: float, now: float) -> list[Effect]:
        """Parts that others wait for, whose deadline was before this time, are not heard of any more."""
        return [effect for uid in self.cached.equal.overdue(before) for effect in self._pass_on(uid, None, now)]

    def _ended(self, part: QueryPart, now: float) -> Iterable[Effect]:
        join = part.join
        if join.ended:
            if part.reply is not None and part.stage:
                self.late[join.query.ask.app, part.stage] += 1
                with suppress(BadTensor):
                    self.predictions.late(join.query.uid, part.stage, outputs_of(part), part.reply.variant)
            part.reply = None  # a user's policy may combine the others at this moment: the answer names those
            return NOTHING
        if not join.under_way or (now >= join.due and join.answered):
            return self._end(join, now)
        return NOTHING

    def due(self, join: Join, now: float) -> Iterable[Effect]:
        """Answer a query whose time has come with what is there."""
        if join.ended:  # its policy has been asked to combine that
            return self._refuse(join, TOO_SLOW, now) if now >= join.last else NOTHING
        asked = bool(join.parts) or join.query.ask.latency_s >= INFINITE  # else no member can be in time any more
        return NOTHING if join.patient and asked and not join.answered and now < join.last else self._end(join, now)

    # -- the query ends

    def _end(self, join: Join, now: float) -> Iterable[Effect]:
        """Make one answer of what is there."""
        join.ended = True  # what comes from now on is late
        self._count(join)
        answered, plan = join.answered, join.plan
        if not answered:
            return self._refuse(join, refusal_of(join), now)
        rules = join.query.ensemble
        if rules is None or rules.policy is None:
            return self._finish(join, None, now)
        try:
            outputs = {part.stage: outputs_of(part) for part in answered}
            prediction = _prediction(join, outputs, now)
            if plan.evaluates:  # one feedback asked for it, and no other is about it
                return (*self.joins.end(join, now), *self.evaluated(join.query.uid, prediction))
            self.predictions.add(prediction)
            if plan.group.policy is None:
                return self._run(join, "combine", plan.state, plan.group.members, outputs)
            combined = plan.group.policy.combine(plan.state, plan.group.members, outputs)
        except (BadTensor, ValueError) as error:
            text = f"the members' outputs do not fit together: {error}"
            return self._refuse(join, Error(code="model_error", message=text), now)
        return self._finish(join, combined, now)

    def _refuse(self, join: Join, error: Error, now: float) -> Iterable[Effect]:
        if join.plan.evaluates:
            return (*self.joins.end(join, now), *self.evaluated(join.query.uid, error))
        missing = len(join.parts) - len(join.answered)
        return (*self.joins.end(join, now), *self._refused(join.query, error, now, cost=join.cost, missing=missing))

    def _refused(self, query: Query, error: Error, now: float, *, cost: float = 0.0, missing: int = 0) -> list[Effect]:
        refused = self.outcomes.refused(query, error, now, cost=cost, missing=missing)
        return [*refused, *refuse_part(query, error, now)]

    def _finish(self, join: Join, combined: Combined | None, now: float) -> Iterable[Effect]:
        """Send the answer. combined: None for one part's own answer."""
        query, app = join.query, join.plan.group.app
        variants = tuple([part.reply.variant for part in join.parts if part.reply is not None])
        items = (query.ask.items,)  # a user's policy may combine to what no item of a label is in
        whole = combined is not None and all(one.shape[:1] == items for one in combined.outputs.values())
        records, claim = join.plan.group.claim(query.ask, variants)
        claim = claim if whole else None
        live = found_of(claim, records, join.plan.held, self.apps.catalog.quality(query.ask.app))
        answer = answer_of(join, combined, self.dispatcher.max_inline, now, claim, live)
        if isinstance(answer, Error):
            return self._refuse(join, answer, now)
        if combined is not None:
            if claim is not None and (told := self.predictions.by_query(query.ask.app, query.uid)) is not None:
                told.answer, told.claim = combined.outputs, claim
            if refuses(query.ask, app, answer.accuracy, answer.accuracy_source):
                return self._refuse(join, too_wrong(query.ask, app, records, answer.accuracy or 0.0), now)
        rules, ended = query.ensemble, self.joins.end(join, now)
        record = None if combined is not None else self.apps.catalog.variant(answer.variant or "")
        if record is not None and not answer.zeros and query.ask.items <= LABELLED:
            with suppress(BadTensor):
                words = said({name: to_array(one, name) for name, one in answer.outputs.items()}, record.metric)
                if words is not None and len(words) == query.ask.items:
                    self.answered.add(query, words, record.variant)
        if combined is not None and rules is not None and query.fallback is not None:
            sure = min(shares_of(join, combined), default=0.0)
            if sure < rules.confidence:
                unsure = self.outcomes.unsure(query, answer, f"confidence: {sure:.2g} < {rules.confidence:g}", now)
                if unsure:
                    return (*ended, *unsure)
        return (*ended, *self.outcomes.joined(query, answer, now), *answer_part(query, answer, now))

    def _count(self, join: Join) -> None:
        app = join.query.ask.app
        for part in join.parts:
            if not part.stage:
                continue  # it is no member's
            self.asked[app, part.stage] += 1
            if part.reply is None:
                self.missing[app, part.stage] += 1


def outputs_of(part: QueryPart) -> Outputs:
    """The arrays of an answered part, by output name. Raises BadTensor."""
    assert part.reply is not None
    return {name: to_array(tensor, f"outputs.{name}") for name, tensor in part.reply.outputs.items()}


def _prediction(join: Join, outputs: dict[str, Outputs], now: float) -> Prediction:
    query, plan = join.query, join.plan
    here = query.head.inputs_ref is None and query.refs is None
    return Prediction(
        query.uid,
        query.ask.app,
        query.ask.context,
        digest_of(query.head.inputs) if here else None,
        now,
        plan.group.members,
        plan.p,
        outputs,
        query.ask.items,
        query.head.id,
        variants={part.stage: part.reply.variant for part in join.answered if part.reply is not None},
        floor=query.ask.accuracy or None,
        arm=query.ask.arm,
    )
