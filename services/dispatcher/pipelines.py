"""Pipelines: apps whose queries visit other apps (InferLine, paper 004). Nothing returns to the client between two stages. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import UNSET, Raw, Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.codec import encode
from bus.messages.catalog import named_metric
from bus.messages.flow import TensorRef
from bus.messages.public import Code, Error, ObjectRef, QueryHead, Tensor
from bus.tensors import BadTensor, to_array
from services.core.actor import NOTHING, Do, Done, Effect, Failed, TimedOut
from services.core.cost import bucket_of
from services.core.outcomes import GRACE
from services.core.pipelines.branching import follows, small_outputs
from services.core.pipelines.graph import QUERY
from services.core.pipelines.items import TooManyItems
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask
from services.core.selection.refusals import EXPIRED
from services.core.settings import DispatcherSettings
from services.core.validation import WrongField, count_items, length_of
from services.dispatcher.answered import AnsweredQueries, prediction_of
from services.dispatcher.apps import Apps
from services.dispatcher.budgets import Budgets, Least, told_of, too_dear, too_fast, too_wrong
from services.dispatcher.central import FULL
from services.dispatcher.commands import FetchTensors, GatherOutputs
from services.dispatcher.default_output import default_due
from services.dispatcher.demand import ArrivalsCounter
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.join import Joins, answer_part, refuse_part
from services.dispatcher.needs import head_of, missed_by, needs_of_stage, unrouted, with_arm
from services.dispatcher.pipeline_run import (
    NO_OWN,
    Fetched,
    ItemCounts,
    PipelineRun,
    SeveralItems,
    away,
    confidences,
    given_by,
    items_of,
    measured,
    members_of,
    plain,
    stand_in,
    stored,
    together,
)
from services.dispatcher.predictions import Predictions
from services.dispatcher.query import Join, PartReply, Query, QueryPart, answer_of_none, ensemble_of, outermost
from services.dispatcher.stages import ServedPipeline, Stage

GATHER = 10.0  # s to put an answer's outputs together in the object store
SMALL_BODY = 65_536  # bytes of a query that go with each of its parts; of a larger one, only with the first parts
ONE_ITEM = Error(
    code="bad_request",
    message="inputs: a pipeline with conditions, or with items, takes one item at a time: send a query for each",
)


class Pipelines(Struct, eq=False):
    """Queries of pipelines. begin: asks a part, which may itself have parts. visits: by pipeline and vertex, since the start. items: that answers had."""

    name: str
    joins: Joins
    apps: Apps
    settings: DispatcherSettings
    outcomes: OutcomeRecorder
    arrivals: ArrivalsCounter
    policy: str
    budgets: Budgets
    predictions: Predictions
    begin: Callable[[Query, float], Iterable[Effect]]
    answered: AnsweredQueries
    _served: dict[str, ServedPipeline] = {}
    visits: Counter[tuple[str, str]] = field(default_factory=Counter)
    items: ItemCounts = field(default_factory=ItemCounts)

    def changed(self) -> None:
        """The catalogue has changed."""
        self._served.clear()

    def served(self, app: str) -> ServedPipeline | None:
        """A pipeline as it is served now; None: there is no such pipeline."""
        found = self._served.get(app)
        if found is None:
            view = self.apps.view.apps.get(app)
            if view is None or view.app.pipeline is None:
                return None
            found = self._served[app] = ServedPipeline(view.app, self.apps)
        return found

    # -- a query begins

    def start(self, query: Query, now: float) -> Iterable[Effect]:
        """Ask the stages that need nothing of others."""
        served = self.served(query.ask.app)
        if served is None:
            gone = Error(code="unknown_app", message=f"there is no pipeline {query.ask.app!r} any more")
            return self._refused(query, gone, now, 0.0)
        if (wrong := served.misstated(query.ask)) is not None:
            return self._refused(query, wrong, now, 0.0)
        least = self.budgets.of_stages(query.ask, served) if query.ask.cost < INFINITE else None
        error = _unfit(query, served, least, self.apps.view, len(self.joins.open) >= self.settings.max_queue)
        if error is not None:
            return self._refused(query, error, now, 0.0)
        plan = served.app.plan
        due = default_due(query)
        if query.fallback is None:  # an inner one may be of use until the time of the outer one is up
            due = GRACE + (query if query.part is None else outermost(query.part.join).query).ask.deadline
        policy = self.policy if plan is None else plan.policy
        join = Join(self, query, due, due, patient=False, dispatcher=self.name, policy=policy)
        if query.part is None and join.origin is not None:
            join.origin = replace(join.origin, body=bytes(query.body))
        join.plan = PipelineRun(served, given_by(query, served.app), by_ref=query.head.inputs_ref is not None)
        join.plan.least = least
        begun = self.joins.begin(join, now)
        counted = NOTHING if plan is None else self.arrivals.count(query.ask.app, query.arrived)
        return (*begun, *counted, *self._advance(join, now))

    def _advance(self, join: Join, now: float) -> list[Effect]:
        """Ask the stages of which it is known now that they are visited. End the query if nothing is left to do."""
        run: PipelineRun = join.plan
        graph, followed = run.served.graph, run.followed
        effects: list[Effect] = []
        for name in graph.order:
            into = graph.into[name]
            if name in run.visited or not (name in run.lost or run.known(name)):
                continue
            goes = not into or any(followed.get((edge.source, name)) for edge in into)
            goes = run.visited[name] = goes and name not in run.lost
            if not goes:
                followed.update({(name, edge.target): False for edge in graph.out[name]})
                continue
            effects.extend(self._ask(join, run.served.stages[name], now))
            if join.ended:
                return effects
        if graph.spared:
            run.lose_losers(join)
        if len(run.visited.keys() | run.lost.keys()) == len(graph.order) and not run.under_way and not run.finished:
            run.finished = True
            effects.extend(self._finish(join, now))
        return effects

    def _ask(self, join: Join, stage: Stage, now: float) -> Iterable[Effect]:
        """Ask a stage: once, or for each item of an answer."""
        run, name = join.plan, stage.vertex.name
        if stage.fan is None and not stage.rows:
            return self._ask_once(join, stage, now)
        run.parts[name] = QueryPart(join, b"", name, None)
        try:
            refs = away(run, stage)
        except BadTensor as error:
            return self._failed(join, name, run.lacking(stage, error), now)
        if refs:
            return (Do(("items", join, name), FetchTensors(tuple(refs)), GATHER),)
        return self._ask_each(join, stage, {}, now)

    def _ask_each(self, join: Join, stage: Stage, fetched: Fetched, now: float) -> Iterable[Effect]:
        run, name, query = join.plan, stage.vertex.name, join.query
        try:
            found = items_of(run, stage, query.uid, fetched, self.items)
        except SeveralItems:
            return self._refuse(join, ONE_ITEM, now)
        except BadTensor as error:
            code: Code = "too_large" if isinstance(error, TooManyItems) else "model_error"
            whose = name if stage.fan is None else stage.fan.source
            return self._failed(join, name, Error(code=code, message=f"vertex {whose}: {error}"), now)
        self._asked(run, name, len(found))
        run.left[name] = len(found)
        run.fans[name] = []
        if not found:
            return self._together(join, stage, {}, now)
        cost = run.cost_of(name, query.ask.cost, 1000.0 * join.cost, len(found)) / len(found)
        effects: list[Effect] = []
        for item, own in enumerate(found):
            effects.extend(self._ask_once(join, stage, now, own, item, cost))
            if join.ended or name in run.lost:
                break
        return effects

    def _asked(self, run: PipelineRun, name: str, items: int) -> None:
        run.asked[name] = items
        if run.served.app.plan is not None:
            self.arrivals.asked(run.served.app.app, name, items)

    def _ask_once(
        self,
        join: Join,
        stage: Stage,
        now: float,
        own: Mapping[str, Tensor] = NO_OWN,
        item: int | None = None,
        cost: float = 0.0,
    ) -> Iterable[Effect]:
        """own: inputs of this item alone. cost: what it may cost; of a stage that is asked once, its share."""
        query, run, vertex = join.query, join.plan, stage.vertex
        app, name = stage.app, stage.vertex.name
        try:
            here, refs = run.inputs(stage, own)
            # One tensor by itself may share a batch with those of clients.
            inputs = Raw(encode(next(iter(here.values())) if len(here) == 1 and not refs else here))
            head = QueryHead(inputs=inputs)
            items, length = query.ask.items, None
            if not refs:
                items = count_items(head, app.app)
                if app.open_axis is not None and app.lengths and (found := length_of(head, app.open_axis)) is not None:
                    length = bucket_of(found, app.lengths)
        except (WrongField, BadTensor) as error:
            return self._failed(join, name, run.lacking(stage, error), now)
        if item is None:
            run.asked[name] = items
            cost = run.cost_of(name, query.ask.cost, 1000.0 * join.cost, 1)
        ask = needs_of_stage(query.ask, stage, items, length, cost, now)
        timer: Iterable[Effect] = NOTHING
        if vertex.optional:
            at = min(ask.deadline, default_due(query))
            ask, run.until[name], join.due = replace(ask, deadline=at), at, min(join.due, at)
            timer = self.joins.watch(join, now)
        body = encode({"inputs": inputs, **unrouted(ask)})
        place = stage.position if item is None else stage.position + (item + 1) * len(run.served.stages)
        part = self.joins.part(join, place, name, vertex.app, head_of(ask, inputs), ask, body, now)
        assert part.part is not None
        part.refs = refs or None
        part.ask = with_arm(part.ask, stage.app, query.uid)
        part.planned = stage.planned
        if stage.app.app.pipeline is not None:
            part.pipeline = stage.app.app.pipeline
        else:
            part.ensemble = ensemble_of(part, stage.app.app)
        part.part.item = item
        if item is None:
            run.parts[name] = part.part
        else:
            run.fans[name].append(part.part)
        self.visits[query.ask.app, name] += 1
        origin = part.part.origin
        carried = 0 if origin is None or origin.body is None else len(origin.body)
        if run.served.graph.into[name] and carried > SMALL_BODY // (1 if item is None else run.asked[name]):
            part.part.origin, carried = None, 0  # who answered the first parts has it
        if len(part.body) + carried > self.settings.max_inline and part.pipeline is None:
            store = GatherOutputs(f"{part.uid.hex()}-inputs", here, tuple(refs))
            return (*timer, Do(("inputs", part), store, GATHER))
        return (*timer, *self.begin(part, now))

    def stored(self, done: Done | Failed | TimedOut, now: float) -> Iterable[Effect]:
        """The edge has put inputs of a stage that no message can hold into the object store, or could not."""
        part: Query = done.id[1]
        assert part.part is not None, "it is a stage"
        join = part.part.join
        if isinstance(done, Done):
            self.joins.hold(join, done.result, now)
        if join.ended:
            return NOTHING
        if not isinstance(done, Done):
            text = done.error if isinstance(done, Failed) else "it took too long"
            error = Error(code="internal", message=f"its inputs could not be stored: {text}")
            return self._refused(part, error, now, 0.0)
        if (full := self.joins.results.refusal()) is not None:
            return self._refused(part, full, now, 0.0)
        ref: ObjectRef = done.result
        names = join.plan.served.stages[part.part.stage].inputs
        part.refs = [TensorRef(name, ref.bucket, ref.key, name) for name in names]
        part.body = encode({"inputs": {}})
        return self.begin(part, now)

    # -- a stage ends

    def replied(self, uid: bytes, reply: PartReply, now: float) -> Iterable[Effect]:
        """A stage was answered, or refused by an executor."""
        part = self.joins.replied(uid, reply, now)
        return NOTHING if part is None else self._ended(part, now)

    def refused(self, part: QueryPart, error: Error, now: float) -> Iterable[Effect]:
        """A stage was refused here."""
        self.joins.refused(part, error)
        return self._ended(part, now)

    def _ended(self, part: QueryPart, now: float) -> Iterable[Effect]:
        join = part.join
        run: PipelineRun = join.plan
        name, stage = part.stage, run.served.stages[part.stage]
        if join.ended or name in run.lost:
            return NOTHING
        if part.error is not None:
            return self._failed(join, name, _told(part, join, self.apps.view), now)
        assert part.reply is not None
        if part.reply.outputs_ref is not None and (full := self.joins.results.refusal()) is not None:
            return self._refuse(join, replace(full, message=f"vertex {part.where}: {full.message}"), now)
        if part.item is None:
            return self._go_on(join, name, part.reply, now)
        run.left[name] -= 1
        if run.left[name]:
            return NOTHING
        refs = stored(run.replies(name), stage.taken)
        if refs:
            return (Do(("rows", join, name), FetchTensors(tuple(refs)), GATHER),)
        return self._together(join, stage, {}, now)

    def _together(self, join: Join, stage: Stage, fetched: Fetched, now: float) -> Iterable[Effect]:
        """All items of a stage were answered."""
        run, name = join.plan, stage.vertex.name
        try:
            reply = run.parts[name].reply = together(stage, run.fans[name], fetched)
        except BadTensor as error:
            return self._failed(join, name, Error(code="model_error", message=f"vertex {name}: {error}"), now)
        return self._go_on(join, name, reply, now)

    def fetched(self, done: Done | Failed | TimedOut, now: float) -> Iterable[Effect]:
        """The edge has read outputs of a stage that hands items on, or of items, from the object store, or could not."""
        what, join, name = done.id
        if join.ended or name in join.plan.lost:
            return NOTHING
        stage = join.plan.served.stages[name]
        if not isinstance(done, Done):
            text = done.error if isinstance(done, Failed) else "it took too long"
            error = Error(code="internal", message=f"vertex {name}: its {what} could not be read: {text}")
            return self._failed(join, name, error, now)
        return (self._ask_each if what == "items" else self._together)(join, stage, done.result, now)

    def _go_on(self, join: Join, name: str, reply: PartReply, now: float) -> Iterable[Effect]:
        """A stage was answered: decide its edges."""
        run, uid = join.plan, join.query.uid
        run.places[name] = len(run.places)
        try:
            if reply.zeros:  # they say nothing: probabilities decide, not conditions
                for drawn in run.served.drawn[name]:
                    run.followed[name, drawn.target] = drawn.follows(uid)
                return self._advance(join, now)
            outputs = _decisive(reply, run.served.conditions[name])
            if run.by_ref and any(array.ndim and len(array) > 1 for array in outputs.values()):
                return self._refuse(join, ONE_ITEM, now)
            for edge in run.served.graph.out[name]:
                run.followed[name, edge.target] = follows(uid, edge, outputs)
        except (BadTensor, ValueError) as error:
            return self._failed(join, name, Error(code="model_error", message=f"vertex {name}: {error}"), now)
        return self._advance(join, now)

    def _failed(self, join: Join, name: str, error: Error, now: float) -> Iterable[Effect]:
        """A stage has no answer: the query ends with it, or goes on with what stands for it: its app's default, or what else its takers name."""
        run: PipelineRun = join.plan
        if name not in run.served.graph.spared or name in run.lost:
            return self._refuse(join, error, now)
        reply = stand_in(join.query, run.served.stages[name])
        run.lose(join, name, error, reply)
        if reply is not None:
            return self._go_on(join, name, reply, now)
        for edge in run.served.graph.out[name]:
            run.followed[name, edge.target] = edge.when is None and follows(join.query.uid, edge, {})
        return self._advance(join, now)

    def _late(self, join: Join, now: float) -> Iterable[Effect]:
        """Go on without the optional stages whose time is over."""
        run: PipelineRun = join.plan
        effects: list[Effect] = []
        for name, at in list(run.until.items()):
            if at <= now and not run.answered(name) and name not in run.lost and not join.ended:
                text = f"vertex {name}: it had not answered in time for those behind it"
                effects += self._failed(join, name, Error(code="deadline", message=text, retry_after_ms=1000.0), now)
        join.due = min((at for at in run.until.values() if at > now), default=join.last)
        return effects

    def due(self, join: Join, now: float) -> Iterable[Effect]:
        """The time of a query, or of an optional stage, is over."""
        if join.ended:
            return NOTHING
        if now < join.last:
            return self._late(join, now)
        if join.query.ask.deadline <= join.query.arrived:
            return self._refuse(join, EXPIRED, now)
        run: PipelineRun = join.plan
        names = ", ".join(run.unanswered)
        text = f"{names or 'a stage'} had not answered when the time was up: allow more time or ask again"
        return self._refuse(join, Error(code="deadline", message=text, retry_after_ms=1000.0), now)

    # -- the query ends

    def _refuse(self, join: Join, error: Error, now: float) -> Iterable[Effect]:
        return (*self.joins.end(join, now), *self._refused(join.query, error, now, join.cost))

    def _refused(self, query: Query, error: Error, now: float, cost: float) -> list[Effect]:
        return [*self.outcomes.refused(query, error, now, cost=cost), *refuse_part(query, error, now)]

    def _finish(self, join: Join, now: float) -> Iterable[Effect]:
        """Send the answer. Outputs that are in the object store, or too large for a message, go by reference."""
        run: PipelineRun = join.plan
        try:
            found = {name: run.find(refs, name) for name, refs in run.served.outputs.items()}
            outputs = {name: plain(one, name) for name, one in found.items() if not isinstance(one, TensorRef)}
        except BadTensor as error:
            return self._refuse(join, run.lacking(None, error), now)
        refs = [one for one in found.values() if isinstance(one, TensorRef)]
        if refs or sum(len(tensor.data) for tensor in outputs.values()) > self.settings.max_inline:
            gather = GatherOutputs(join.query.uid.hex(), outputs, tuple(refs))
            beside = {} if join.query.part is None else small_outputs(outputs)
            return (Do(("gather", join, beside), gather, GATHER),)
        return self._answer(join, outputs, None, now)

    def gathered(self, done: Done | Failed | TimedOut, now: float) -> Iterable[Effect]:
        """The edge has put the outputs together in the object store, or could not."""
        join: Join = done.id[1]
        if join.ended:
            if isinstance(done, Done):
                self.joins.hold(join, done.result, now)
            return NOTHING
        if not isinstance(done, Done):
            text = done.error if isinstance(done, Failed) else "it took too long"
            return self._refuse(join, Error(code="internal", message=f"the outputs could not be stored: {text}"), now)
        return self._answer(join, done.id[2], done.result, now)

    def _answer(self, join: Join, outputs: dict[str, Tensor], ref: ObjectRef | None, now: float) -> Iterable[Effect]:
        query, run = join.query, join.plan
        ask, cost = query.ask, join.cost
        replies = {
            name: part.reply for name, part in run.parts.items() if part.reply is not None and run.fans.get(name) != []
        }
        spent = {name: reply.queue_ms + reply.compute_ms for name, reply in replies.items()}
        path = run.served.graph.longest_path(spent, spent)[1]
        target, unit = run.served.app.signature.target if run.served.app.signature is not None else ("", "")
        live = self.apps.catalog.quality(ask.app)
        least, accuracy, source, short = measured(run, query, replies, outputs, self.answered, live)
        if source != "registered" and "accuracy" in short and run.served.app.quality_act == "refuse":
            return self._refuse(join, too_wrong(ask, run.served, self.apps.view, accuracy or 0.0), now)
        absent = [reply.missing for reply in replies.values() if reply.missing is not None]
        absent += [1 for error in run.lost.values() if error is not None]
        sure = [reply.confidence for reply in replies.values() if reply.confidence is not None]
        answer = answer_of_none(
            query,
            outputs,
            now - query.arrived,
            accuracy=accuracy,
            accuracy_source=source,
            queue_ms=sum(replies[name].queue_ms for name in path),
            compute_ms=sum(replies[name].compute_ms for name in path),
            cached=bool(replies) and all(reply.cached for reply in replies.values()),
            simulated=any(reply.simulated for reply in replies.values()),
            cost=cost,
            missed=[*missed_by(ask, query.arrived, now, cost), *short],
            outputs_ref=UNSET if ref is None else ref,
            reason=next((reply.reason for reply in replies.values() if reply.zeros), UNSET),
            zeros=any(reply.zeros for reply in replies.values()) or UNSET,
            members=[name for reply in replies.values() for name in members_of(reply)],
            missing=sum(absent) if absent else UNSET,
            confidence=min(sure) if sure else UNSET,
            confidences=confidences(replies.values()),
            labels=run.labels or UNSET,
            target=target or UNSET,
            unit=unit or UNSET,
            metric=UNSET if least is None else named_metric(run.served.stages[least].metrics) or UNSET,
        )
        if run.served.learns:
            self.predictions.add(prediction_of(join, self.predictions, now))
        joined = self.outcomes.joined(query, answer, now)
        return (*self.joins.end(join, now), *joined, *answer_part(query, answer, now))


