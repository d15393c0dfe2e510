"""Apps of which several models answer a query together: who is asked, and how their outputs become one answer (paper 002, section 5). Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.catalog import ModelSelection
from bus.messages.public import Answer, Code, Error, Tensor
from bus.tensors import BadTensor, from_array, to_array
from services.core.actor import NOTHING, Effect
from services.core.ensemble.base import Combined, EnsemblePolicy, Member, Outputs
from services.core.selection.eligibility import INFINITE, AppView
from services.core.settings import SelectionSettings
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.cache import CachedParts
from services.dispatcher.contexts import Contexts, context_key
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.join import Joins, chance
from services.dispatcher.predictions import Prediction, Predictions, digest_of
from services.dispatcher.query import Join, Part, PartReply, Query

# Of parts that all failed, the first of these is told: the sender's own fault first, then what time and load explain.
TELLING: tuple[Code, ...] = (
    "bad_request", "too_large", "unknown_model", "unsatisfiable", "model_error", "internal", "overloaded", "deadline",
)  # fmt: skip


class Group:
    """An app's members and its policy, for as long as the catalogue does not change. policy: None where one variant answers."""

    def __init__(self, app: AppView, members: list[Member], policy: EnsemblePolicy[Any] | None) -> None:
        self.app = app
        self.members = members
        self.policy = policy
        self.by_model = {member.model: member for member in members}


class Plan:
    """What an answer is made with. state: the policy's, as it was when the members were asked. p: each member's probability then."""

    __slots__ = ("group", "p", "state")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.state: Any = None
        self.p: dict[str, float] = {}


