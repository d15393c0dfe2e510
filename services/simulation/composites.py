"""Apps of which several models answer together: what their queries hold, what each simulated model says, and counts of what came. Pure.

An item is a number, and its label a class that follows from it. A model says the label with the probability of its accuracy, and another
class else. Models err independently. All of this is drawn by hash, so that a run gives the same outputs in whichever order.

And what the report says of pipelines: visits, batches and replicas of their vertices, beside their plans. It hears the events that actors record.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Raw, convert
from msgspec.structs import asdict
from numpy.typing import NDArray

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, PipelinePlan, PlannedStage, Signature, TensorSpec, VariantRecord
from bus.messages.events import OutcomeEvent, PipelineEvent, SelectionEvent
from bus.messages.public import Answer, Feedback, QueryHead, Tensor, TensorView
from bus.tensors import from_array, to_array
from services.core.cost import instance_price_per_s
from services.executor.queue import Inputs
from services.simulation.scenario.model import PolicySpec, Scenario
from services.simulation.statistics import Quantiles, ratio

CLASSES = 10
OUTPUT = "y"
NOTHING = Raw(b"\xc0")  # in place of inputs
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="INT64", shape=[])],
    outputs=[TensorSpec(name=OUTPUT, datatype="INT64", shape=[])],
)
_SPACE = 2.0**64

Numbers = NDArray[np.int64]


def drawn(what: str, number: int) -> int:
    """64 bits, by hash."""
    return int.from_bytes(
        blake2b(number.to_bytes(8, "little"), digest_size=8, key=what.encode()[:64]).digest(), "little"
    )


def truth(item: int) -> int:
    """An item's label, below CLASSES."""
    return drawn("label", item) % CLASSES


def said(model: str, accuracy: float, item: int) -> int:
    """What a model of this accuracy (0..1) says of an item."""
    draw = drawn(model, item)
    wrong = draw >= accuracy * _SPACE
    return (truth(item) + (1 + draw % (CLASSES - 1) if wrong else 0)) % CLASSES


def told(record: VariantRecord, uid: bytes, item: int) -> int:
    """What a variant answers to a query's item of an app without a policy: class 0 if it is right, as often as it was registered, else 1."""
    wrong = drawn(f"{record.variant} {item}", int.from_bytes(uid[-8:], "little")) >= (record.accuracy or 0.0) * _SPACE
    return int(wrong)


class SimulatedModels:
    """wrong: whether a variant's answers are all wrong now. A variant without an accuracy is right else."""

    def __init__(self) -> None:
        self.wrong: Callable[[VariantRecord], bool] = lambda _: False

    def outputs(self, record: VariantRecord, inputs: Inputs | None) -> dict[str, Tensor]:
        """For the inputs of one query; empty where they hold no items."""
        if not isinstance(inputs, TensorView) or inputs.datatype != "INT64":
            return {}
        accuracy = 0.0 if self.wrong(record) else 1.0 if record.accuracy is None else record.accuracy
        labels = [said(record.model, accuracy, item) for item in to_array(inputs, "inputs").tolist()]
        return {OUTPUT: from_array(np.array(labels, np.int64))}


@dataclass(slots=True, eq=False)
class QueryItems:
    """The items of one load's queries to one app. begin: the first item. fields: of each query, beside its inputs.

    repeats: share of the queries that hold the items of an earlier one. feedback: share of those answered whose labels are sent back.
    """

    begin: int
    items: int
    fields: Mapping[str, Any]
    repeats: float = 0.0
    feedback: float = 0.0
    _sent: int = 0
    _open: dict[str, int] = field(default_factory=dict)  # by inbox: the query's first item

    def next(self, inbox: str, names: Mapping[str, Any] = {}) -> tuple[QueryHead, bytes]:
        """The next query, whose answer comes to this inbox. names: fields of its own."""
        number, self._sent = self._sent, self._sent + 1
        while number and drawn("repeats", self.begin + number) < self.repeats * _SPACE:
            number = drawn("which", self.begin + number) % number
        first = self._open[inbox] = self.begin + number * self.items
        body = encode({"inputs": from_array(np.arange(first, first + self.items)), **self.fields, **names})
        return decode(QueryHead, body), body

    def ended(self, inbox: str) -> Numbers:
        """The labels of the query whose reply came to this inbox."""
        first = self._open.pop(inbox)
        return np.array([truth(item) for item in range(first, first + self.items)])

    def lessons(self, inbox: str, answer: Answer, labels: Numbers) -> list[Feedback]:
        """What its client sends back."""
        number = int(inbox.rpartition(".")[2])
        if not isinstance(answer.query, str) or drawn("feedback", number) >= self.feedback * _SPACE:
            return []
        return [
            Feedback(query=answer.query, label=label, item=item, inputs=NOTHING)
            for item, label in enumerate(labels.tolist())
        ]


