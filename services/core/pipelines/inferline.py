"""InferLine's planner (paper 004, section 4): from an expensive configuration that meets the objective down to a cheap one. Pure.

1. Each vertex on its dearest hardware, in batches of one. The objective cannot be met if queries take longer even where none waits.
2. Replicas for the vertex with the least throughput for its load, until the estimator says that the objective is met.
3. Of {one replica fewer, cheaper hardware} of each vertex, the change that saves most and still meets the objective. Where there is none,
   a batch twice as large, which saves nothing itself but may let replicas go. Those after the last change that saved are taken back.
4. The paper's search ends there, now and then in a local optimum (its section 7.2.1). So all cheaper configurations are searched, as far
   as the effort allows (`search`).
5. Where a few percent of the cost buy a replica for the vertex that would be overloaded first, it gets it: traffic that begins to grow is
   served until the tuner is sure of the change. Batches that need not be so large are halved, and what the replicas carry beyond that serves
   more accurate variants.
6. The cheapest of many configurations is one that the sample happens to favour. So the plan is tried on other samples, which are drawn from
   the sample. If too many queries are late in one of them, all is done again with fewer of them allowed in the sample.

A change that fails once is not tried again until another vertex has changed its batch or hardware: with fewer replicas elsewhere,
queries only take longer.
"""

from collections.abc import Iterator
from itertools import combinations
from math import inf
from typing import NamedTuple

from bus.messages.catalog import MOST_REPLICAS, PipelinePlan
from services.core.pipelines.problem import ALIKE, Choices, PlanningWorkspace, ServingChoice

MOST = 20_000  # configurations that are listed at once
PLENTY = 1_000  # replicas that leave no queue


class Found(NamedTuple):
    """complete: no cheaper configuration is left to try."""

    choices: Choices
    complete: bool


class _Way(NamedTuple):
    """A vertex with this option, this batch and the fewest replicas with which it could meet the objective."""

    option: int
    batch: int
    least: int


def search(space: PlanningWorkspace, known: Choices, effort: int) -> Found:
    """The cheapest configuration that is found, from the dearest below `known` down. effort: visits that the estimator may follow.

    A configuration is ruled out if another with the same hardware, the same batches and no fewer replicas anywhere does not meet the objective,
    or if one of its vertices alone cannot meet it although all others have no queue. Where all cheaper configurations are ruled out, the
    known one is the cheapest by the estimator.
    """
    return _Search(space, known, effort).run()