class Ensembles:
    """joins: shared with the dispatcher. decide: dispatches a part, or refuses it. most: queries open at a time; bytes: of an answer."""

    def __init__(
        self,
        name: str,
        joins: Joins,
        contexts: Contexts,
        predictions: Predictions,
        apps: Apps,
        settings: SelectionSettings,
        outcomes: OutcomeRecorder,
        cached: CachedParts,
        decide: Callable[[Query, float], Iterable[Effect]],
        most: int,
        most_bytes: int,
    ) -> None:
        self._name = name
        self._joins = joins
        self._contexts = contexts
        self._predictions = predictions
        self._apps = apps
        self._settings = settings
        self._outcomes = outcomes
        self._cached = cached
        self._decide = decide
        self._most = most
        self._most_bytes = most_bytes
        self._groups: dict[str, Group] = {}
        self._waiting: dict[str, list[Join]] = {}  # by the key of the context that is being read
        # By app and member. missing: answers without its output; late: outputs that came after their answer.
        self.asked: Counter[tuple[str, str]] = Counter()
        self.missing: Counter[tuple[str, str]] = Counter()
        self.late: Counter[tuple[str, str]] = Counter()

    # -- a query begins

    def start(self, query: Query, now: float) -> list[Effect]:
        """Ask the members. The query ends with their answers, or at its time."""
        rules = query.selection
        assert rules is not None, "its app has several models that answer together"
        group = self._group(query.ask.app, rules)
        if group is None or not group.members:
            text = "the app links none of its members: see infaas.list.apps, or use infaas.admin.link-model"
            return self._outcomes.refused(query, Error(code="unknown_model", message=text), now)
        if len(self._joins.open) >= self._most:
            text = "too many queries wait for a worker: ask again later"
            return self._outcomes.refused(query, Error(code="overloaded", message=text, retry_after_ms=1000.0), now)
        due, patient = self._due(query, rules)
        join = Join(query, due, patient=patient, dispatcher=self._name, policy=rules.policy or "")
        join.plan = Plan(group)
        if rules.cache_mb and query.head.inputs_ref is None:
            join.digest = digest_of(query.head.inputs)
        effects = list(self._joins.begin(join, now))
        if group.policy is None:
            effects.extend(self._ask(join, [None], now))
        else:
            effects.extend(self._select(join, now))
        return effects

    def _due(self, query: Query, rules: ModelSelection) -> tuple[float, bool]:
        """When the answer is made of what is there, and whether the first part is waited for if nothing is."""
        ask, arrived = query.ask, query.arrived
        share = arrived + rules.wait_share * (ask.deadline - arrived)
        if ask.latency_s < INFINITE:
            return share, False
        return min(arrived + self._settings.wait_s, share), True

    def _group(self, key: str, rules: ModelSelection) -> Group | None:
        app = self._apps.view.apps.get(key)
        known = self._groups.get(key)
        if app is None or (known is not None and known.app is app):
            return known if app is not None else None
        policy = None if rules.policy is None else self._contexts.policy(key, rules)
        group = self._groups[key] = Group(app, members_of(self._apps.catalog, key), policy)
        return group

    def _select(self, join: Join, now: float) -> Iterable[Effect]:
        """Choose who is asked, by what is known of the query's context. If that is not in memory, the query waits for it."""
        plan, query = join.plan, join.query
        app, rules, context = query.ask.app, query.selection, query.head.context
        assert rules is not None
        held = self._contexts.held(app, rules, context)
        if held is None:
            self._waiting.setdefault(context_key(app, rules, context), []).append(join)
            return self._contexts.read(app, rules, context)
        policy: EnsemblePolicy[Any] = plan.group.policy
        members = plan.group.members
        plan.state = held.state
        plan.p = {row.member: row.probability for row in policy.learnt(held.state, members)}
        return self._ask(join, policy.select(held.state, members, query.head, chance(query.uid)), now)

    def known(self, key: str, now: float) -> Iterable[Effect]:
        """A context is in memory now: ask the members of the queries that wait for it."""
        effects: list[Effect] = []
        for join in self._waiting.pop(key, ()):
            if not join.ended:
                effects.extend(self._select(join, now))
        return effects

    def _ask(self, join: Join, models: Sequence[str | None], now: float) -> list[Effect]:
        """Ask these members; None: whichever variant of the app meets the query's needs."""
        floor = join.query.ask.accuracy
        parts = []
        for model in models:
            if model is None:
                parts.append(self._joins.part(join, "", None, None, floor))
                continue
            member = join.plan.group.by_model[model]
            # A member of which no variant is good enough is asked all the same: the answer says what it misses.
            reaches = member.accuracy is not None and member.accuracy >= floor
            parts.append(self._joins.part(join, model, model, member.version, floor if reaches else 0.0))
        effects: list[Effect] = []
        for part in parts:
            effects.extend(self._take(part, now))
        return effects

    def _take(self, part: Query, now: float) -> Iterable[Effect]:
        """Ask a part. One whose answer is kept has it at once; one that equals a part under way gets that one's."""
        kept = self._cached.find(part)
        if kept is not None:
            return self.replied(part.uid, kept, now)
        return NOTHING if self._cached.waits(part, now) else self._decide(part, now)

    # -- its parts end

    def replied(self, uid: bytes, reply: PartReply, now: float) -> Iterable[Effect]:
        """An executor answered or refused a part."""
        part = self._joins.replied(uid, reply)
        ended = NOTHING if part is None else self._ended(part, now)
        return (*ended, *self._pass_on(uid, reply, now))

    def refused(self, part: Part, error: Error, now: float) -> Iterable[Effect]:
        """A part was refused here."""
        self._joins.refused(part, error)
        return (*self._ended(part, now), *self._pass_on(part.uid, None, now))

    def _pass_on(self, uid: bytes, reply: PartReply | None, now: float) -> list[Effect]:
        """Give a part's answer to those that waited for it. Those that it does not suit are asked themselves."""
        effects: list[Effect] = []
        for part, kept in self._cached.ended(uid, reply):
            if kept is not None:
                effects.extend(self.replied(part.uid, kept, now))
            elif part.part is not None and not part.part.join.ended:
                effects.extend(self._take(part, now))
        return effects

    def overdue(self, before: float, now: float) -> list[Effect]:
        """Parts that others wait for, whose deadline was before this time, are not heard of any more."""
        return [effect for uid in self._cached.equal.overdue(before) for effect in self._pass_on(uid, None, now)]

    def _ended(self, part: Part, now: float) -> Iterable[Effect]:
        join = part.join
        if join.ended:
            if part.reply is not None and join.plan.group.policy is not None:
                self.late[join.query.ask.app, part.stage] += 1
                with suppress(BadTensor):
                    self._predictions.late(join.query.uid, part.stage, outputs_of(part))
            return NOTHING
        if not join.under_way or (now >= join.due and join.answered):
            return self._end(join, now)
        return NOTHING

    def due(self, now: float) -> Iterable[Effect]:
        """Answer the queries whose time has come with what is there."""
        effects: list[Effect] = []
        for join in self._joins.due(now):
            if join.answered or not join.patient:
                effects.extend(self._end(join, now))
        effects.extend(self._joins.timer(now))
        return effects

    # -- the query ends

    def _end(self, join: Join, now: float) -> list[Effect]:
        effects = list(self._joins.end(join, now))
        answered, query = join.answered, join.query
        missing = len(join.parts) - len(answered)
        self._count(join)
        if not answered:
            effects.extend(self._outcomes.refused(query, _refusal(join), now, missing=missing))
            return effects
        plan: Plan = join.plan
        policy, combined = plan.group.policy, None
        try:
            if policy is not None:
                outputs = {part.stage: outputs_of(part) for part in answered}
                combined = policy.combine(plan.state, plan.group.members, outputs)
                self._predictions.add(_prediction(join, outputs, now))
        except (BadTensor, ValueError) as error:
            refusal = Error(code="model_error", message=f"the members' outputs do not fit together: {error}")
            effects.extend(self._outcomes.refused(query, refusal, now, cost=join.cost, missing=missing))
            return effects
        answer = self._answer(join, combined, now)
        if isinstance(answer, Error):
            effects.extend(self._outcomes.refused(query, answer, now, cost=join.cost, missing=missing))
            return effects
        rules = query.selection
        assert rules is not None
        if combined is not None and query.fallback is not None and answer.confidence < rules.confidence:  # type: ignore[operator]
            reason = f"confidence: {answer.confidence:.2g} < {rules.confidence:g}"
            unsure = self._outcomes.unsure(query, answer, reason, now)
            if unsure:
                effects.extend(unsure)
                return effects
        effects.extend(self._outcomes.joined(query, answer, now))
        return effects

    def _count(self, join: Join) -> None:
        app = join.query.ask.app
        if join.plan.group.policy is None:
            return  # it has no members
        for part in join.parts:
            self.asked[app, part.stage] += 1
            if part.reply is None:
                self.missing[app, part.stage] += 1

    def _answer(self, join: Join, combined: Combined | None, now: float) -> Answer | Error:
        """The answer to the client. combined: None for one part's own answer."""
        query, answered = join.query, join.answered
        ask, head = query.ask, query.head
        one = answered[0].reply if len(join.parts) == 1 else None
        replies = [part.reply for part in answered if part.reply is not None]
        cost, seconds = join.cost, now - query.arrived
        if combined is None:
            outputs: dict[str, Tensor] = replies[0].outputs
            accuracy = replies[0].accuracy
        else:
            outputs = {name: from_array(array) for name, array in combined.outputs.items()}
            known = [reply.accuracy for reply in replies if reply.accuracy is not None]
            accuracy = sum(known) / len(known) if known else None
        if sum(len(tensor.data) for tensor in outputs.values()) > self._most_bytes:
            return Error(code="too_large", message="the members' outputs together are too large for a message")
        missed = ["latency"] if ask.latency_s < INFINITE and seconds > ask.latency_s else []
        if head.accuracy and (accuracy is None or accuracy < head.accuracy):
            missed.append("accuracy")
        if head.cost is not None and cost / max(1, query.items) * 1000.0 > head.cost:
            missed.append("cost")
        answer = Answer(
            id=head.id,
            outputs=outputs,
            model=one.model if one is not None else "",
            version=one.version if one is not None else "",
            variant=one.variant if one is not None else "",
            hardware=one.hardware if one is not None else "",
            worker=one.worker if one is not None else "",
            accuracy=accuracy,
            latency_ms=seconds * 1000.0,
            queue_ms=max(reply.queue_ms for reply in replies),
            compute_ms=max(reply.compute_ms for reply in replies),
            batch=one.batch if one is not None else 0,
            cached=all(reply.cached for reply in replies),
            simulated=any(reply.simulated for reply in replies),
            cost=cost,
            missed=missed,
            reason=one.reason or UNSET if one is not None else UNSET,
            query=query.uid.hex(),
        )
        return answer if combined is None else _judged(answer, join, combined)


