"""A query on its way through a pipeline: what it has given, which stages it visits, what they have answered.

Some stages are asked for each item of an answer: what each gets, and their answers as one. Pure.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from bus.messages.catalog import SHARES, AppRecord
from bus.messages.flow import TensorRef
from bus.messages.public import Error, QueryHead, Tensor, TensorHead
from bus.messages.quality import AppQuality
from bus.tensors import BadTensor, from_array, to_array
from services.core.emulation import zeros
from services.core.ensemble.outputs import said
from services.core.pipelines.branching import draw, items_key
from services.core.pipelines.graph import QUERY, Race, Reference
from services.core.pipelines.items import drawn_items, joined, rows, split
from services.core.selection.eligibility import INFINITE
from services.dispatcher.answered import LABELLED, AnsweredQueries
from services.dispatcher.budgets import Least, dearest, share
from services.dispatcher.default_output import default_outputs
from services.dispatcher.predictions import Claim
from services.dispatcher.query import Join, PartReply, Query, QueryPart
from services.dispatcher.stages import ServedPipeline, Stage

SHOWN = 3  # items that a refusal names
NO_OWN: dict[str, Tensor] = {}

_head = msgspec.msgpack.Decoder(TensorHead).decode
_named = msgspec.msgpack.Decoder(dict[str, Raw]).decode


class PipelineRun(Struct, eq=False):
    """A query on its way. given: its own inputs by name.

    by_ref: its client has put them into the object store, so nobody has counted their items. visited: of each vertex that is decided,
    whether it is visited. followed: the same of edges. finished: its outputs are put together. least: what each vertex costs at least, if the
    query's cost is limited; costs: what those may cost that are asked. asked: for how many items each vertex is asked; fans: of those that
    are asked for each by itself, a part for each, while the one of `parts` is all of them together; left: how many are to be answered. lost: vertices
    whose answer is not waited for any more, and why each failed; None: others were first. until: when an optional vertex is late, Unix seconds.
    places: of those that have answered, in their order.
    """

    served: ServedPipeline
    given: dict[str, Raw | TensorRef]
    by_ref: bool
    finished: bool = False
    parts: dict[str, QueryPart] = {}
    visited: dict[str, bool] = {}
    followed: dict[tuple[str, str], bool] = {}
    least: Least | None = None
    costs: dict[str, float] = {}
    asked: dict[str, int] = {}
    left: dict[str, int] = {}
    fans: dict[str, list[QueryPart]] = {}
    lost: dict[str, Error | None] = {}
    until: dict[str, float] = {}
    places: dict[str, int] = {}

    def answered(self, name: str) -> bool:
        """Whether a vertex has answered, or what stands for its answer is there."""
        part = self.parts.get(name)
        return part is not None and part.reply is not None

    @property
    def under_way(self) -> bool:
        """Whether an answer is waited for."""
        return any(part.reply is None and name not in self.lost for name, part in self.parts.items())

    def known(self, name: str) -> bool:
        """Whether it is known if a vertex is visited: each edge to it is decided, or it takes the first answer of some and that is there."""
        graph, followed = self.served.graph, self.followed
        sources = [edge.source for edge in graph.into[name]]
        undecided = [one for one in sources if (one, name) not in followed]
        if not undecided or not (races := graph.races[name]):
            return not undecided
        goes = any(followed.get((one, name)) for one in sources)
        return goes and set().union(*races).issuperset(undecided) and all(any(map(self.answered, one)) for one in races)

    def lose(self, join: Join, name: str, error: Error | None, reply: PartReply | None = None) -> None:
        """Wait for a vertex no longer. reply: what stands for its answer; an answer that comes late is none."""
        self.lost[name] = error
        self.parts[name] = QueryPart(join, b"", name, None, reply)

    def lose_losers(self, join: Join) -> None:
        """Wait no longer for what nothing takes any more, since others were first."""
        served = self.served
        wanted = {
            ref.vertex
            for refs in served.outputs.values()
            for ref in refs
            if not (isinstance(refs, Race) and any(self.answered(one.vertex) for one in refs))
        }
        for name in reversed(served.graph.order):
            out = [edge.target for edge in served.graph.out[name]]
            needless = name not in wanted and all(one in self.visited or one in self.lost for one in out)
            if needless and not self.answered(name) and self.visited.get(name, True) and name not in self.lost:
                self.lose(join, name, None)

    def lacking(self, stage: Stage | None, error: Exception) -> Error:
        """What to tell where a tensor is not there. stage: that takes it; None: the answer does."""
        where = "output" if stage is None else f"vertex {stage.vertex.name}"
        refs = (ref for each in (self.served.outputs if stage is None else stage.inputs).values() for ref in each)
        absent = (self.lost.get(ref.vertex) for ref in refs if not self.answered(ref.vertex))
        found = next((lost for lost in absent if lost is not None), None)
        if found is None:
            return Error(code="model_error", message=f"{where}: {error}")
        return replace(found, message=f"{found.message}; nothing stands for it in {where}")

    def cost_of(self, name: str, limit: float, spent: float, items: int) -> float:
        """What a vertex may cost: its share of what is left with those that may follow. limit, spent: of the query, in US$ per 1,000.

        items: that it is asked for.
        """
        if self.least is None:
            return INFINITE
        if (one := self.least[name]) is not None:
            self.least = {**self.least, name: one * items / self.served.stages[name].items}
        left = limit - spent - sum(cost for each, cost in self.costs.items() if self.parts[each].reply is None)
        to_come = {each: least for each, least in self.least.items() if each == name or each not in self.visited}
        visited = [each for each, goes in self.visited.items() if goes]
        self.costs[name] = share(max(0.0, left), self.least[name], dearest(to_come, self.served, visited))
        return self.costs[name]

    @property
    def labels(self) -> list[str]:
        """The names of the items' classes, of the first output whose stage has some."""
        replies = {name: part.reply for name, part in self.parts.items() if part.reply is not None}
        for refs in self.served.outputs.values():
            made = next((replies[ref.vertex] for ref in refs if ref.vertex in replies), None)
            if made is not None and made.labels:
                return made.labels
        return []

    def find(self, refs: list[Reference], name: str) -> Raw | Tensor | TensorRef:
        """The first of these tensors that is there. name: what it becomes. Raises BadTensor."""
        if isinstance(refs, Race):
            refs = sorted(refs, key=lambda ref: self.places.get(ref.vertex, len(self.places)))
        for vertex, tensor in refs:
            if vertex == QUERY:
                if tensor in self.given:
                    given = self.given[tensor]
                    return replace(given, name=name) if isinstance(given, TensorRef) else given
                raise BadTensor(f"the query has no input {tensor!r}")
            part = self.parts.get(vertex)
            reply = None if part is None else part.reply
            if reply is None:
                continue
            if tensor in reply.outputs:
                return reply.outputs[tensor]
            if reply.outputs_ref is not None:
                return TensorRef(name, reply.outputs_ref.bucket, reply.outputs_ref.key, tensor)
            raise BadTensor(f"vertex {vertex} has not given {tensor!r}; it has given {', '.join(reply.outputs)}")
        raise BadTensor(f"no vertex was visited that gives {name!r}")

    def inputs(self, stage: Stage, own: Mapping[str, Tensor]) -> tuple[dict[str, Raw | Tensor], list[TensorRef]]:
        """A stage's inputs: those that are here, and those in the object store. own: known already. Raises BadTensor."""
        here: dict[str, Raw | Tensor] = {}
        there: list[TensorRef] = []
        for name, refs in stage.inputs.items():
            found = own.get(name) or self.find(refs, name)
            if isinstance(found, TensorRef):
                there.append(found)
            else:
                here[name] = found
        return here, there

    def replies(self, name: str) -> list[PartReply]:
        """The answers of a stage: to each of its items, or one."""
        parts = [self.parts[name]] if name in self.lost else self.fans.get(name, [self.parts[name]])
        return [part.reply for part in parts if part.reply is not None]

    @property
    def unanswered(self) -> Iterable[str]:
        """What is under way, as people name it."""
        for name, part in self.parts.items():
            if part.reply is None and name not in self.lost:
                each = [one.where for one in self.fans.get(name, ()) if one.reply is None]
                yield from each[:SHOWN] or [name]


