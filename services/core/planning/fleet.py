"""One plan for all workers: how many machines of each kind, and how many instances of each variant on them. An integer programme.

    minimise   the bill of the machines that may be added, and the shares of instances on the others; or, for the goal "accuracy", the
               accuracy that is lost; in any case first the load that is not carried, and last the changes
    subject to Σ_v x_vkj + s_kj = 1                                      layer j of class k goes to variants that may answer it; s_kj is missing
               Σ_kj a_vkj x_vkj <= N_v                                   instances of v
               Σ_v R_vr N_v <= R_pr M_p, N_v <= most_v M_p               memory and cores of the machines of pool p
               Σ_v C_v Σ_kj a_vkj x_vkj <= C_p M_p                       cores that compute at the same time

after the programme of INFaaS (Romero et al., section 4.2.1) and the one of Proteus (Ahmad et al., ASPLOS 2024), which plans all devices
together. The layers of a class are what the first instances carry, what overflows to the next ones, and so on; the last one is the reserve,
for bursts. So an accurate variant may carry most of the load while a quick one stands by. `services.core.planning.capacity` gives a. Reserved instances carry
nothing of the classes. Each has the time of its cores to itself; where there is no such time and no machine may be added, it is there nevertheless.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf
from typing import Any, NamedTuple

from msgspec.structs import replace

from services.core.planning.problem import ELASTIC_SHARE, LIFE_S, ClassNeed, FleetCounts, FleetPlan, FleetProblem

MISSING = 1000.0  # what the whole load missing counts, in units of the dearest machine
RESERVE_MISSING = 0.2  # the same of the reserve, as part of that
GAIN = 0.002  # of mean accuracy, or as much load carried: what a new plan must gain
UNSERVED = 10.0  # what a query that is not carried counts, beside an accuracy of at most 1
UNRESERVED = 0.1
INACCURATE = 0.5  # what one whole of accuracy less than the mean that is wanted counts, of the same load missing
NEVER = 100.0  # times the whole load missing: what giving up a reserved instance counts that is there
SHARED = 2.0  # what a reserved instance counts whose cores compute for others, too, in units of the dearest machine: more than one more of these
EASY = 0.6  # of the time of machines that are paid anyway: what better variants may take of it, which slow each other down, and look like load
CROWDED = 1.0  # what an instance's time beyond that counts: more than all accuracy, less than load that is missing
FEW = 3  # variants of a class that are considered beside what the relaxed programme takes
MANY = 150  # variants; of more, a plan that may miss load looks at some
ROUNDS = 12  # of choosing variants for the plan with parts; 3 to 6 do
LEAST_GAIN = 1e-9  # of a variant in such a plan; less is the solver's noise
PART = 1e-6  # of an instance: less is the solver's noise


class Unsolved(Exception):
    """HiGHS found no plan within the limits."""


class Infeasible(Unsolved):
    """There is none."""


class Solution(NamedTuple):
    """x: by column; None: there is none. fun: of x; bound: no solution is below it; gap: between both, relative. status: "infeasible",
    "unsolved", or empty: found, or ended by a limit. prices: what one more of the rows of a name would cost, where nothing is whole.
    """

    x: Sequence[float] | None
    fun: float
    bound: float
    gap: float
    status: str
    message: str
    prices: Mapping[Any, float]


class LinearProgram:
    """Columns and rows for HiGHS, some whole; the sum of costs is to be least."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.high: list[float] = []
        self.low: list[float] = []
        self.whole: list[int] = []
        self.at: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []
        self.named: list[Any] = []  # the rows' names

    def column(self, cost: float = 0.0, high: float = float("inf"), low: float = 0.0, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.high.append(high)
        self.low.append(low)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(
        self, entries: Mapping[int, float] | list[tuple[int, float]], low: float, high: float, name: Any = None
    ) -> None:
        number = len(self.bounds)
        self.named.append(name)
        self.bounds.append((low, high))
        self.at.extend((number, column, value) for column, value in dict(entries).items() if value)

    def result(self, options: Mapping[str, Any], start: Mapping[int, float] | None = None) -> Solution:
        """What HiGHS has found within the limits, be it only a bound. options: by HiGHS' names. start: whole columns of a
        solution to begin with (others: 0), of which HiGHS finds the rest. Raises Unsolved where scipy is missing.
        """
        try:
            import numpy as np  # noqa: PLC0415  (a process that only imports this module stays small)
            from scipy.optimize._highspy._core import (  # noqa: PLC0415  (of what is there already, no more is imported: `ControllerEdge`)
                HighsLp,
                HighsModelStatus,
                HighsOptions,
                HighsSolution,
                HighsSparseMatrix,
                HighsVarType,
                MatrixFormat,
                _Highs,
                kHighsInf,
            )
        except ModuleNotFoundError as error:
            raise Unsolved(f"{error}: pip install 'infaas[up]'") from error
        rows, columns, values = (np.array(one) for one in zip(*self.at, strict=True))
        order = np.lexsort((rows, columns))
        programme, matrix = HighsLp(), HighsSparseMatrix()
        programme.num_col_ = matrix.num_col_ = len(self.cost)
        programme.num_row_ = matrix.num_row_ = len(self.bounds)
        matrix.format_ = MatrixFormat.kColwise
        matrix.start_ = np.searchsorted(columns[order], np.arange(len(self.cost) + 1)).astype(np.int32)
        matrix.index_, matrix.value_ = rows[order].astype(np.int32), values[order].astype(np.float64)
        programme.a_matrix_ = matrix
        programme.col_cost_, programme.col_lower_, programme.col_upper_ = map(
            np.array, (self.cost, self.low, self.high)
        )
        programme.row_lower_, programme.row_upper_ = np.array(self.bounds).T
        if any(self.whole):
            programme.integrality_ = [HighsVarType(one) for one in self.whole]
        highs, given = _Highs(), HighsOptions()
        for name, value in {"log_to_console": False, **options}.items():
            setattr(given, name, value)
        highs.passOptions(given)
        highs.passModel(programme)
        if start is not None:
            known = HighsSolution()
            known.col_value = [start.get(column, 0.0) for column in range(len(self.cost))]
            highs.setSolution(known)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        kinds, fun = HighsModelStatus, info.objective_function_value
        limited = status in (kinds.kTimeLimit, kinds.kIterationLimit, kinds.kSolutionLimit)
        found = status == kinds.kOptimal or (any(self.whole) and limited and fun != kHighsInf)
        solution = highs.getSolution()
        prices: dict[Any, float] = {}
        for name, dual in zip(self.named, solution.row_dual, strict=True) if found and not any(self.whole) else ():
            prices[name] = prices.get(name, 0.0) + dual
        return Solution(
            x=solution.col_value if found else None,
            fun=fun,
            bound=info.mip_dual_bound if any(self.whole) else fun,
            gap=info.mip_gap if any(self.whole) else 0.0,
            status="infeasible" if status == kinds.kInfeasible else "" if found or limited else "unsolved",
            message=highs.modelStatusToString(status),
            prices=prices,
        )

    def solve(self, options: Mapping[str, Any], start: Mapping[int, float] | None = None) -> Solution:
        """The result of HiGHS. Raises Unsolved if there is none."""
        result = self.result(options, start)
        if result.x is None:
            if result.status == "infeasible":
                raise Infeasible("there is no plan at all")
            raise Unsolved(f"no plan within the limits: {result.message}")
        return result


def solve_fleet(
    problem: FleetProblem, *, time_limit_s: float | None = 1.0, gap: float = 1e-3, node_limit: int | None = None
) -> FleetPlan:
    """The plan. Raises Unsolved if the limits end the search before HiGHS finds any."""
    if not problem.variants and not problem.needs:  # HiGHS takes no programme without rows
        return FleetPlan(machines=tuple(pool.least for pool in problem.pools), instances=(), missing=())
    limits = {"mip_rel_gap": gap, "time_limit": time_limit_s, "mip_max_nodes": node_limit}
    options = {name: value for name, value in limits.items() if value is not None}
    if problem.strict or len(problem.variants) <= MANY:
        return _solved(problem, options)[0]
    # Of many HiGHS finds nothing good in time. What it would take of each if instances had parts is found at once; few others are in a good plan.
    relaxed = _relaxed(problem)
    few = {v for need in problem.needs for v in _alone(problem, need)[:FEW]}
    chosen = [v for v, one in enumerate(problem.variants) if one.running or relaxed.instances[v] or v in few]
    place = {v: i for i, v in enumerate(chosen)}
    try:
        found = _solved(_narrowed(problem, place), options, start=[relaxed.instances[v] for v in chosen])[0]
    except Infeasible:  # with these; it may be with others
        return _solved(problem, options)[0]
    behind = (found.objective - relaxed.objective) / max(abs(found.objective), PART)
    return replace(_widened(found, place, len(problem.variants)), gap=max(found.gap, behind))


def _relaxed(problem: FleetProblem) -> FleetPlan:
    """The plan if instances had parts. objective: no plan is below it.

    Column generation (Dantzig and Wolfe 1960): a few variants of each class are planned with. The prices that this plan puts on room and
    load say which others would better it. These come in, until there are none.
    """
    prices = _VariantPrices(problem)
    chosen, better, ahead = set[int](), prices.first(), 0.0
    for _ in range(ROUNDS):
        chosen |= better
        place = {v: i for i, v in enumerate(sorted(chosen))}
        found, of_rows = _solved(_narrowed(problem, place), {}, whole=False)
        better, ahead = prices.better(of_rows)
        if better <= chosen:
            ahead = 0.0
            break
    return replace(_widened(found, place, len(problem.variants)), objective=found.objective - ahead)


class _VariantPrices:
    """What variants would count beside a plan that does not look at them: their reduced costs."""

    def __init__(self, problem: FleetProblem) -> None:
        import numpy as np  # noqa: PLC0415

        variants, counts = problem.variants, FleetCounts(problem)
        names = sorted({name for pool in problem.pools for name in pool.resources})
        self._np, self._problem, self._names = np, problem, names
        self._pool = np.array([one.pool for one in variants])
        self._most = np.array([one.most * problem.pools[one.pool].most for one in variants])
        self._added = np.array([counts.added(v) for v in range(len(variants))])
        self._uses = np.array([[one.uses.get(name, 0.0) for name in names] for one in variants])
        self._computes = np.array([[one.computes[1] * (one.computes[0] == name) for name in names] for one in variants])
        self._needs = []  # by class: its options, the instances that each layer takes of them, and what they lose and add of accuracy
        for need in problem.needs:
            able = np.array([v for v in need.options if variants[v].most], int)
            takes = np.array([need.options[v] for v in able]).reshape(len(able), len(need.layers))
            losses = counts.losses(need)
            above = [(variants[v].accuracy - need.mean) * need.load / counts.total if need.mean else 0.0 for v in able]
            self._needs.append((able, takes, np.array([losses[v] for v in able]), np.array(above)))

    def first(self) -> set[int]:
        """To begin with: what has columns or rows of its own, the most accurate of each class, by which losses count, and of each class and pool
        the cheapest, the dearest and the middle one.
        """
        problem = self._problem
        found = {v for v, one in enumerate(problem.variants) if one.running or one.limit is not None}
        found.update(v for variants, _ in (*problem.reserved, *problem.wanted) for v in variants)
        found.update(
            max(need.options, key=lambda v: problem.variants[v].accuracy) for need in problem.needs if need.options
        )
        for able, takes, _, _ in self._needs:
            order = able[self._np.argsort(takes.sum(axis=1) * self._added[able], kind="stable")]
            for p in range(len(problem.pools)):
                here = order[self._pool[order] == p].tolist()
                found.update(here[:1], here[len(here) // 2 :][:1], here[-1:])
        return found

    def better(self, prices: Mapping[Any, float]) -> tuple[set[int], float]:
        """Of each layer the variant that would better a plan with these prices of its rows most, and by how much no plan betters it."""
        np, problem = self._np, self._problem
        room = np.array([[prices.get((p, name), 0.0) for name in self._names] for p in range(len(problem.pools))])
        added = self._added - (self._uses * room[self._pool]).sum(axis=1)
        for i, (variants, _) in enumerate(problem.least):
            added[list(variants)] -= prices["least", i]
        cheapest = {min(variants, key=added.__getitem__) for variants, _ in problem.least if variants}
        found = {v for v in cheapest if added[v] < -LEAST_GAIN}
        ahead = -float(np.minimum(added, 0.0) @ self._most)
        each = np.maximum(added, 0.0) - (self._computes * room[self._pool]).sum(axis=1)
        for k, (need, (able, takes, lost, above)) in enumerate(zip(problem.needs, self._needs, strict=True)):
            layers = [prices[k, j] for j in range(len(need.layers))]
            accuracy = (above * prices.get(need.name, 0.0) - lost)[:, None] * need.layers
            gains = layers + accuracy - takes * each[able][:, None]
            most = gains.max(axis=0, initial=0.0)
            ahead += float(most.sum())
            if most.any():
                found.update(able[gains.argmax(axis=0)[most > LEAST_GAIN]].tolist())
        return found, ahead


def _widened(plan: FleetPlan, place: Mapping[int, int], count: int) -> FleetPlan:
    """A plan of `_narrowed` as one of the whole problem."""
    instances, spares, busy = (
        tuple(values[place[v]] if v in place else 0 for v in range(count))
        for values in (plan.instances, plan.spares, plan.busy)
    )
    return replace(plan, instances=instances, spares=spares, busy=busy)


def _narrowed(problem: FleetProblem, place: Mapping[int, int]) -> FleetProblem:
    """The same with these variants alone. place: their indices there."""

    def kept(groups: tuple[tuple[tuple[int, ...], int], ...]) -> tuple[tuple[tuple[int, ...], int], ...]:
        return tuple((tuple(place[v] for v in variants if v in place), number) for variants, number in groups)

    return replace(
        problem,
        variants=tuple(problem.variants[v] for v in place),
        needs=tuple(
            replace(need, options={place[v]: takes for v, takes in need.options.items() if v in place})
            for need in problem.needs
        ),
        least=kept(problem.least),
        reserved=kept(problem.reserved),
        wanted=kept(problem.wanted),
    )


def _solved(
    problem: FleetProblem, options: Mapping[str, Any], *, whole: bool = True, start: Sequence[int] | None = None
) -> tuple[FleetPlan, Mapping[Any, float]]:
    """The plan within these limits. whole: instances and machines; else they may be parts, the plan has `_rounded` instances, and its rows have
    prices. start: instances of a plan to begin with.
    """
    model = LinearProgram()
    counts = FleetCounts(problem)
    unit, total, accurate, free = counts.unit, counts.total, counts.accurate, counts.free
    machines = [
        model.column(pool.price / unit * (1.0 if pool.elastic else ELASTIC_SHARE), pool.most, pool.least, whole=True)
        for pool in problem.pools
    ]
    tied = {v for variants, _ in (*problem.least, *problem.reserved, *problem.wanted) for v in variants}
    # Of what does not run, there are as many as the load takes, if they may be parts: they need no columns of their own.
    tied |= {v for v, one in enumerate(problem.variants) if one.running or one.limit is not None or not one.most}
    loose = set[int]() if whole else set(range(len(problem.variants))) - tied
    kept, added = [], []
    spare: dict[int, int] = {}  # by variant: the column of running instances that only stand by
    for v, one in enumerate(problem.variants):
        pool = problem.pools[one.pool]
        if v in loose:
            kept.append(-1)
            added.append(-1)
            continue
        most = one.most * pool.most if one.limit is None else min(one.limit, one.most * pool.most)
        # What is dropped for another serves nothing while that loads. What is added where there is room costs no accuracy.
        lost = one.serves * one.load_s / LIFE_S / total * (1.0 if accurate else MISSING if pool.spares else 0.0)
        kept.append(model.column(counts.price(v) - lost, min(one.running, most), whole=True))
        added.append(model.column(counts.added(v), max(0, most - min(one.running, most)), whole=True))
        if pool.spares and one.running and not accurate:
            column = model.column(one.price / unit * ELASTIC_SHARE - lost, min(one.running, most), whole=True)
            spare[len(kept) - 1] = column
            model.row({kept[-1]: 1.0, column: 1.0}, 0.0, float(min(one.running, most)))
    used: list[dict[int, float]] = [{} for _ in problem.variants]  # columns of all layers, in instances
    reserved: list[set[int]] = [set() for _ in problem.variants]  # those of the reserve
    missing: list[list[int]] = []
    carried: list[dict[int, float]] = []  # by class: the accuracy of each column, and
    parts: list[dict[int, float]] = []  # its share of the load
    means: dict[
        str, dict[int, float]
    ] = {}  # by name of classes: what each column adds above the mean accuracy that is wanted
    unserved, unreserved = (UNSERVED, UNRESERVED) if accurate else (MISSING, MISSING * RESERVE_MISSING)
    for k, need in enumerate(problem.needs):
        weight = (need.load + 0.01 * total) / total
        missing.append([])
        carried.append({})
        parts.append({})
        worth, losses = counts.worth(need), counts.losses(need)
        for j, part in enumerate(need.layers):
            reserve = j == len(need.layers) - 1
            short = model.column(
                weight * max(part * unserved, unreserved if reserve else 0.0) + part * worth, float(not problem.strict)
            )
            missing[-1].append(short)
            layer = {short: 1.0}
            for v, takes in need.options.items():
                accuracy = problem.variants[v].accuracy
                x = model.column(losses[v] * part + (takes[j] * counts.added(v) if v in loose else 0.0), 1.0)
                carried[-1][x], parts[-1][x] = accuracy, part
                if need.mean:
                    means.setdefault(need.name, {})[x] = part * need.load / total * (accuracy - need.mean)
                layer[x] = 1.0
                used[v][x] = takes[j]
                if reserve:
                    reserved[v].add(x)
            model.row(layer, 1.0, 1.0, (k, j))
    for name, entries in means.items():
        lacking = model.column(unserved * INACCURATE, 0.0 if problem.strict else 1.0)
        model.row(entries | {lacking: 1.0}, 0.0, inf, name)
    sharing: set[int] = set()  # columns of reserved instances that take no time of their own
    for variants, number in problem.reserved:
        wanted = {model.column(unserved, float(number)): 1.0}
        staying: dict[int, float] = dict.fromkeys([kept[v] for v in variants], 1.0)
        running = float(min(number, sum(model.high[column] for column in staying)))
        model.row(staying | {model.column(NEVER * unserved, running): 1.0}, running, inf)
        for v in variants:
            own, beside = model.column(0.0, float(number)), model.column(SHARED, float(number))
            sharing.add(beside)
            wanted |= {own: 1.0, beside: 1.0}
            used[v] |= {own: 1.0, beside: 1.0}
        model.row(wanted, float(number), inf)
    totals: dict[tuple[int, str], dict[int, float]] = {}
    eased = {(problem.variants[v].pool, problem.variants[v].computes[0]) for v in free}
    for v, one in enumerate(problem.variants):
        there = dict.fromkeys((kept[v], added[v], *((spare[v],) if v in spare else ())), 1.0)
        if v in loose:
            there = used[v]
        else:
            model.row(used[v] | dict.fromkeys(there, -1.0), -inf, 0.0)
        if v in spare:
            load = {column: value for column, value in used[v].items() if column not in reserved[v]}
            model.row(load | {kept[v]: -1.0, added[v]: -1.0}, -inf, 0.0)
        resources = problem.pools[one.pool].resources
        for name, amount in one.uses.items():
            if name in resources:
                totals.setdefault((one.pool, name), {}).update({c: n * amount for c, n in there.items()})
        if one.most < 1_000:
            model.row(there | {machines[one.pool]: -float(one.most)}, -inf, 0.0)
        name, amount = one.computes
        if amount > 0 and name in resources:
            row = totals.setdefault((one.pool, name), {})
            for column in used[v].keys() - sharing:
                row[column] = row.get(column, 0.0) + used[v][column] * amount
    for (p, name), entries in totals.items():
        model.row(entries | {machines[p]: -problem.pools[p].resources[name]}, -inf, 0.0, (p, name))
        if (p, name) in eased:
            more = model.column(CROWDED)
            model.row(
                entries | {machines[p]: -EASY * problem.pools[p].resources[name], more: -1.0}, -inf, 0.0, (p, name)
            )
    for i, (variants, number) in enumerate(problem.least):
        lacking = model.column(UNSERVED if accurate else MISSING, float(number))
        columns = {column: 1.0 for v in variants for column in (kept[v], added[v])}
        model.row(columns | {lacking: 1.0}, float(number), inf, ("least", i))
    for variants, number in problem.wanted:
        lacking = model.column(UNSERVED if accurate else MISSING, float(number))
        columns = {column: 1.0 for v in variants for column in (kept[v], added[v])}
        model.row(columns | {lacking: 1.0}, float(number), float(number))
        running = float(sum(problem.variants[v].running for v in variants))
        model.row(columns | {spare[v]: 1.0 for v in variants if v in spare}, 0.0, max(float(number), running))
    if problem.budget is not None:
        model.row({machines[p]: pool.price for p, pool in enumerate(problem.pools)}, -inf, problem.budget)
    if not whole:
        model.whole = [0] * len(model.whole)
    begun = None
    if start is not None:
        begun = {machines[p]: float(pool.most) for p, pool in enumerate(problem.pools)}
        for count, k, a in zip(start, kept, added, strict=True):
            begun[k] = min(count, model.high[k])
            begun[a] = min(count - begun[k], model.high[a])
    result = model.solve(options, begun)
    if accurate and whole:
        present = [one.running if used[v] else 0 for v, one in enumerate(problem.variants)]
        result = _stay(model, present, kept, added, options, result)
    values = result.x or ()
    there_of = (used[v] if v in loose else {kept[v]: 1.0, added[v]: 1.0} for v in range(len(kept)))
    parts_of = [sum(float(values[column]) * n for column, n in there.items()) for there in there_of]
    plan = FleetPlan(
        machines=tuple(round(values[column]) for column in machines),
        instances=tuple(map(round, parts_of)) if whole else _rounded(problem, parts_of),
        spares=tuple(round(values[spare[v]]) if v in spare else 0 for v in range(len(kept))),
        busy=tuple(
            sum(float(values[column]) * takes for column, takes in used[v].items() if column not in reserved[v])
            for v in range(len(kept))
        ),
        accuracy=tuple(_mean(values, each, part) for each, part in zip(carried, parts, strict=True)),
        missing=tuple(tuple(max(0.0, float(values[column])) for column in layers) for layers in missing),
        objective=result.fun,
        gap=result.gap,
    )
    return plan, result.prices


def _rounded(problem: FleetProblem, parts: Sequence[float]) -> tuple[int, ...]:
    """Whole instances in place of parts, as far as there may be room: first one for each class, then those that lack the least."""
    counts = [floor(part + PART) for part in parts]
    room = {
        (p, name): have * pool.most for p, pool in enumerate(problem.pools) for name, have in pool.resources.items()
    }
    for count, one in zip(counts, problem.variants, strict=True):
        for name, amount in one.uses.items():
            room[one.pool, name] = room.get((one.pool, name), inf) - count * amount

    def one_more(v: int) -> bool:
        one = problem.variants[v]
        if any(room[one.pool, name] < amount for name, amount in one.uses.items()):
            return False
        counts[v] += 1
        for name, amount in one.uses.items():
            room[one.pool, name] -= amount
        return True

    for need in problem.needs:
        if need.options and not any(counts[v] for v in need.options):
            largest = max(need.options, key=lambda v: parts[v])
            if not one_more(largest):
                one_more(_alone(problem, need)[0])
    for v in sorted(range(len(parts)), key=lambda v: counts[v] - parts[v]):
        if parts[v] - counts[v] > PART:
            one_more(v)
    return tuple(counts)


def _alone(problem: FleetProblem, need: ClassNeed) -> list[int]:
    """The options of a class, the cheapest first if one has to carry it by itself."""
    return sorted(need.options, key=lambda v: ceil(sum(need.options[v])) * problem.variants[v].price)


def _mean(x: Any, accuracies: Mapping[int, float], parts: Mapping[int, float]) -> float | None:
    whole = sum(float(x[column]) * part for column, part in parts.items())
    return sum(float(x[c]) * parts[c] * accuracy for c, accuracy in accuracies.items()) / whole if whole > 0 else None


def _stay(
    model: LinearProgram, present: list[int], kept: list[int], added: list[int], options: Mapping[str, Any], found: Any
) -> Any:
    """The best use of the present instances, unless the plan that was found gains enough. Many plans are about equally good."""
    for count, k, a in zip(present, kept, added, strict=True):
        if count > model.high[k]:
            return found
        model.low[k] = float(count)
        model.high[a] = 0.0
    try:
        stays = model.solve(options)
    except Unsolved:
        return found
    return stays if stays.fun <= found.fun + GAIN else found