def outputs_of(part: Part) -> Outputs:
    """The arrays of an answered part, by output name. Raises BadTensor."""
    assert part.reply is not None
    return {name: to_array(tensor, f"outputs.{name}") for name, tensor in part.reply.outputs.items()}


def _prediction(join: Join, outputs: dict[str, Outputs], now: float) -> Prediction:
    query, plan = join.query, join.plan
    digest = digest_of(query.head.inputs) if query.head.inputs_ref is None else None
    head = query.head
    return Prediction(
        query.uid, query.ask.app, head.context, digest, now, plan.group.members, plan.p, outputs, query.items, head.id
    )


def _judged(answer: Answer, join: Join, combined: Combined) -> Answer:
    """The same answer with what its members say of it. A member that is missing does not agree."""
    asked, query = len(join.parts), join.query
    shares = (np.asarray(combined.agree) / asked).tolist()
    confidence = min(shares, default=0.0)
    rules, wanted = query.selection, query.head.confidence or 0.0
    assert rules is not None
    if confidence < max(rules.confidence, wanted):
        answer.missed.append("confidence")
    by_model = join.plan.group.by_model
    named = [by_model[part.stage].name for part in join.answered]
    return replace(
        answer,
        confidence=confidence,
        members=named,
        missing=asked - len(named),
        confidences=shares if len(shares) > 1 else UNSET,
    )


def _refusal(join: Join) -> Error:
    """Why no member has answered: the refusal that says most."""
    errors = [part.error for part in join.parts if part.error is not None]
    if len(errors) < len(join.parts) or not errors:
        text = f"none of {len(join.parts)} models had answered when the time was up: allow more time or ask again"
        return Error(code="deadline", message=text, retry_after_ms=1000.0)
    return min(errors, key=lambda error: TELLING.index(error.code) if error.code in TELLING else 0)