def given_by(query: Query, app: AppRecord) -> dict[str, Raw | TensorRef]:
    """The inputs of a checked query by name, undecoded, or where they are in the object store."""
    assert app.signature is not None, "a pipeline has one"
    head: QueryHead = query.head
    if (ref := head.inputs_ref) is not None:
        return {spec.name: TensorRef(spec.name, ref.bucket, ref.key, spec.name) for spec in app.signature.inputs}
    there: dict[str, Raw | TensorRef] = {one.name: one for one in query.refs or ()}
    first = app.signature.inputs[0].name
    with suppress(msgspec.ValidationError):
        _head(head.inputs)
        return {first: head.inputs}
    with suppress(msgspec.ValidationError):
        return there | _named(head.inputs)
    return {first: head.inputs}  # a nested list


SEEN = 1000  # answers of which the numbers of items are kept: the last ones
Fetched = Mapping[str, Raw]

_whole = msgspec.msgpack.Decoder(Tensor).decode
_any = msgspec.msgpack.Decoder().decode


class SeenItems(NamedTuple):
    """Of an edge: how many answers were seen, the mean number of their items, and the variance over the mean."""

    answers: int
    mean: float
    dispersion: float


class ItemCounts(Struct, eq=False):
    """How many items the last answers had, by pipeline and vertex that is asked for them."""

    _last: dict[tuple[str, str], deque[int]] = {}

    def add(self, pipeline: str, vertex: str, items: int) -> None:
        self._last.setdefault((pipeline, vertex), deque(maxlen=SEEN)).append(items)

    def of(self, pipeline: str, vertex: str) -> SeenItems | None:
        """None: no answer was seen."""
        last = self._last.get((pipeline, vertex))
        if not last:
            return None
        counts = np.array(last)
        mean = float(counts.mean())
        return SeenItems(len(last), mean, float(counts.var()) / mean if mean else 1.0)


