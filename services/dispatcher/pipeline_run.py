"""A query on its way through a pipeline: what it has given, which stages it visits, what they have answered. Pure."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from bus.messages.catalog import AppRecord
from bus.messages.flow import TensorRef
from bus.messages.public import QueryHead, Tensor, TensorHead
from bus.tensors import BadTensor
from services.core.pipelines.graph import QUERY, Reference
from services.core.selection.eligibility import INFINITE
from services.dispatcher.budgets import Least, dearest, share
from services.dispatcher.query import PartReply, Query, QueryPart
from services.dispatcher.stages import ServedPipeline, Stage

SHOWN = 3  # items that a refusal names
NO_OWN: dict[str, Tensor] = {}

_tensor = msgspec.msgpack.Decoder(TensorHead).decode
_named = msgspec.msgpack.Decoder(dict[str, Raw]).decode


class PipelineRun(Struct, eq=False):
    """A query on its way. given: its own inputs by name.

    by_ref: its client has put them into the object store, so nobody has counted their items. visited: of each vertex that is decided,
    whether it is visited. followed: the same of edges. finished: its outputs are put together. least: what each vertex costs at least, if the
    query's cost is limited; costs: what those may cost that are asked. asked: for how many items each vertex is asked; fans: of those that
    are asked for each by itself, a part for each, while the one of `parts` is all of them together; left: how many are to be answered.
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
        parts = self.fans.get(name, [self.parts[name]])
        return [part.reply for part in parts if part.reply is not None]

    @property
    def unanswered(self) -> Iterable[str]:
        """What is under way, as people name it."""
        for name, part in self.parts.items():
            if part.reply is None:
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
        _tensor(head.inputs)
        return {first: head.inputs}
    with suppress(msgspec.ValidationError):
        return there | _named(head.inputs)
    return {first: head.inputs}  # a nested list
