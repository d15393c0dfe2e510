"""The policies that come with the system: exp3, exp4, majority and weighted. Pure.

Clipper (paper 002, sections 5.1 and 5.2) takes exp3 and exp4 from Auer, Cesa-Bianchi, Freund and Schapire, "The nonstochastic multiarmed
bandit problem", SIAM J. Comput. 32(1), 2002. Weights are kept as logarithms, the best one as 0.

No weight is below 1/1000 (exp3) or 1/100 (exp4) of the best one. Without a bound, a model that failed for a day needs a day to return; this
way it returns after ln(bound) / (eta x difference of the losses) feedbacks at most, however long it failed. Herbster and Warmuth ("Tracking
the best expert", Machine Learning 32, 1998) share a part of all weights at each step to the same end, and Auer et al. do it for bandits
(Exp3.S, section 8). A bound does the same and leaves the paper's update exact for all weights above it. Exp3 spends about this share of its
queries on each model at the bound, so its bound is lower; a hundredth of a vote changes an answer only where the others nearly tie.
`benches/ensemble.py regret --bounds` measures others.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bus.codec import decode, encode
from bus.messages.catalog import TARGETS, Ensemble
from bus.messages.public import Requirements
from services.core.ensemble.base import Combined, EnsemblePolicy, Learnt, Member, Outputs
from services.core.ensemble.outputs import combined, losses

SPREADS = {"exp3": math.log(1000.0), "exp4": math.log(100.0)}  # between the logarithms of the best and the least weight
SURE = 0.999  # the largest accuracy that counts: none is certain, and log-odds have no end
LEAST = 0.01  # the least weight of a member, where the log-odds of its accuracy are smaller or negative
KEPT = math.log(1000.0)  # of the distance of a model that is no member, at most
MOST_ABSENT = 32  # such models in a state: those that were last linked
RAREST = 1e-9  # probability: what is rarer falls by as much


class MemberWeights(Struct, frozen=True, array_like=True):
    """What feedback has taught, by model. logs: logarithms of weights, 0 of the best member. counts: feedbacks that a model's output got."""

    logs: dict[str, float]
    counts: dict[str, int]