def plain(value: Raw | Tensor, name: str) -> Tensor:
    """A tensor that may be encoded, or a nested list. Raises BadTensor."""
    if isinstance(value, Tensor):
        return value
    try:
        return _whole(value)
    except msgspec.DecodeError:
        return from_array(to_array(_any(value), name))


def away(run: PipelineRun, stage: Stage) -> list[TensorRef]:
    """What must be fetched from the object store before items can be told apart, named "answer/tensor", or as the input. Raises BadTensor."""
    if stage.fan is None:
        given = [run.find(refs, field) for field, refs in stage.inputs.items() if field in stage.rows]
        return [one for one in given if isinstance(one, TensorRef)]
    return stored(run.replies(stage.fan.source), {tensor for tensor, _ in stage.split.values()})


def stored(replies: Sequence[PartReply], wanted: set[str]) -> list[TensorRef]:
    """Those of these outputs that are in the object store, named "answer/tensor"."""
    return [
        TensorRef(f"{i}/{name}", reply.outputs_ref.bucket, reply.outputs_ref.key, name)
        for i, reply in enumerate(replies)
        if reply.outputs_ref is not None
        for name in sorted(wanted - reply.outputs.keys())
    ]


class SeveralItems(BadTensor):
    """A client has put several items into the object store, and each answer to one goes its own way."""


