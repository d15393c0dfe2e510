"""Selection policies as users write them: one that counts, and some that do what no policy should."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.core.ensemble.base import Combined, Learnt, Member, Outputs


class Counting:
    """All members have equal votes. The state is the number of feedbacks."""

    def init(self, members: Sequence[Member]) -> dict[str, int]:
        del members
        return {"count": 0}

    def select(self, state: Any, members: Sequence[Member], ask: Any, u: float) -> Sequence[str]:
        del state, ask, u
        return [member.model for member in members]

    def combine(self, state: Any, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
        del state, members
        scores = np.mean([one["scores"] for one in outputs.values()], axis=0)
        return Combined({"scores": scores}, np.full(len(scores), len(outputs)))

    def observe(self, state: dict[str, int], *rest: Any) -> dict[str, int]:
        del rest
        return {"count": state["count"] + 1}

    def learnt(self, state: dict[str, int], members: Sequence[Member]) -> list[Learnt]:
        return [Learnt(member.model, 1.0, 1.0, state["count"]) for member in members]


class NotANumber(Counting):
    def learnt(self, state: dict[str, int], members: Sequence[Member]) -> list[Learnt]:
        return [row._replace(weight=math.nan) for row in super().learnt(state, members)]


class Negative(Counting):
    def learnt(self, state: dict[str, int], members: Sequence[Member]) -> list[Learnt]:
        return [row._replace(weight=-1.0) for row in super().learnt(state, members)]


class Stranger(Counting):
    def select(self, state: Any, members: Sequence[Member], ask: Any, u: float) -> Sequence[str]:
        return [*super().select(state, members, ask, u), "stranger"]


class Raising(Counting):
    def combine(self, state: Any, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
        raise KeyError("no such thing")


class Hanging(Counting):
    def combine(self, state: Any, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
        time.sleep(3600.0)
        return super().combine(state, members, outputs)