def wrong_items(answer: Answer, labels: Numbers) -> int:
    """How many items of an answer are wrong."""
    return int((to_array(convert(answer.outputs[OUTPUT], Tensor), OUTPUT) != labels).sum())


# -- what came


@dataclass(slots=True, eq=False)
class MemberCounts:
    """answers: that have the member's output. lessons: feedbacks about it. lost: the sum of its losses. weight: now, 0..1."""

    answers: int = 0
    lessons: int = 0
    lost: float = 0.0
    weight: float | None = None
    weights: list[float | None] = field(default_factory=list)


class EnsembleCounts:
    """Counts of one app's answers, and what feedback has taught. Weights of contexts are those of `context/model`."""

    def __init__(self) -> None:
        self._missing = self._judged = self._cached = 0
        self._items = self._wrong = self._closed_items = self._closed_wrong = 0
        self._confidence = 0.0
        self._members: defaultdict[str, MemberCounts] = defaultdict(MemberCounts)
        self._errors: list[float | None] = []

    def answered(self, answer: Answer, items: int, wrong: int) -> None:
        """An answer of so many items came; so many of them are wrong."""
        self._items += items
        self._wrong += wrong
        self._cached += answer.cached
        if isinstance(answer.members, list) and isinstance(answer.confidence, float):
            self._judged += 1
            self._confidence += answer.confidence
            self._missing += answer.missing or 0
            for name in answer.members:
                self._members[name.partition("@")[0]].answers += 1

    def taught(self, event: SelectionEvent) -> None:
        """A feedback taught about a member."""
        name = event.member if event.context is None else f"{event.context}/{event.member}"
        member = self._members[name]
        member.lessons += 1
        member.lost += event.loss
        member.weight = event.weight

    def close(self) -> None:
        """An interval of the time series ends."""
        items = self._items - self._closed_items
        self._errors.append(ratio(self._wrong - self._closed_wrong, items))
        self._closed_items, self._closed_wrong = self._items, self._wrong
        for member in self._members.values():
            member.weights += [None] * (len(self._errors) - 1 - len(member.weights))
            member.weights.append(member.weight)

    def document(self) -> dict[str, Any]:
        """As docs/simulation.md describes it. error: share of the items that are wrong."""
        return {
            "error": ratio(self._wrong, self._items),
            "missing": ratio(self._missing, self._judged),
            "confidence": ratio(self._confidence, self._judged),
            "cached": self._cached,
            "members": {
                name: {
                    "answers": one.answers,
                    "feedbacks": one.lessons,
                    "error": ratio(one.lost, one.lessons),
                    "weight": one.weight,
                }
                for name, one in sorted(self._members.items())
            },
            "series": {
                "error": self._errors,
                "weights": {
                    name: one.weights + [None] * (len(self._errors) - len(one.weights))
                    for name, one in sorted(self._members.items())
                    if one.weight is not None
                },
            },
        }


KEPT = 20_000  # queries whose parts may still end
LISTED = 1000  # changes of replicas


class VertexCounts:
    """Counts of one vertex. variants: of its app. price: US$/s of one planned replica. replicas: wanted now; None without a plan."""

    def __init__(self, variants: frozenset[str], stage: PlannedStage | None, price: float) -> None:
        self.price = price
        self.replicas = None if stage is None else stage.replicas
        self._variants = variants
        self._stage = stage
        self._visits = 0
        self._answered = 0
        self._batches = 0.0  # each query counts 1/n for its batch of n
        self._latency = Quantiles()  # seconds
        self._series: list[int] = []

    def ended(self, part: OutcomeEvent) -> None:
        """A query's visit has ended."""
        self._visits += 1
        if part.code is None and part.latency_ms is not None:
            self._answered += 1
            self._batches += 1.0 / (part.batch or 1)
            self._latency.fresh.append(part.latency_ms / 1000.0)

    def sample(self, instances: Mapping[str, int]) -> None:
        """instances: loaded now, by variant."""
        self._series.append(sum(instances.get(one, 0) for one in self._variants))

    def document(self, queries: int) -> dict[str, Any]:
        """queries: of the pipeline."""
        stage = self._stage
        p50, p99 = self._latency.quantiles(0.5, 0.99)
        found: dict[str, Any] = {
            "visits": self._visits,
            "share": ratio(self._visits, queries),
            "mean_batch": ratio(self._answered, self._batches),
            "p50_ms": None if p50 is None else 1000.0 * p50,
            "p99_ms": None if p99 is None else 1000.0 * p99,
            "instances": self._series,
        }
        if stage is not None:
            fields = ("variant", "hardware", "batch", "replicas", "scale", "service_ms", "rho")
            found |= {"replicas": self.replicas, "plan": {field: getattr(stage, field) for field in fields}}
        return found