def unserved(ask: Ask, served: ServedPipeline, least: Least | None, view: ClusterView) -> Error | None:
    """Why no query with these requirements can begin. least: what each vertex costs at least, if the cost is limited."""
    if ask.model is not None or ask.version is not None or ask.variant is not None:
        text = "a pipeline picks a model for each of its vertices: leave model, version and variant out, or ask the vertex's own app"
        return Error(code="bad_request", message=text)
    if served.missing:
        text = f"its vertices need {', '.join(served.missing)}, which is not there any more: register a model for it"
        return Error(code="unknown_app", message=text)
    error = None if least is None else too_dear(ask, served, least, view)
    return error or too_fast(ask, served, view)


def _unfit(query: Query, served: ServedPipeline, least: Least | None, view: ClusterView, full: bool) -> Error | None:
    """Why a query cannot begin."""
    if served.conditional and query.ask.items > 1:
        return ONE_ITEM
    error = unserved(query.ask, served, least, view)
    return error or (FULL if full else None)


def _decisive(reply: PartReply, names: set[str]) -> dict[str, NDArray[Any]]:
    """Those outputs of a stage that conditions read. Raises BadTensor."""
    found = {name: to_array(tensor, name) for name, tensor in reply.outputs.items() if name in names}
    if reply.outputs_ref is not None and (large := names.difference(found)):
        raise BadTensor(f"when.output: {', '.join(large)} is too large to decide by: give a smaller output")
    return found


def _told(part: QueryPart, join: Join, view: ClusterView) -> Error:
    """A stage's refusal, as the pipeline's client is told of it."""
    error, run = part.error, join.plan
    assert error is not None
    if error.code == "unsatisfiable":
        return told_of(error, part.where, join.query.ask, run.served, view)
    # What a stage gets is made here and not the client's fault, unless it is the query's alone, or read from where the client says.
    sources = {one.vertex for refs in run.served.stages[part.stage].inputs.values() for one in refs}
    from_client = sources == {QUERY} or (run.by_ref and QUERY in sources)
    code = "model_error" if error.code == "bad_request" and not from_client else error.code
    return replace(error, code=code, message=f"vertex {part.where}: {error.message}")