class _Search:
    def __init__(self, space: PlanningWorkspace, known: Choices, effort: int) -> None:
        self._space, self._best = space, known
        self._cost = space.cost(known)
        self._until = space.estimated + effort
        # (option, batch) of each vertex: replicas
        self._bad: dict[tuple[tuple[int, int], ...], list[tuple[int, ...]]] = {}
        self._ways: list[list[_Way]] = []

    def run(self) -> Found:
        if self._over():
            return Found(self._best, complete=False)
        self._ways = [self._possible(v) for v in range(len(self._best))]
        everything = tuple(range(len(self._best)))
        listed = self._cheaper(everything)
        if listed is not None:
            complete = self._try(listed)
            return Found(self._best, complete)
        before = None
        while before != self._best and not self._over():
            before = self._best
            for pair in combinations(everything, 2):
                listed = self._cheaper(pair)
                if listed is not None and not self._try(listed):
                    break
        return Found(self._best, complete=False)

    def _over(self) -> bool:
        return self._space.estimated >= self._until

    def _possible(self, v: int) -> list[_Way]:
        """The ways to serve this vertex that meet the objective where all others have no queue."""
        space = self._space
        soonest = [min(range(len(tables)), key=lambda o: tables[o][1]) for tables in space.seconds]
        free = tuple(ServingChoice(o, 1, PLENTY + space.least(u, o, 1)) for u, o in enumerate(soonest))
        found = []
        for option, offered in enumerate(space.options[v]):
            for batch in space.batches(v, option):
                least = space.least(v, option, batch)
                spare = self._cost - self._others(v)
                most = int(spare / offered.price_per_hour) if offered.price_per_hour > 0 else least
                while least <= most and not self._over():
                    one = ServingChoice(option, batch, least)
                    if space.meets((*free[:v], one, *free[v + 1 :])):
                        found.append(_Way(option, batch, least))
                        break
                    least += max(1, 0 if most - least < 32 else (most - least) // 32)
        return found

    def _others(self, v: int) -> float:
        """The least that the other vertices cost."""
        space = self._space
        return sum(space.least_price(u) for u in range(len(space.options)) if u != v)

    def _cheaper(self, free: tuple[int, ...]) -> list[tuple[float, Choices]] | None:
        """All configurations that cost less than the best and differ from it in these vertices only. None: too many."""
        space = self._space
        fixed = sum(space.price(v, one) for v, one in enumerate(self._best) if v not in free)
        menus = [self._menu(v, self._cost - fixed) for v in free]
        size = 1
        for menu in menus:
            size *= max(1, len(menu))
        if size > 20 * MOST:
            return None
        found = []
        for chosen in self._within(menus, self._cost - fixed):
            new = list(self._best)
            for v, one in zip(free, chosen, strict=True):
                new[v] = one
            found.append((space.cost(tuple(new)), tuple(new)))
            if len(found) > MOST:
                return None
        found.sort(key=lambda one: -one[0])
        return found

    def _menu(self, v: int, below: float) -> list[tuple[float, ServingChoice]]:
        space = self._space
        menu = []
        for way in self._ways[v]:
            price = space.options[v][way.option].price_per_hour
            most = way.least if price <= 0 else int(below / price)
            menu += [(price * k, ServingChoice(way.option, way.batch, k)) for k in range(way.least, most + 1)]
        return sorted(menu, key=lambda one: one[0])

    def _within(
        self, menus: list[list[tuple[float, ServingChoice]]], below: float
    ) -> Iterator[tuple[ServingChoice, ...]]:
        if not menus:
            yield ()
            return
        rest = sum(menu[0][0] for menu in menus[1:] if menu) if all(menus) else float("inf")
        for price, one in menus[0]:
            if price + rest >= below * (1 - 1e-12):
                return
            for others in self._within(menus[1:], below - price):
                yield (one, *others)

    def _try(self, listed: list[tuple[float, Choices]]) -> bool:
        """Estimate these, the dearest first, and keep the cheapest that meets the objective. False: the effort is spent."""
        for cost, choices in listed:
            if cost >= self._cost * (1 - 1e-12) or self._ruled_out(choices):
                continue
            if self._over():
                return False
            if self._space.meets(choices):
                self._best, self._cost = choices, cost
            else:
                kind = tuple((one.option, one.batch) for one in choices)
                self._bad.setdefault(kind, []).append(tuple(one.replicas for one in choices))
        return True

    def _ruled_out(self, choices: Choices) -> bool:
        kind = tuple((one.option, one.batch) for one in choices)
        mine = [one.replicas for one in choices]
        return any(all(k <= n for k, n in zip(mine, bad, strict=True)) for bad in self._bad.get(kind, ()))


EFFORT = 30_000_000  # visits that the estimator follows in the last step
ROUNDS = 5
HEADROOM = 1.15
SLACK = 0.05  # of the cost, for replicas of the vertex that would be overloaded first


def plan_inferline(
    space: PlanningWorkspace, *, policy: str = "inferline", effort: int = EFFORT, rounds: int = ROUNDS
) -> PipelinePlan:
    """effort: visits to follow in search of what the paper's steps miss; 0: its steps only. rounds: 1 takes the sample as it is."""
    plan: PipelinePlan | None = None
    notes: list[str] = []
    for number in range(rounds):
        first = _first(space)
        if first is None:
            break
        descent = _Descent(space, first)
        found = descent.run(effort)
        choices = _accurate(space, _trimmed(space, _with_slack(space, found.choices)))
        complete = found.complete and not number and space.cost(choices) <= space.cost(found.choices)
        plan = space.plan(choices, policy=policy, optimal=complete, steps=[*notes, *descent.steps(found, choices)])
        late = space.late_elsewhere(choices) if number < rounds - 1 else 0
        if late <= space.late or not space.tighten(choices, late):
            break
        notes.append(f"{plan.cost_per_s * 3600:.4g} US$/h: {_share(space, late)} of queries late in another sample")
    return plan if plan is not None else infeasible(space, policy)


def _with_slack(space: PlanningWorkspace, choices: Choices) -> Choices:
    """A replica more for the vertex with the highest load, as long as that costs next to nothing."""
    left = SLACK * space.cost(choices)
    while True:
        spare = [_spare(space, v, one) for v, one in enumerate(choices)]
        v = spare.index(min(spare))
        price = space.options[v][choices[v].option].price_per_hour
        more = changed(choices, v, replicas=choices[v].replicas + 1)
        if not 0 < price <= left or not space.meets(more):
            return choices
        choices, left = more, left - price


def _trimmed(space: PlanningWorkspace, choices: Choices) -> Choices:
    """Batches half as large where that makes no vertex the first to be overloaded: each stage must reckon with full batches behind it."""
    least = min(_spare(space, v, one) for v, one in enumerate(choices))
    for v in range(len(choices)):
        while choices[v].batch > 1:
            smaller = changed(
                choices, v, batch=max(n for n in space.batches(v, choices[v].option) if n < choices[v].batch)
            )
            if _spare(space, v, smaller[v]) < least * (1 - 1e-9) or not space.meets(smaller):
                break
            choices = smaller
    return choices


def _accurate(space: PlanningWorkspace, choices: Choices) -> Choices:
    """More accurate variants on the same replicas, which are paid anyway, where that leaves them room for HEADROOM times the load."""
    for v, one in enumerate(choices):
        options = space.options[v]
        now = options[one.option]
        for o in sorted(range(len(options)), key=lambda o: -(options[o].accuracy or 0.0)):
            if (options[o].accuracy or 0.0) <= (now.accuracy or 0.0) + ALIKE:
                break
            if options[o].price_per_hour <= now.price_per_hour and one.batch < len(space.seconds[v][o]):
                new = changed(choices, v, option=o)
                if _spare(space, v, new[v]) >= HEADROOM * space.rate and space.meets(new):
                    choices = new
                    break
    return choices


def _share(space: PlanningWorkspace, late: int) -> str:
    return f"{100 * late / len(space.problem.arrivals):.2g} %"


def fastest(space: PlanningWorkspace) -> list[int]:
    """Of each vertex, the option that serves one item soonest."""
    return [min(range(len(tables)), key=lambda o: tables[o][1]) for tables in space.seconds]


def infeasible(space: PlanningWorkspace, policy: str) -> PipelinePlan:
    """Even alone, and on the fastest hardware, queries take too long: names the path and the amount."""
    options = fastest(space)
    alone = {name: space.seconds[v][o][1] for v, (name, o) in enumerate(zip(space.order, options, strict=True))}
    hop = space.problem.hop.ms
    _, path = space.graph.longest_path({name: seconds + hop / 1000.0 for name, seconds in alone.items()})
    total = 1000.0 * sum(alone[name] for name in path) + hop * (len(path) + 1)
    parts = " + ".join(f"{1000 * alone[name]:.4g}" for name in path) + (
        f" + {len(path) + 1} messages of {hop:g}" if hop else ""
    )
    limit = space.problem.latency_ms
    reason = (
        f"path {' -> '.join(path)} takes {parts} = {total:.4g} ms on the fastest hardware without any queue,"
        f" {total - limit:.4g} ms more than latency_ms ({limit:g}); allow more time or add a faster option"
    )
    choices = tuple(ServingChoice(o, 1, space.least(v, o, 1)) for v, o in enumerate(options))
    return space.plan(choices, policy=policy, reason=reason)


def _first(space: PlanningWorkspace) -> Choices | None:
    """Step 1 and 2. None: the objective cannot be met."""
    for options in ([0] * len(space.order), fastest(space)):
        if space.unqueued(options) <= space.objective:
            choices = tuple(ServingChoice(o, 1, space.least(v, o, 1)) for v, o in enumerate(options))
            return _grown(space, choices)
    return None


def _grown(space: PlanningWorkspace, choices: Choices) -> Choices | None:
    while not space.meets(choices):
        spare = [_spare(space, v, one) for v, one in enumerate(choices)]
        v = spare.index(min(spare))
        more = max(1, choices[v].replicas // 8)
        if choices[v].replicas + more > MOST_REPLICAS:
            return None
        choices = changed(choices, v, replicas=choices[v].replicas + more)
    return choices


def _spare(space: PlanningWorkspace, v: int, one: ServingChoice) -> float:
    """What its replicas serve for each query/s of the pipeline."""
    scale = space.scales[v]
    return one.replicas * space.throughput(v, one.option, one.batch) / scale if scale > 0 else inf


def changed(
    choices: Choices, v: int, *, option: int | None = None, batch: int | None = None, replicas: int | None = None
) -> Choices:
    """The same but for one vertex."""
    one = choices[v]
    new = ServingChoice(
        one.option if option is None else option,
        one.batch if batch is None else batch,
        one.replicas if replicas is None else replicas,
    )
    return (*choices[:v], new, *choices[v + 1 :])


class _Descent:
    """Step 3. taken: its changes, for people. kept: how many of them led to the present cost."""

    def __init__(self, space: PlanningWorkspace, first: Choices) -> None:
        self._space = space
        self.choices = self._cheapest = first
        self.taken = [f"start: {self._told(v, one)}" for v, one in enumerate(first)]
        self._kept = len(self.taken)
        self._failed: set[tuple[int, int]] = set()  # (vertex, option or -1 for one replica fewer)
        self._known: dict[tuple[int, int], ServingChoice] = {}  # what a vertex would have on other hardware

    def run(self, effort: int) -> Found:
        while self._saved() or self._doubled():
            pass
        return search(self._space, self._cheapest, effort)

    def steps(self, found: Found, choices: Choices) -> list[str]:
        """What led to what was found, and to these choices with slack."""
        other = [v for v, one in enumerate(found.choices) if one != self._cheapest[v]]
        spare = [v for v, one in enumerate(choices) if one != found.choices[v]]
        return [
            *self.taken[: self._kept],
            *(f"search: {self._told(v, found.choices[v])}" for v in other),
            *(f"slack: {self._told(v, choices[v])}" for v in spare),
        ]

    def _saved(self) -> bool:
        """Take the change that saves most."""
        space, now = self._space, self.choices
        best: tuple[float, int, ServingChoice] | None = None
        for v, one in enumerate(now):
            for option in range(-1, len(space.options[v])):
                if (v, option) in self._failed or option == one.option:
                    continue
                new = self._fewer(v) if option < 0 else self._elsewhere(v, option)
                if new is None:
                    self._failed.add((v, option))
                    continue
                saved = space.price(v, one) - space.price(v, new)
                if best is None or saved > best[0] + 1e-12:
                    best = (saved, v, new)
        if best is None:
            return False
        _, v, new = best
        if new.option != now[v].option:
            self._retry()
        self._take(v, new)
        self._cheapest, self._kept = self.choices, len(self.taken)
        return True

    def _fewer(self, v: int) -> ServingChoice | None:
        one = self.choices[v]
        if one.replicas < 2 or not self._space.options[v][one.option].price_per_hour > 0:
            return None
        for less in dict.fromkeys((max(1, one.replicas // 16), 1)):
            new = changed(self.choices, v, replicas=one.replicas - less)
            if self._space.meets(new):
                return new[v]
        return None

    def _elsewhere(self, v: int, option: int) -> ServingChoice | None:
        """The cheapest batch and replicas on other, cheaper hardware, the other vertices as they are; None if none is cheaper."""
        space, one = self._space, self.choices[v]
        if space.options[v][option].price_per_hour >= space.options[v][one.option].price_per_hour:
            return None
        before = self._known.get((v, option))
        if before is not None and space.price(v, before) < space.price(v, one) and self._fits(v, before):
            return before
        found = cheapest_on(space, self.choices, v, option, space.price(v, one))
        if found is not None:
            self._known[v, option] = found
        return found

    def _fits(self, v: int, new: ServingChoice) -> bool:
        return self._space.meets((*self.choices[:v], new, *self.choices[v + 1 :]))

    def _doubled(self) -> bool:
        """Take the batch twice as large with the least latency."""
        space = self._space
        found: list[tuple[float, int, Choices]] = []
        for v, one in enumerate(self.choices):
            larger = [n for n in space.batches(v, one.option) if n > one.batch]
            if larger:
                new = changed(self.choices, v, batch=larger[0])
                latency = space.latency(new)
                if latency <= space.objective:
                    found.append((latency, v, new))
        if not found:
            return False
        _, v, new = min(found, key=lambda one: one[:2])
        self._retry()
        self._take(v, new[v])
        return True

    def _retry(self) -> None:
        self._failed.clear()

    def _take(self, v: int, new: ServingChoice) -> None:
        self.choices = (*self.choices[:v], new, *self.choices[v + 1 :])
        self.taken.append(self._told(v, new))

    def _told(self, v: int, one: ServingChoice) -> str:
        option = self._space.options[v][one.option]
        what = f"{option.variant} on {option.hardware}" if option.variant else option.hardware
        return f"{self._space.order[v]}: {one.replicas} x {what}, batch {one.batch}"


def cheapest_on(space: PlanningWorkspace, choices: Choices, v: int, option: int, below: float) -> ServingChoice | None:
    """The cheapest batch and replicas of one vertex on this option that meet the objective, at less than `below` US$ per hour."""
    price = space.options[v][option].price_per_hour
    best: ServingChoice | None = None
    for batch in space.batches(v, option):
        least = space.least(v, option, batch)
        most = least + 64 if price <= 0 else int(below / price)
        if price > 0 and most * price >= below * (1 - 1e-12):
            most -= 1
        found = fewest(space, choices, v, option, batch, least, most)
        if found is not None:
            best = ServingChoice(option, batch, found)
            below = price * found
    return best


def fewest(
    space: PlanningWorkspace, choices: Choices, v: int, option: int, batch: int, least: int, most: int
) -> int | None:
    """The fewest replicas from `least` to `most` that meet the objective, by bisection; None if `most` do not."""
    if least > most or not space.meets(changed(choices, v, option=option, batch=batch, replicas=most)):
        return None
    while least < most:
        middle = (least + most) // 2
        if space.meets(changed(choices, v, option=option, batch=batch, replicas=middle)):
            most = middle
        else:
            least = middle + 1
    return most