class PipelineCounts:
    """Counts of one pipeline. variants, prices: by app, its variants; by variant, US$/s of an instance."""

    def __init__(
        self,
        app: AppRecord,
        plan: PipelinePlan | None,
        variants: Mapping[str, frozenset[str]],
        prices: Mapping[str, float],
    ) -> None:
        assert app.pipeline is not None, "the app is a pipeline"
        self._plan = plan
        stages = {} if plan is None else plan.vertices
        self._vertices = {
            one.name: VertexCounts(
                variants.get(one.app, frozenset()),
                stage := stages.get(one.name),
                0.0 if stage is None else prices.get(stage.variant, 0.0),
            )
            for one in app.pipeline.vertices
        }
        self._changes: list[dict[str, Any]] = []
        self._queries = 0
        self._cost = 0.0  # US$
        self._at = 0.0

    def ended(self, query: OutcomeEvent) -> None:
        """A query has ended."""
        self._queries += 1
        if self._plan is None:
            self._cost += query.cost

    def visited(self, part: OutcomeEvent) -> None:
        """A visit to a vertex has ended."""
        self._vertices[part.stage or ""].ended(part)

    def changed(self, event: PipelineEvent, now: float) -> None:
        """Other replicas are wanted of a vertex from now on."""
        self._advance(max(0.0, now))
        self._vertices[event.vertex].replicas = event.to_replicas
        if len(self._changes) < LISTED:
            row = asdict(event)
            del row["pipeline"]
            self._changes.append({**row, "time": round(now, 6)})

    def sample(self, instances: Mapping[str, int]) -> None:
        """instances: loaded now, by variant."""
        for vertex in self._vertices.values():
            vertex.sample(instances)

    def _advance(self, now: float) -> None:
        """The planned replicas are paid for until now."""
        if self._plan is not None and now > self._at:
            self._cost += (now - self._at) * sum(one.price * (one.replicas or 0) for one in self._vertices.values())
        self._at = max(self._at, now)

    def document(self, duration_s: float) -> dict[str, Any]:
        """As docs/simulation.md describes it."""
        self._advance(duration_s)
        plan = self._plan
        found: dict[str, Any] = {"cost": self._cost, "plan": None}
        if plan is not None:
            fields = ("policy", "status", "p99_ms", "percentile", "rate", "reason")
            found["plan"] = {field: getattr(plan, field) for field in fields} | {"cost": plan.cost_per_s * duration_s}
        found["changes"] = self._changes
        return {**found, "vertices": {name: one.document(self._queries) for name, one in self._vertices.items()}}


class PipelineReports:
    """The pipelines of one run, by name."""

    def __init__(self, pipelines: Mapping[str, PipelineCounts]) -> None:
        self._pipelines = pipelines
        self._parts: dict[bytes, list[OutcomeEvent]] = {}  # of queries that have not ended
        self._ended: dict[bytes, PipelineCounts] = {}  # whose the last queries were

    @classmethod
    def of(cls, scenario: Scenario, policy: PolicySpec) -> "PipelineReports":
        """Without any counts yet."""
        devices = {device.kind: device for machine in policy.machines for device in machine.devices}
        prices = {
            one.variant: instance_price_per_s(one, scenario.prices, device.cores, device.memory_mb)
            for one in scenario.variants
            if (device := devices.get(one.hardware)) is not None
        }
        variants = {
            app.app: frozenset(one.variant for one in scenario.variants if app.links.get(one.model) == one.version)
            for app in scenario.apps
        }
        return cls(
            {
                app.app: PipelineCounts(app, policy.plans.get(app.app), variants, prices)
                for app in scenario.apps
                if app.pipeline is not None
            }
        )

    def __bool__(self) -> bool:
        return bool(self._pipelines)

    def outcome(self, event: OutcomeEvent) -> None:
        """A query or a part has ended. Parts may end before and after their query."""
        one = self._pipelines.get(event.app)
        if one is not None:
            one.ended(event)
            for part in self._parts.pop(event.uid, ()):
                one.visited(part)
            self._ended[event.uid] = one
            if len(self._ended) > KEPT:
                del self._ended[next(iter(self._ended))]
        if event.parent is None:
            return
        whose = self._ended.get(event.parent)
        if whose is not None:
            whose.visited(event)
        else:
            self._parts.setdefault(event.parent, []).append(event)
            if len(self._parts) > KEPT:
                del self._parts[next(iter(self._parts))]

    def changed(self, event: PipelineEvent, now: float) -> None:
        """See PipelineCounts. now: the scenario's time."""
        if event.pipeline in self._pipelines:
            self._pipelines[event.pipeline].changed(event, now)

    def sample(self, instances: Mapping[str, int]) -> None:
        for one in self._pipelines.values():
            one.sample(instances)

    def document(self, app: str, duration_s: float) -> dict[str, Any] | None:
        """None for an app that is no pipeline."""
        found = self._pipelines.get(app)
        return None if found is None else found.document(duration_s)