class _Weighing:
    """What all of them share: a weight for each model, and all models are asked."""

    name = ""
    _last: tuple[MemberWeights, Sequence[Member], dict[str, float], list[Learnt]] | None = None

    def init(self, members: Sequence[Member]) -> MemberWeights:
        return MemberWeights({member.model: 0.0 for member in members}, {})

    def select(self, state: MemberWeights, members: Sequence[Member], ask: Requirements, u: float) -> Sequence[str]:
        del state, ask, u
        return [member.model for member in members]

    def combine(self, state: MemberWeights, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
        return combined(self._now(state, members)[0] if len(outputs) > 1 else {}, members, outputs)

    def observe(
        self,
        state: MemberWeights,
        members: Sequence[Member],
        label: Any,
        outputs: Mapping[str, Outputs],
        p: Mapping[str, float],
    ) -> MemberWeights:
        """Raises BadLabel; the state is as before then.

        A model that was no member at the prediction, since it was linked later or is linked no more, keeps its distance to the best member.
        """
        lost = losses(label, members, outputs)
        logs = _logs(state, members)
        top = max(logs.values())
        absent = [model for model in state.logs if model not in logs][-MOST_ABSENT:]
        kept = {model: min(max(state.logs[model] - top, -KEPT), KEPT) for model in absent}
        counts = {model: state.counts.get(model, 0) + (model in lost) for model in (*absent, *logs)}
        return MemberWeights(kept | self._taught(logs, lost, p), counts)

    def learnt(self, state: MemberWeights, members: Sequence[Member]) -> list[Learnt]:
        return self._now(state, members)[1]

    def dump(self, state: MemberWeights) -> bytes:
        return encode(state)

    def load(self, data: bytes) -> MemberWeights:
        """Raises BadMessage. A number that is not finite counts as the best weight, since a sum with it would mean nothing."""
        state = decode(MemberWeights, data)
        logs = {model: log if math.isfinite(log) else 0.0 for model, log in state.logs.items()}
        return MemberWeights(logs, state.counts)

    def _now(self, state: MemberWeights, members: Sequence[Member]) -> tuple[dict[str, float], list[Learnt]]:
        """The shares, and what is known. Those asked for last are kept: each query asks for them, and they are the same until there is feedback."""
        last = self._last
        if last is None or last[0] is not state or last[1] is not members:
            shares, counts = self._shares(state, members), state.counts
            rows = [Learnt(model, one, self._probability(one), counts.get(model, 0)) for model, one in shares.items()]
            last = self._last = (state, members, shares, rows)
        return last[2:]

    def _shares(self, state: MemberWeights, members: Sequence[Member]) -> dict[str, float]:
        """By model, of the sum of all members' weights."""
        return _softmax(_logs(state, members))

    def _probability(self, share: float) -> float:
        """With which a member of this share is asked."""
        del share
        return 1.0

    def _taught(self, logs: dict[str, float], lost: Mapping[str, float], p: Mapping[str, float]) -> dict[str, float]:
        """The logarithms after these losses. Policies with fixed weights keep them."""
        del lost, p
        return logs


class _Learning(_Weighing):
    """What those share that learn. eta: at which rate. spread: between the logarithms of the best and the least weight."""

    def __init__(self, eta: float = 0.1, spread: float | None = None) -> None:
        self.eta = eta
        self.spread = SPREADS[self.name] if spread is None else spread


class Exp4(_Learning):
    """All members are asked. The answer is Σ s_i y_i / Σ s_i; each member whose output is known: ln s_i −= eta · L_i (section 5.2).

    A member whose output is missing counts as an average one of those that are there: it loses their mean loss. If it lost nothing, one that
    never answers would rise above all others, until they are equal at the bound. Losses still add up in any order.
    """

    name = "exp4"

    def _taught(self, logs: dict[str, float], lost: Mapping[str, float], p: Mapping[str, float]) -> dict[str, float]:
        del p
        usual = sum(lost.values()) / len(lost) if lost else 0.0
        return _bounded({model: log - self.eta * lost.get(model, usual) for model, log in logs.items()}, self.spread)


class Exp3(_Learning):
    """One member is asked, with probability p_i = s_i / Σ s. After its loss: ln s_i −= eta · L / p_i (section 5.1).

    p_i is that of the prediction, since the weights may have changed before its feedback came. A member without one was not asked.
    """

    name = "exp3"

    def select(self, state: MemberWeights, members: Sequence[Member], ask: Requirements, u: float) -> Sequence[str]:
        del ask
        shares = self._now(state, members)[0]
        upto = 0.0
        for model in sorted(shares):  # dispatchers may list the members in another order
            upto += shares[model]
            if u < upto:
                return [model]
        return [max(shares, key=shares.__getitem__)]  # a sum of shares may be a little below 1

    def _probability(self, share: float) -> float:
        return share

    def _taught(self, logs: dict[str, float], lost: Mapping[str, float], p: Mapping[str, float]) -> dict[str, float]:
        changed = dict(logs)
        for model, loss in lost.items():
            if p.get(model, 0.0) > 0.0:
                changed[model] -= self.eta * loss / max(p[model], RAREST)
        return _bounded(changed, self.spread)


class Majority(_Weighing):
    """All members are asked and have equal votes. Feedback is counted and changes nothing."""

    name = "majority"

    def _shares(self, state: MemberWeights, members: Sequence[Member]) -> dict[str, float]:
        del state
        return {member.model: 1.0 / len(members) for member in members}


class Weighted(_Weighing):
    """All members are asked. Weights are fixed: the log-odds ln(a / (1 − a)) of the accuracy a that each model has measured.

    These are the best weights for votes of independent models (Nitzan and Paroush, Int. Econ. Rev. 23(2), 1982). For mae and rmse the
    weight is one over the error. A model that has measured no accuracy has the mean weight.
    """

    name = "weighted"

    def _shares(self, state: MemberWeights, members: Sequence[Member]) -> dict[str, float]:
        del state
        known = {member.model: _trust(member) for member in members if member.accuracy is not None}
        mean = sum(known.values()) / len(known) if known else 1.0
        total = sum(known.values()) + mean * (len(members) - len(known))
        return {member.model: known.get(member.model, mean) / total for member in members}


def _trust(member: Member) -> float:
    accuracy = min(max(member.accuracy or 0.0, 1.0 - SURE), SURE)
    odds = accuracy / (1.0 - accuracy)
    return odds if member.metric in TARGETS else max(LEAST, math.log(odds))


def _logs(state: MemberWeights, members: Sequence[Member]) -> dict[str, float]:
    """Of these members. One that the state does not know has the mean of the weights of the others."""
    logs = state.logs
    known = [logs[member.model] for member in members if member.model in logs]
    top = max(known, default=0.0)
    mean = top + math.log(sum(math.exp(log - top) for log in known) / len(known)) if known else 0.0
    return {member.model: logs.get(member.model, mean) for member in members}


def _softmax(logs: Mapping[str, float]) -> dict[str, float]:
    top = max(logs.values(), default=0.0)
    weights = {model: math.exp(log - top) for model, log in logs.items()}
    total = sum(weights.values())
    return {model: weight / total for model, weight in weights.items()}


def _bounded(logs: Mapping[str, float], spread: float) -> dict[str, float]:
    """The best one becomes 0, none is below -spread."""
    top = max(logs.values(), default=0.0)
    return {model: max(log - top, -spread) for model, log in logs.items()}


def make_policy(selection: Ensemble) -> EnsemblePolicy[Any] | None:
    """The built-in policy of this name. None: there is none, or it is a user's "module:Class"."""
    if selection.policy == "exp3":
        return Exp3(selection.eta)
    if selection.policy == "exp4":
        return Exp4(selection.eta)
    if selection.policy == "majority":
        return Majority()
    return Weighted() if selection.policy == "weighted" else None
