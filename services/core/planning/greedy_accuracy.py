"""A plan while the greedy solver of the accuracy goal builds it: who gives how much to which group, and the best way to serve one.

A group is served by what others leave of shared instances, and by instances of its own of at most two variants: as many of the
more accurate one as a trial says, and of the other what carries the rest. All trials are looked at together, in arrays.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from services.core.cost import merit
from services.core.planning.flow import SAME, PlanValue, deliver, value_of
from services.core.planning.greedy import GreedySolver, Prices
from services.core.planning.plan import Plan, conclude
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import Program, compile_program, cost

_EPS = 1e-9
LEVELS = 24  # numbers of instances of one variant that are tried
_MOST = 6  # candidates by each measure that are tried, where a group has many


class PackingState(NamedTuple):
    """All that serving some groups may change."""

    counts: list[int]
    given: list[dict[int, float]]
    given_by: list[float]
    room: Any


class CandidateArrays(NamedTuple):
    """What never changes, as arrays over candidates: of instances that run and fresh ones, weights (candidate, row) and prices."""

    stays: Any
    takes: Any
    stay_price: Any
    take_price: Any
    rate: Any
    worth: Any
    runs: Any
    most: Any
    low: list[int]
    rates: list[float]
    worths: list[float]
    trials: dict[Any, "Trials"]


class Trials(NamedTuple):
    """Ways to serve one group, a row each: instances to add of each candidate, what they take of the rows, who gives how much.

    carried: items/s; worth: the same times accuracy; price: of the instances; enough: there are as many as the group must have.
    """

    counts: Any
    use: Any
    flows: Any
    carried: Any
    worth: Any
    price: Any
    enough: Any


def tables(program: Program) -> CandidateArrays:
    """Of this programme."""
    size, rows = len(program.home), len(program.rows)
    stays, takes = np.zeros((size, rows)), np.zeros((size, rows))
    for c, (running, fresh) in enumerate(zip(program.running, program.fresh, strict=True)):
        for row, weight in running.weights:
            stays[c, row] = weight
        for row, weight in fresh.weights:
            takes[c, row] = weight
    return CandidateArrays(
        stays,
        takes,
        np.array([one.price for one in program.running]),
        np.array([one.price for one in program.fresh]),
        np.array([one.rate for one in program.fresh]),
        np.array([merit(one.accuracy) for one in program.problem.candidates]),
        np.array([one.high for one in program.running]),
        np.array([a.high + b.high for a, b in zip(program.running, program.fresh, strict=True)]),
        [a.low + b.low for a, b in zip(program.running, program.fresh, strict=True)],
        [one.rate for one in program.fresh],
        [merit(one.accuracy) for one in program.problem.candidates],
        {},
    )


def _numbers(rate: Any, most: Any, spare: Any, need: float) -> Any:
    """Instances to add, a row each: none; of one variant; of one, and of a less accurate one what carries the rest."""
    size = len(rate)
    rest = max(0.0, need - float(spare.sum()))
    blocks = [np.zeros((1, size), dtype=np.int64)]
    for i in range(size):
        alone = int(min(most[i], max(1, ceil(need / rate[i] - _EPS))))
        if alone <= 0:
            continue
        tried = np.arange(1, alone + 1) if alone <= LEVELS else np.linspace(1, alone, LEVELS).round().astype(np.int64)
        rows = np.zeros((size - i, len(tried), size), dtype=np.int64)
        rows[:, :, i] = tried
        others = np.arange(i + 1, size)
        if others.size:
            lacking = np.maximum(0.0, rest - tried * rate[i])
            more = np.minimum(most[others, None], np.ceil(lacking[None, :] / rate[others, None] - _EPS)).astype(
                np.int64
            )
            rows[others - i, :, others] = more
        blocks.append(rows.reshape(-1, size))
    return np.concatenate(blocks)


class AccuracyPacking:
    """counts: instances by candidate. room: what is left of each row, negative when overdrawn. Starts with what is held."""

    def __init__(self, program: Program, facts: CandidateArrays, same: float) -> None:
        """same: accuracies that are closer to each other count as equal."""
        self._program, self._facts, self._same = program, facts, same
        self.counts = list(facts.low)
        self.room = np.ones(len(program.rows))
        self._given: list[dict[int, float]] = [{} for _ in program.groups]
        self._given_by = [0.0] * len(program.home)
        self._settle()

    def set(self, counts: Sequence[int]) -> None:
        """So many instances; they serve what they can, and what then serves nothing goes."""
        self.counts = [max(n, low) for n, low in zip(counts, self._facts.low, strict=True)]
        served = deliver(self._program, self.counts)
        self._given = served.given
        self._given_by = [served.of(c) for c in range(len(self.counts))]
        order = sorted((c for c, n in enumerate(self.counts) if n), key=lambda c: float(self._facts.worth[c]))
        self._shrink(order)
        self._settle()

    def fits(self) -> bool:
        return bool((self.room >= -_EPS).all())

    def overdrawn(self, g: int) -> float:
        """How much of the rows that are overdrawn group g takes."""
        over = self.room < -_EPS
        return sum(self.counts[c] * float(self._facts.takes[c][over].sum()) for c, x in self._given[g].items() if x > 0)

    def cost(self) -> float:
        return cost(self._program, self.counts)

    def serves(self, groups: Sequence[int]) -> PlanValue:
        """What these groups get, and what everything costs."""
        worths = self._facts.worths
        flows = [(x, worths[c]) for g in groups for c, x in self._given[g].items()]
        carried = sum(x for x, _ in flows)
        worth = sum(x * value for x, value in flows)
        return PlanValue(carried, worth / carried if carried > 0 else 0.0, self.cost())

    def state(self, groups: Sequence[int]) -> PackingState:
        return PackingState(self.counts[:], [self._given[g].copy() for g in groups], self._given_by[:], self.room)

    def restore(self, groups: Sequence[int], state: PackingState) -> None:
        """Back to what it was, if nothing but these groups changed meanwhile."""
        self.counts, given, self._given_by, self.room = state
        for g, of in zip(groups, given, strict=True):
            self._given[g] = of

    def take_back(self, g: int) -> None:
        """Undo what group g was given, and unload what nobody else needs."""
        for c, amount in self._given[g].items():
            self._given_by[c] -= amount
        self._given[g] = {}
        self._shrink(self._program.groups[g].candidates, without=g)
        self._settle()

    def place(self, g: int, prices: Any, *, bounded: bool) -> bool:
        """Serve group g: as much as can be, then as accurately as its resources at these prices are worth it, then cheaply.

        bounded: within the room. False when not all of it could be carried.
        """
        group = self._program.groups[g]
        of = self._in_question(g)
        base = [self.counts[c] for c in of]
        spare = [
            max(0.0, n * self._facts.rates[c] - self._given_by[c]) if n else 0.0 for n, c in zip(base, of, strict=True)
        ]
        trials = self._trials(g, of, base, spare)
        fine = trials.enough
        if bounded:
            fine = fine & (trials.use <= self.room + _EPS).all(axis=1)
        if not fine.any():
            return False
        carried = float(trials.carried[fine].max())
        fine = fine & (trials.carried >= carried - 1e-7 * group.need)
        value = np.where(fine, trials.worth - trials.use @ prices, -np.inf)
        near = value >= value.max() - self._same / 2 * group.need
        best = int(np.argmin(np.where(near, trials.price, np.inf)))
        for c, n, x in zip(of, trials.counts[best].tolist(), trials.flows[best].tolist(), strict=True):
            self.counts[c] += n
            if x > 0:
                self._given[g][c] = x
                self._given_by[c] += x
        self.room = self.room - trials.use[best]
        return carried >= group.need * (1 - 1e-6)

    def _in_question(self, g: int) -> list[int]:
        """The candidates of group g that are worth trying, most accurate first."""
        facts, found = self._facts, list(self._program.groups[g].candidates)
        if len(found) > 3 * _MOST:
            weight = {c: float(facts.takes[c].sum()) + _EPS for c in found}
            measures = (
                lambda c: -facts.worth[c],
                lambda c: weight[c] / facts.rate[c],
                lambda c: facts.take_price[c] / facts.rate[c],
                lambda c: -facts.worth[c] * facts.rate[c] / weight[c],
                lambda c: weight[c],
            )
            kept = {c for measure in measures for c in sorted(found, key=measure)[:_MOST]}
            found = [c for c in found if c in kept or self.counts[c]]
        return sorted(found, key=facts.worths.__getitem__, reverse=True)

    def _trials(self, g: int, of: list[int], base: list[int], spare: list[float]) -> "Trials":
        """Ways to serve group g with what there is; kept, since they are asked for again at other prices."""
        key = (g, tuple(base), tuple(spare))
        found = self._facts.trials.get(key)
        if found is None:
            found = self._facts.trials[key] = self._tried(g, of, np.array(base, dtype=np.int64), np.array(spare))
        return found

    def _tried(self, g: int, of: list[int], base: Any, spare: Any) -> "Trials":
        facts, group = self._facts, self._program.groups[g]
        counts = _numbers(facts.rate[of], np.maximum(0, facts.most[of] - base), spare, group.need)
        runs = facts.runs[of]
        kept = np.minimum(base + counts, runs) - np.minimum(base, runs)
        fresh = counts - kept
        able = np.minimum(np.cumsum(spare + counts * facts.rate[of], axis=1), group.need)
        flows = np.diff(able, axis=1, prepend=0.0)
        return Trials(
            counts,
            kept @ facts.stays[of] + fresh @ facts.takes[of],
            flows,
            able[:, -1],
            flows @ facts.worth[of],
            kept @ facts.stay_price[of] + fresh @ facts.take_price[of],
            base.sum() + counts.sum(axis=1) >= group.least,
        )

    def _shrink(self, candidates: Sequence[int], without: int = -1) -> None:
        for c in candidates:
            needed = max(self._facts.low[c], ceil(self._given_by[c] / float(self._facts.rate[c]) - 1e-6))
            for h in self._program.home[c]:
                group = self._program.groups[h]
                if h != without and group.least:
                    able = sum(self.counts[other] for other in group.candidates)
                    needed = max(needed, self.counts[c] - max(0, able - group.least))
            self.counts[c] = min(self.counts[c], needed)

    def _settle(self) -> None:
        facts, counts = self._facts, np.array(self.counts, dtype=np.int64)
        kept = np.minimum(counts, facts.runs)
        self.room = 1.0 - kept @ facts.stays - (counts - kept) @ facts.takes


# -- The greedy solver where accuracy is the goal: the cheapest plan that carries the load, upgraded as far as
# resources go.

_ROUNDS = 14  # of prices
_SWEEPS = 4
_FIRST = 6  # groups that go before others for a trial
_SCALE = 0.05  # of the whole load times accuracy: the first price of a resource that is short by all there is


class GreedyAccuracySolver:
    """steps: of the search for the cheapest plan, for one group."""

    name = "greedy"

    def __init__(self, *, steps: int = 100) -> None:
        self._cheapest = GreedySolver(steps=steps)

    def solve(self, problem: PlanningProblem) -> Plan:
        """A plan that keeps every constraint, usually near the most accurate. Its "infeasible" is no proof: none was found."""
        return self.solve_program(compile_program(problem))

    def solve_program(self, program: Program) -> Plan:
        """The same, of a compiled problem."""
        facts = tables(program)
        groups = [g for g, group in enumerate(program.groups) if group.candidates]
        groups.sort(key=lambda g: (len(program.groups[g].candidates), -program.groups[g].need))
        started: list[AccuracyPacking] = []
        prices = Prices(len(program.rows))
        priced = self._priced(program, facts, groups, prices)
        if priced is not None:
            started.append(priced)
        if priced is None or any(prices.values):
            cheapest = AccuracyPacking(program, facts, SAME)
            cheapest.set(self._cheapest.pack(program).packing.counts)
            started.append(cheapest)
        if any(one.high for one in program.running):
            present = AccuracyPacking(program, facts, SAME)
            present.set([one.high for one in program.running])
            if present.fits():
                started.append(present)
        best: AccuracyPacking | None = None
        for deal in started:
            self._improve(program, deal, groups, prices)
            if best is None or value_of(program, deal.counts).beats(value_of(program, best.counts)):
                best = deal
        return self._concluded(program, best.counts if best is not None else facts.low)

    def _priced(self, program: Program, facts: Any, groups: Sequence[int], prices: Prices) -> AccuracyPacking | None:
        """Everybody's best choice at prices at which they fit; None when none was found that do."""
        import numpy as np  # noqa: PLC0415

        scale = _SCALE * sum(group.need for group in program.groups)
        best: AccuracyPacking | None = None
        for _ in range(_ROUNDS):
            deal = AccuracyPacking(program, facts, SAME)
            now = np.array(prices.values)
            whole = not [g for g in groups if not deal.place(g, now, bounded=False)]
            room = deal.room.tolist()
            if not deal.fits():
                whole = self._moved(deal, groups, now) and whole
            if deal.fits() and whole:
                if best is None or value_of(program, deal.counts).beats(value_of(program, best.counts)):
                    best = deal
                if not any(prices.values) and min(room, default=0.0) >= 0:
                    return best
            prices.settle(scale, room)
        return best

    @staticmethod
    def _moved(deal: AccuracyPacking, groups: Sequence[int], prices: Any) -> bool:
        """Move groups, one after the other, to what there is room for; whether all of them found some."""
        whole = True
        for g in sorted(groups, key=deal.overdrawn, reverse=True):
            if deal.fits():
                break
            if deal.overdrawn(g) > 0:
                deal.take_back(g)
                whole &= deal.place(g, prices, bounded=True)
        return whole

    def _improve(self, program: Program, deal: AccuracyPacking, groups: Sequence[int], prices: Prices) -> None:
        """Choose anew for one group after the other, and for pairs, in the room that the others leave, while that is worth something."""
        import numpy as np  # noqa: PLC0415

        free, priced = np.zeros(len(program.rows)), np.array(prices.values)
        for now in (priced, *[free] * _SWEEPS):
            changed = False
            for g in groups:
                changed |= self._anew(deal, (g,), now)
            if now is free:
                if not changed:
                    changed = self._exchanged(program, deal, groups, (free, priced))
                deal.set(deal.counts)
                if not changed:
                    return

    @staticmethod
    def _anew(deal: AccuracyPacking, groups: Sequence[int], prices: Any) -> bool:
        """Choose anew for these groups, the first one first; whether that was worth it."""
        before, kept = deal.serves(groups), deal.state(groups)
        for g in groups:
            deal.take_back(g)
        for g in groups:
            deal.place(g, prices, bounded=True)
        if deal.fits() and deal.serves(groups).beats(before):
            return True
        deal.restore(groups, kept)
        return False

    def _exchanged(self, program: Program, deal: AccuracyPacking, groups: Sequence[int], prices: Sequence[Any]) -> bool:
        """Let those that have lost most go before another one each."""
        if not program.rows:
            return False
        lost = {g: program.groups[g].need * (1 - deal.serves((g,)).accuracy) for g in groups}
        first = sorted(groups, key=lambda g: -lost[g])[:_FIRST]
        return any([self._anew(deal, (g, h), now) for g in first for h in groups if h != g for now in prices])  # noqa: C419

    def _concluded(self, program: Program, counts: Sequence[int]) -> Plan:
        served = deliver(program, counts)
        short = {}
        for g, group in enumerate(program.groups):
            lack = group.need - sum(served.given[g].values())
            missing = max(0.0, lack) if lack > 1e-6 * group.need else 0.0
            instances = max(0, group.least - sum(counts[c] for c in group.candidates))
            if missing or instances:
                short[g] = (missing, instances)
        return conclude(program, counts, solver=self.name, status="feasible", short=short)


def better(program: Program, one: Plan, other: Plan) -> bool:
    """Whether the first of two plans is worth more."""
    names = [candidate.name for candidate in program.problem.candidates]
    ours, theirs = (value_of(program, [plan.instances[name] for name in names]) for plan in (one, other))
    return ours.beats(theirs)
