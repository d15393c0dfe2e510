"""The search for a configuration cheaper than one that is known, from the dearest of those down. Pure.

A configuration is ruled out if another with the same hardware, the same batches and no fewer replicas anywhere does not meet the objective,
or if one of its vertices alone cannot meet it although all others have no queue. Where all cheaper configurations are ruled out, the known
one is the cheapest by the estimator.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from services.core.pipelines.problem import Choices, PlanningWorkspace, ServingChoice

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
    """The cheapest configuration that is found. effort: visits that the estimator may follow."""
    return _Search(space, known, effort).run()


class _Search:
    def __init__(self, space: PlanningWorkspace, known: Choices, effort: int) -> None:
        self._space, self._best = space, known
        self._cost = space.cost(known)
        self._until = space.estimated + effort
        self._bad: dict[
            tuple[tuple[int, int], ...], list[tuple[int, ...]]
        ] = {}  # (option, batch) of each vertex: replicas
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
        return sum(
            min(
                space.least(u, o, b) * option.price_per_hour
                for o, option in enumerate(mine)
                for b in space.batches(u, o)
            )
            for u, mine in enumerate(space.options)
            if u != v
        )

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
