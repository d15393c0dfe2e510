"""The port of a selection policy over several models: Clipper's `init`, `select`, `combine`, `observe` (paper 002, Listing 2)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.messages.public import Requirements

Array = NDArray[Any]
Outputs = Mapping[str, Array]  # of one member, by output name; the first axis is the items


class Member(Struct, frozen=True, kw_only=True):
    """One model of an app that may be asked. accuracy: the best that one of its variants has measured, 0..1; None: not known.

    metric: of its model. labels: names of its classes, in the order of its scores; empty if none were given.
    """

    model: str
    version: str
    accuracy: float | None = None
    metric: str = "top1"
    labels: list[str] = []

    @property
    def name(self) -> str:
        """As answers name it: `model@version`."""
        return f"{self.model}@{self.version}"


class Combined(NamedTuple):
    """outputs: one answer for all items. agree: of each item, how many of the members that are there have the same label as the answer."""

    outputs: dict[str, Array]
    agree: NDArray[np.int64]


class Learnt(NamedTuple):
    """What one member shows of a policy's state. weight: its share of all weights, 0..1. probability: of being asked. n: feedbacks."""

    member: str
    weight: float
    probability: float
    n: int


S = TypeVar("S")


class EnsemblePolicy(Protocol[S]):
    """A policy over the members of one app. It is pure: a state comes in, a state comes out, and all chance is in `u`.

    Members are named by model, so that a new version keeps what its model has earned. A member that the state does not know, since it was
    linked later, begins with the mean weight. A state is what feedback has taught about one app, or one of its contexts.
    """

    name: str

    def init(self, members: Sequence[Member]) -> S:
        """The state before any feedback."""
        ...

    def select(self, state: S, members: Sequence[Member], ask: Requirements, u: float) -> Sequence[str]:
        """The models to ask, at least one. u: in [0, 1), the same for each retry of the query."""
        ...

    def combine(self, state: S, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
        """One answer. outputs: by model, of those that have answered, at least one."""
        ...

    def observe(
        self, state: S, members: Sequence[Member], label: Any, outputs: Mapping[str, Outputs], p: Mapping[str, float]
    ) -> S:
        """The state after a feedback. outputs: of the one item, by model. p: probabilities of the members at the prediction."""
        ...

    def learnt(self, state: S, members: Sequence[Member]) -> list[Learnt]:
        """A row for each member."""
        ...

    def dump(self, state: S) -> bytes: ...
    def load(self, data: bytes) -> S: ...