def items_of(run: PipelineRun, stage: Stage, uid: bytes, fetched: Fetched, seen: ItemCounts) -> list[dict[str, Tensor]]:
    """Of each item, the inputs that differ from item to item. Made up where the answer was. Raises BadTensor."""
    fan = stage.fan
    if fan is None:
        return _zipped({name: rows(_input(run, stage, name, fetched)) for name in stage.rows})
    replies = run.replies(fan.source)
    if any(reply.zeros for reply in replies):
        answers = np.array([run.asked[fan.source]])
        count = int(drawn_items(np.array([draw(uid, items_key(fan))]), fan, answers)[0])
        signature = stage.app.app.signature
        specs = () if signature is None else [spec for spec in signature.inputs if spec.name in stage.split]
        return [zeros(specs, 1) for _ in range(count)]
    found: list[dict[str, Tensor]] = []
    for i, reply in enumerate(replies):
        given = {field: _tensor(reply, i, tensor, fetched) for field, (tensor, _) in stage.split.items()}
        several = (len(one.shape) == stage.split[field][1] + 2 and one.shape[0] > 1 for field, one in given.items())
        plain_source = run.served.stages[fan.source].app.app.pipeline is None
        if run.by_ref and run.asked[fan.source] == 1 and plain_source and any(several):
            raise SeveralItems
        items = _zipped({field: split(one, stage.split[field][1], fan) for field, one in given.items()})
        seen.add(run.served.app.app, stage.vertex.name, len(items))
        found += items
    return found


