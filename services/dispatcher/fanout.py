"""The stages of a pipeline that are asked for each item of an answer: what each gets, and their answers as one. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Raw, Struct

from bus.messages.flow import TensorRef
from bus.messages.public import Tensor
from bus.tensors import BadTensor, from_array, to_array
from services.core.emulation import zeros
from services.core.pipelines.branching import draw, items_key
from services.core.pipelines.items import drawn_items, joined, rows, split
from services.dispatcher.pipeline_run import PipelineRun
from services.dispatcher.query import PartReply, QueryPart
from services.dispatcher.stages import Stage

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
    slowest = max(replies, key=lambda reply: reply.queue_ms + reply.compute_ms)
    return PartReply(
        outputs=outputs,
        accuracy=min(known) if len(known) == len(replies) else None,
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


def _shares(reply: PartReply) -> list[float]:
    return reply.confidences or ([] if reply.confidence is None else [reply.confidence])


def members_of(reply: PartReply) -> list[str]:
    """Who has answered a stage, as answers name them."""
    return reply.members or ([f"{reply.model}@{reply.version}"] if reply.model else [])
