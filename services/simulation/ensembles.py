"""Apps of which several models answer together: what their queries hold, what each simulated model says, and counts of what came. Pure.

An item is a number, and its label a class that follows from it. A model says the label with the probability of its accuracy, and another
class else. Models err independently. All of this is drawn by hash, so that a run gives the same outputs in whichever order.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Raw, convert
from numpy.typing import NDArray

from bus.codec import decode, encode
from bus.messages.catalog import Signature, TensorSpec, VariantRecord
from bus.messages.events import SelectionEvent
from bus.messages.public import Answer, Feedback, QueryHead, Tensor, TensorView
from bus.tensors import from_array, to_array
from services.executor.queue import Inputs
from services.simulation.statistics import ratio

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