def _zipped(columns: Mapping[str, list[Tensor]]) -> list[dict[str, Tensor]]:
    """By item, what is there by input. Raises BadTensor."""
    if len({len(items) for items in columns.values()}) > 1:
        told = ", ".join(f"{field} {len(items)}" for field, items in columns.items())
        raise BadTensor(f"inputs have different numbers of items: {told}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _input(run: PipelineRun, stage: Stage, field: str, fetched: Fetched) -> Tensor:
    found = fetched.get(field) or run.find(stage.inputs[field], field)
    if isinstance(found, TensorRef):
        raise BadTensor(f"{field} is in the object store")
    return plain(found, field)


def _tensor(reply: PartReply, i: int, name: str, fetched: Fetched) -> Tensor:
    found = reply.outputs.get(name) or fetched.get(f"{i}/{name}")
    if found is None:
        raise BadTensor(f"it has not given {name!r}; it has given {', '.join(reply.outputs)}")
    return plain(found, name)


def together(stage: Stage, parts: Sequence[QueryPart], fetched: Fetched) -> PartReply:
    """The answers to all items as one, with a row for each, in the outputs that anything takes. Raises BadTensor."""
    replies = [part.reply for part in parts if part.reply is not None]
    signature = stage.app.app.signature
    assert signature is not None, "it was checked when the pipeline was set"
    outputs = {
        spec.name: joined([_tensor(reply, i, spec.name, fetched) for i, reply in enumerate(replies)], spec)
        for spec in signature.outputs
        if spec.name in stage.taken
    }
    if not replies:
        return PartReply(outputs=outputs)
    known = [reply.accuracy for reply in replies if reply.accuracy is not None]
    absent = [reply.missing for reply in replies if reply.missing is not None]
    sure = [reply.confidence for reply in replies if reply.confidence is not None]
    least = min(known) if len(known) == len(replies) else None
    slowest = max(replies, key=lambda reply: reply.queue_ms + reply.compute_ms)
    return PartReply(
        outputs=outputs,
        accuracy=least,
        accuracy_source=next(reply.accuracy_source for reply in replies if reply.accuracy == least),
        queue_ms=slowest.queue_ms,
        compute_ms=slowest.compute_ms,
        batch=slowest.batch,
        cached=all(reply.cached for reply in replies),
        simulated=any(reply.simulated for reply in replies),
        missed=list(dict.fromkeys(what for reply in replies for what in reply.missed)),
        reason=next((reply.reason for reply in replies if reply.reason), ""),
        members=list(dict.fromkeys(name for reply in replies for name in members_of(reply))),
        zeros=any(reply.zeros for reply in replies),
        missing=sum(absent) if absent else None,
        confidence=min(sure) if sure else None,
        confidences=[share for reply in replies for share in _shares(reply)],
        labels=[label for reply in replies for label in reply.labels],
    )


def stand_in(query: Query, stage: Stage) -> PartReply | None:
    """What stands for the answer of an optional stage: its app's default output. None: there is none, or it is asked for each item."""
    app = stage.app.app
    if not stage.vertex.optional or app.default_output is None or stage.fan is not None or stage.rows:
        return None
    outputs = default_outputs(app.default_output, app.signature, query.ask.items)
    missed = [need for need in ("accuracy", "confidence") if getattr(query.head, need)]
    return None if outputs is None else PartReply(outputs=outputs, missed=missed)


def confidences(replies: Iterable[PartReply]) -> list[float] | UnsetType:
    """Of each item, the least that any stage of several models has. UNSET: no stage has several items."""
    found = [reply.confidences for reply in replies if reply.confidences]
    if not found or len({len(each) for each in found}) > 1:
        return UNSET
    return [min(shares) for shares in zip(*found, strict=True)]


def claim_of(run: PipelineRun, replies: Mapping[str, PartReply]) -> tuple[list[str], Claim] | None:
    """What the stages that made an answer claim to reach, and its outputs of the one whose labels can say what it reaches: one alone that tells classes. None: no
    label can say it. replies: of the stages that were visited.
    """
    known = [reply.accuracy for reply in replies.values() if reply.accuracy is not None]
    if len(known) < len(replies) or any(reply.zeros for reply in replies.values()):
        return None
    for refs in run.served.outputs.values():
        first = sorted(refs, key=lambda ref: run.places.get(ref.vertex, 0)) if isinstance(refs, Race) else refs
        made = next((ref.vertex for ref in first if ref.vertex in replies), None)
        metrics = [] if made is None or made in run.fans else sorted(run.served.stages[made].metrics)
        if len(metrics) == 1 and metrics[0] in SHARES:
            mine = [one for one, others in run.served.outputs.items() if any(ref.vertex == made for ref in others)]
            by = ", ".join(f"{one}={who_answered(replies[one])}" for one in sorted(replies))
            return mine, Claim(min(known), prod(known), by, metrics[0], run.served.classes)
    return None


def who_answered(reply: PartReply) -> str:
    """The variant, or the members of an ensemble, or of a pipeline's stages."""
    return reply.variant or "+".join(members_of(reply))


def said_by(claim: tuple[list[str], Claim] | None, outputs: Mapping[str, Tensor], items: int) -> list[Any] | None:
    """What labels of an answer's items are compared with; None: no label can be."""
    if claim is None or items > LABELLED:
        return None
    try:
        arrays = {name: to_array(outputs[name], name) for name in claim[0] if name in outputs}
    except BadTensor:
        return None
    words = said(arrays, claim[1].metric) if arrays else None
    return words if words is not None and len(words) == items else None


def measured(
    run: PipelineRun, query: Query, replies: Mapping[str, PartReply], outputs: Mapping[str, Tensor],
    answered: AnsweredQueries, live: AppQuality | None,
) -> tuple[str | None, float | None, str, list[str]]:  # fmt: skip
    """Keep an answer for labels. The stage with the least accuracy; the answer's, by its stages, or by labels where these exclude that, and by which; what it
    misses of accuracy and confidence, of which each stage owes the whole. live: what labels say of the pipeline.
    """
    short = [what for what in ("accuracy", "confidence") if any(what in reply.missed for reply in replies.values())]
    known = {name: reply.accuracy for name, reply in replies.items() if reply.accuracy is not None}
    least = min(known, key=known.__getitem__) if known and len(known) == len(replies) else None
    if least is None:
        return None, None, "registered", short
    claim = claim_of(run, replies)
    if claim is not None and (words := said_by(claim, outputs, query.ask.items)) is not None:
        answered.add(query, words, claim=claim[1])
    found = None if live is None or claim is None else live.variants.get(claim[1].by)
    if found is None or not found.excludes(known[least]):
        return least, known[least], replies[least].accuracy_source, short
    missed = found.accuracy < query.ask.accuracy
    return least, found.accuracy, "labels", [what for what in short if what != "accuracy"] + ["accuracy"] * missed


def _shares(reply: PartReply) -> list[float]:
    return reply.confidences or ([] if reply.confidence is None else [reply.confidence])


def members_of(reply: PartReply) -> list[str]:
    """Who has answered a stage, as answers name them."""
    return reply.members or ([f"{reply.model}@{reply.version}"] if reply.model else [])
