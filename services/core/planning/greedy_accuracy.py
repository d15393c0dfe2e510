"""The greedy solver where accuracy is the goal: the cheapest plan that carries the load, upgraded as far as resources allow.

Where everybody's most accurate choice does not fit, resources get prices that rise until the choices nearly do (`greedy.Prices`). So
resources go where they bring most accuracy. What still does not fit is moved, group by group. A last pass spends the room that is left.
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
LEVELS = 24  # how many numbers of instances of one variant are tried
_MOST = 6  # candidates that are tried by each measure, where a group has many


class PackingState(NamedTuple):
    """All that placing some groups may change."""

    counts: list[int]
    given: list[dict[int, float]]
    given_by: list[float]
    room: Any


class CandidateArrays(NamedTuple):
    """What never changes, as arrays over candidates.

    stays, takes: what an instance that runs, and a fresh one, takes of each row. stay_price, take_price: their prices.
    """

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
    """Ways to serve one group, one in each row.

    counts: instances to add of each candidate. use: what they take of each row. flows: items/s that each candidate gives.

    carried: items/s; worth: the same times accuracy; price: of the instances; enough: there are as many as the group must have.
    """

    counts: Any
    use: Any
    flows: Any
    carried: Any
    worth: Any
    price: Any
    enough: Any


def arrays_of(program: Program) -> CandidateArrays:
    """The arrays of this programme."""
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
    """Numbers of instances to try, one trial in each row: none; of one variant; of one variant, and of a less accurate one for the rest."""
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
    """A plan while it is built: who gives how much to which group.

    A group is served by what others leave of shared instances, and by instances of its own, of at most two variants: some of the more
    accurate one, and of the other what carries the rest. All trials are evaluated together, in arrays.
    counts: instances by candidate. room: what is left of each row, negative where overdrawn. A new one has the instances that must stay.
    """

    def __init__(self, program: Program, arrays: CandidateArrays, same: float) -> None:
        """same: accuracies that differ by less count as equal."""
        self._program, self._arrays, self._same = program, arrays, same
        self.counts = list(arrays.low)
        self.room = np.ones(len(program.rows))
        self._given: list[dict[int, float]] = [{} for _ in program.groups]
        self._given_by = [0.0] * len(program.home)
        self._settle()

    def set(self, counts: Sequence[int]) -> None:
        """Set the counts. Instances serve what they can, and those that serve nothing are removed."""
        self.counts = [max(n, low) for n, low in zip(counts, self._arrays.low, strict=True)]
        served = deliver(self._program, self.counts)
        self._given = served.given
        self._given_by = [served.of(c) for c in range(len(self.counts))]
        order = sorted((c for c, n in enumerate(self.counts) if n), key=lambda c: float(self._arrays.worth[c]))
        self._shrink(order)
        self._settle()

    def fits(self) -> bool:
        return bool((self.room >= -_EPS).all())

    def overdrawn(self, g: int) -> float:
        """How much group g takes of the rows that are overdrawn."""
        over = self.room < -_EPS
        return sum(
            self.counts[c] * float(self._arrays.takes[c][over].sum()) for c, x in self._given[g].items() if x > 0
        )

    def cost(self) -> float:
        return cost(self._program, self.counts)

    def serves(self, groups: Sequence[int]) -> PlanValue:
        """The value of what these groups get, with the cost of the whole plan."""
        worths = self._arrays.worths
        flows = [(x, worths[c]) for g in groups for c, x in self._given[g].items()]
        carried = sum(x for x, _ in flows)
        worth = sum(x * value for x, value in flows)
        return PlanValue(carried, worth / carried if carried > 0 else 0.0, self.cost())

    def state(self, groups: Sequence[int]) -> PackingState:
        return PackingState(self.counts[:], [self._given[g].copy() for g in groups], self._given_by[:], self.room)

    def restore(self, groups: Sequence[int], state: PackingState) -> None:
        """Go back to this state. Only these groups may have changed since."""
        self.counts, given, self._given_by, self.room = state
        for g, of in zip(groups, given, strict=True):
            self._given[g] = of

    def take_back(self, g: int) -> None:
        """Take back what group g was given, and unload what no other group needs."""
        for c, amount in self._given[g].items():
            self._given_by[c] -= amount
        self._given[g] = {}
        self._shrink(self._program.groups[g].candidates, without=g)
        self._settle()

    def place(self, g: int, prices: Any, *, bounded: bool) -> bool:
        """Serve group g: first as much as possible, then as accurately as is worth the price of the resources, then as cheaply as possible.

        bounded: within the room. False when not all of it could be carried.
        """
        group = self._program.groups[g]
        of = self._worth_trying(g)
        base = [self.counts[c] for c in of]
        spare = [
            max(0.0, n * self._arrays.rates[c] - self._given_by[c]) if n else 0.0 for n, c in zip(base, of, strict=True)
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

    def _worth_trying(self, g: int) -> list[int]:
        """The candidates of group g that are worth trying, most accurate first."""
        arrays, found = self._arrays, list(self._program.groups[g].candidates)
        if len(found) > 3 * _MOST:
            weight = {c: float(arrays.takes[c].sum()) + _EPS for c in found}
            measures = (
                lambda c: -arrays.worth[c],
                lambda c: weight[c] / arrays.rate[c],
                lambda c: arrays.take_price[c] / arrays.rate[c],
                lambda c: -arrays.worth[c] * arrays.rate[c] / weight[c],
                lambda c: weight[c],
            )
            kept = {c for measure in measures for c in sorted(found, key=measure)[:_MOST]}
            found = [c for c in found if c in kept or self.counts[c]]
        return sorted(found, key=arrays.worths.__getitem__, reverse=True)

    def _trials(self, g: int, of: list[int], base: list[int], spare: list[float]) -> "Trials":
        """Ways to serve group g from here. They are kept, since they are needed again at other prices."""
        key = (g, tuple(base), tuple(spare))
        found = self._arrays.trials.get(key)
        if found is None:
            found = self._arrays.trials[key] = self._tried(g, of, np.array(base, dtype=np.int64), np.array(spare))
        return found

    def _tried(self, g: int, of: list[int], base: Any, spare: Any) -> "Trials":
        arrays, group = self._arrays, self._program.groups[g]
        counts = _numbers(arrays.rate[of], np.maximum(0, arrays.most[of] - base), spare, group.need)
        runs = arrays.runs[of]
        kept = np.minimum(base + counts, runs) - np.minimum(base, runs)
        fresh = counts - kept
        able = np.minimum(np.cumsum(spare + counts * arrays.rate[of], axis=1), group.need)
        flows = np.diff(able, axis=1, prepend=0.0)
        return Trials(
            counts,
            kept @ arrays.stays[of] + fresh @ arrays.takes[of],
            flows,
            able[:, -1],
            flows @ arrays.worth[of],
            kept @ arrays.stay_price[of] + fresh @ arrays.take_price[of],
            base.sum() + counts.sum(axis=1) >= group.least,
        )

    def _shrink(self, candidates: Sequence[int], without: int = -1) -> None:
        for c in candidates:
            needed = max(self._arrays.low[c], ceil(self._given_by[c] / float(self._arrays.rate[c]) - 1e-6))
            for h in self._program.home[c]:
                group = self._program.groups[h]
                if h != without and group.least:
                    able = sum(self.counts[other] for other in group.candidates)
                    needed = max(needed, self.counts[c] - max(0, able - group.least))
            self.counts[c] = min(self.counts[c], needed)

    def _settle(self) -> None:
        arrays, counts = self._arrays, np.array(self.counts, dtype=np.int64)
        kept = np.minimum(counts, arrays.runs)
        self.room = 1.0 - kept @ arrays.stays - (counts - kept) @ arrays.takes


_ROUNDS = 14  # of prices
_SWEEPS = 4
_FIRST = 6  # groups that are tried before each other group
_SCALE = 0.05  # of the whole load times accuracy: the first price of a resource that is overdrawn by its whole total


class GreedyAccuracySolver:
    """steps: how many branches the search for the cheapest plan looks at, for one group."""

    name = "greedy"

    def __init__(self, *, steps: int = 100) -> None:
        self._cheapest = GreedySolver(steps=steps)

    def solve(self, problem: PlanningProblem) -> Plan:
        """A plan that keeps every constraint, usually near the most accurate. Its "infeasible" is no proof, only says that none was found."""
        return self.solve_program(compile_program(problem))

    def solve_program(self, program: Program) -> Plan:
        """The same for a compiled problem.

        It begins with up to three plans: everybody's best choice at prices of resources, the cheapest plan, and what runs. It improves
        each, one group after the other and in pairs, in the room that the others leave. The best one is the answer.
        """
        arrays = arrays_of(program)
        groups = [g for g, group in enumerate(program.groups) if group.candidates]
        groups.sort(key=lambda g: (len(program.groups[g].candidates), -program.groups[g].need))
        started: list[AccuracyPacking] = []
        prices = Prices(len(program.rows))
        priced = self._at_prices(program, arrays, groups, prices)
        if priced is not None:
            started.append(priced)
        if priced is None or any(prices.values):
            cheapest = AccuracyPacking(program, arrays, SAME)
            cheapest.set(self._cheapest.pack(program).packing.counts)
            started.append(cheapest)
        if any(one.high for one in program.running):
            present = AccuracyPacking(program, arrays, SAME)
            present.set([one.high for one in program.running])
            if present.fits():
                started.append(present)
        best: AccuracyPacking | None = None
        for packing in started:
            self._improve(program, packing, groups, prices)
            if best is None or value_of(program, packing.counts).beats(value_of(program, best.counts)):
                best = packing
        return self._concluded(program, best.counts if best is not None else arrays.low)

    def _at_prices(
        self, program: Program, arrays: Any, groups: Sequence[int], prices: Prices
    ) -> AccuracyPacking | None:
        """Every group's best choice, at prices of resources at which all fit. None when no such prices were found."""
        import numpy as np  # noqa: PLC0415

        scale = _SCALE * sum(group.need for group in program.groups)
        best: AccuracyPacking | None = None
        for _ in range(_ROUNDS):
            packing = AccuracyPacking(program, arrays, SAME)
            now = np.array(prices.values)
            whole = not [g for g in groups if not packing.place(g, now, bounded=False)]
            room = packing.room.tolist()
            if not packing.fits():
                whole = self._move(packing, groups, now) and whole
            if packing.fits() and whole:
                if best is None or value_of(program, packing.counts).beats(value_of(program, best.counts)):
                    best = packing
                if not any(prices.values) and min(room, default=0.0) >= 0:
                    return best
            prices.settle(scale, room)
        return best

    @staticmethod
    def _move(packing: AccuracyPacking, groups: Sequence[int], prices: Any) -> bool:
        """Move groups, one after the other, to where there is room. Returns whether all of them found some."""
        whole = True
        for g in sorted(groups, key=packing.overdrawn, reverse=True):
            if packing.fits():
                break
            if packing.overdrawn(g) > 0:
                packing.take_back(g)
                whole &= packing.place(g, prices, bounded=True)
        return whole

    def _improve(self, program: Program, packing: AccuracyPacking, groups: Sequence[int], prices: Prices) -> None:
        """Choose again for one group after the other, and for pairs, in the room that the others leave, as long as the plan gets better."""
        import numpy as np  # noqa: PLC0415

        free, priced = np.zeros(len(program.rows)), np.array(prices.values)
        for now in (priced, *[free] * _SWEEPS):
            changed = False
            for g in groups:
                changed |= self._place_again(packing, (g,), now)
            if now is free:
                if not changed:
                    changed = self._exchange(program, packing, groups, (free, priced))
                packing.set(packing.counts)
                if not changed:
                    return

    @staticmethod
    def _place_again(packing: AccuracyPacking, groups: Sequence[int], prices: Any) -> bool:
        """Choose again for these groups, in this order. Returns whether the plan is better; otherwise it is unchanged."""
        before, kept = packing.serves(groups), packing.state(groups)
        for g in groups:
            packing.take_back(g)
        for g in groups:
            packing.place(g, prices, bounded=True)
        if packing.fits() and packing.serves(groups).beats(before):
            return True
        packing.restore(groups, kept)
        return False

    def _exchange(
        self, program: Program, packing: AccuracyPacking, groups: Sequence[int], prices: Sequence[Any]
    ) -> bool:
        """Place the groups that have lost most accuracy before each other group. Returns whether the plan is better."""
        if not program.rows:
            return False
        lost = {g: program.groups[g].need * (1 - packing.serves((g,)).accuracy) for g in groups}
        first = sorted(groups, key=lambda g: -lost[g])[:_FIRST]
        return any([self._place_again(packing, (g, h), now) for g in first for h in groups if h != g for now in prices])  # noqa: C419

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
