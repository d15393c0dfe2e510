"""A plan while the greedy solver builds it: instances, who gives how much to which group, and what room is left."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, Self

from services.core.planning.cover import CoverSearch, Offer, SortedOffers, sorted_offers
from services.core.planning.flow import spread
from services.core.planning.program import Program, cost_of


class OfferCache:
    """What a programme offers each group, sorted once for each set of prices: a solver asks for it again and again.

    own_first: the candidates of each group, those shared with the fewest other groups first.
    """

    def __init__(self, program: Program) -> None:
        self._sorted: dict[tuple[int, tuple[float, ...]], SortedOffers] = {}
        self.own_first = [sorted(group.candidates, key=lambda c: len(program.home[c])) for group in program.groups]
        self._supplies = [
            [
                Offer(c, one.price, one.rate, one.high, one.weights, fresh)
                for c in group.candidates
                for fresh, one in ((False, program.running[c]), (True, program.fresh[c]))
                if one.high > 0
            ]
            for group in program.groups
        ]

    def offers(self, g: int, prices: Sequence[float]) -> SortedOffers:
        """All that group g may use at these prices of the rows, as if nothing were taken yet. Not to be changed."""
        key = (g, tuple(prices))
        found = self._sorted.get(key)
        if found is None:
            found = self._sorted[key] = sorted_offers([_at(one, prices) for one in self._supplies[g]])
        return found


def _at(offer: Offer, prices: Sequence[float]) -> Offer:
    candidate, price, rate, most, weights, fresh = offer
    for row, weight in weights:
        price += prices[row] * weight
    return Offer(candidate, price, rate, most, weights, fresh)


_EPS = 1e-9


class GroupState(NamedTuple):
    """All that placing one group changes. Of its candidates: counts, and what they give. Of the whole plan: room and cost."""

    counts: list[int]
    given_by: list[float]
    given: dict[int, float]
    room: list[float]
    cost: float
    placed: bool
    cheapest: bool


class Packing:
    """counts: instances by candidate. room: what is left of each row, 0..1, or negative where too much is taken.

    cheapest: every placement so far is known to be the cheapest. placed: the groups whose needs are covered. A new packing has only the
    instances that must stay (`least`).
    """

    __slots__ = ("_cache", "_cost", "_given", "_given_by", "_program", "cheapest", "counts", "placed", "room")

    def __init__(self, program: Program, cache: OfferCache | None = None) -> None:
        """cache: the programme's, shared by all its packings."""
        self._program = program
        self._cache = cache or OfferCache(program)
        self.counts = [0] * len(program.home)
        self._cost = 0.0
        self.room = [1.0] * len(program.rows)
        self._given: list[dict[int, float]] = [{} for _ in program.groups]  # group: candidate: items/s
        self._given_by = [0.0] * len(program.home)
        self.placed = [False] * len(program.groups)
        self.cheapest = True
        for c, (running, fresh) in enumerate(zip(program.running, program.fresh, strict=True)):
            if running.low or fresh.low:
                self._change(c, running.low + fresh.low)

    def keep_running(self) -> None:
        """Start with everything that runs and may be of use, not only with what must stay. Place the groups that it carries."""
        program = self._program
        for c, running in enumerate(program.running):
            self._change(c, max(0, running.high - self.counts[c]))
        given = spread(program, self.counts)
        if given is not None:
            for g, of in enumerate(given):
                for c, amount in of.items():
                    self._given_by[c] += amount
                self._given[g] = of
                self.placed[g] = self._able(g) >= program.groups[g].least

    def copy(self) -> Self:
        twin = object.__new__(type(self))
        twin._program, twin._cache = self._program, self._cache
        twin.counts, twin.room, twin.placed = self.counts[:], self.room[:], self.placed[:]
        twin.cheapest, twin._cost = self.cheapest, self._cost
        twin._given, twin._given_by = [given.copy() for given in self._given], self._given_by[:]
        return twin

    def state(self, g: int) -> GroupState:
        """All that placing group g, or taking its instances back, may change."""
        of = self._program.groups[g].candidates
        counts, given_by = [self.counts[c] for c in of], [self._given_by[c] for c in of]
        return GroupState(
            counts, given_by, self._given[g].copy(), self.room[:], self._cost, self.placed[g], self.cheapest
        )

    def restore(self, g: int, state: GroupState) -> None:
        """Go back to this state. Only group g may have changed since."""
        counts, given_by, self._given[g], self.room, self._cost, self.placed[g], self.cheapest = state
        for c, n, amount in zip(self._program.groups[g].candidates, counts, given_by, strict=True):
            self.counts[c], self._given_by[c] = n, amount

    def overdrawn(self, g: int) -> float:
        """How much group g takes of the rows that are overdrawn."""
        total = 0.0
        for c in self._given[g]:
            for row, weight in self._program.fresh[c].weights:
                if self.room[row] < -_EPS:
                    total += weight * self.counts[c]
        return total

    def improvable(self, g: int) -> bool:
        """Whether group g's instances cost more than its cheapest throughput."""
        program, group = self._program, self._program.groups[g]
        first = [
            running if running.high else fresh
            for running, fresh in ((program.running[c], program.fresh[c]) for c in group.candidates)
        ]
        least = group.need * min(one.price / one.rate for one in first)
        return sum(cost_of(self._program, c, self.counts[c]) for c in self._given[g]) > (1 + 1e-6) * least

    def cost(self) -> float:
        """What the instances count in the objective, up to a constant."""
        return self._cost

    def fits(self) -> bool:
        return all(free >= -_EPS for free in self.room)

    def placed_all(self, groups: Sequence[int]) -> bool:
        """Whether these groups have what they need, and everything fits."""
        return self.fits() and all(self.placed[g] for g in groups)

    def place(self, g: int, *, prices: Sequence[float], bounded: bool, steps: int) -> bool:
        """Give group g what it needs, at least cost with `prices` as prices of the rows; whether that worked.

        What shared instances, and those that must stay, have to spare is used first, since it costs nothing. bounded: within the room.
        """
        group = self._program.groups[g]
        room = self.room if bounded else ()
        need = group.need - sum(self._spare(c) for c in group.candidates if self.counts[c])
        if need > _EPS * group.need:
            search = CoverSearch(need, self._offers(g, prices), room, steps)
            found = search.run()
            self.cheapest &= search.finished
            if found is None:
                return False
            for c, n in found.items():
                self._change(c, n)
        if not self._top_up(g, prices, bounded=bounded):
            return False
        self._give(g)
        self.placed[g] = True
        return True

    def fill(self, g: int, prices: Sequence[float]) -> None:
        """Give group g as much as there is room for, cheapest throughput first."""
        group = self._program.groups[g]
        for offer in self._offers(g, prices).offers:
            spare = sum(self._spare(c) for c in group.candidates)
            wanted = max(0, ceil((group.need - spare) / offer.rate - _EPS))
            for row, weight in offer.weights:
                wanted = min(wanted, int((max(0.0, self.room[row]) + _EPS) / weight))
            self._change(offer.candidate, min(wanted, offer.most))
        self._top_up(g, prices, bounded=True)
        self._give(g)

    def take_back(self, g: int) -> None:
        """Take back what group g was given, and unload what no other group needs."""
        for c, amount in self._given[g].items():
            self._given_by[c] -= amount
        given, self._given[g] = self._given[g], {}
        self.placed[g] = False
        for c in {*given, *(self._program.groups[g].candidates if self._program.groups[g].least else ())}:
            fewest = self._program.running[c].low + self._program.fresh[c].low
            needed = max(fewest, ceil(self._given_by[c] / self._program.fresh[c].rate - 1e-6))
            for h in self._program.home[c]:
                least = self._program.groups[h].least
                if self.placed[h] and least:
                    needed = max(needed, self.counts[c] - (self._able(h) - least))
            self._change(c, min(0, needed - self.counts[c]))

    def missing(self, g: int) -> tuple[float, int]:
        """The items/s and the instances that group g lacks."""
        group = self._program.groups[g]
        short = group.need - sum(self._given[g].values())
        return max(0.0, short) if short > 1e-6 * group.need else 0.0, max(0, group.least - self._able(g))

    def _able(self, g: int) -> int:
        return sum(self.counts[c] for c in self._program.groups[g].candidates)

    def _spare(self, c: int) -> float:
        return max(0.0, self.counts[c] * self._program.fresh[c].rate - self._given_by[c])

    def _give(self, g: int) -> None:
        """Give group g what it needs, from its own instances first, so that shared ones keep something to spare."""
        group = self._program.groups[g]
        need = group.need
        for c in self._cache.own_first[g]:
            if not self.counts[c]:
                continue
            amount = min(need, self._spare(c))
            if amount > 0:
                self._given[g][c] = amount
                self._given_by[c] += amount
                need -= amount

    def _offers(self, g: int, prices: Sequence[float]) -> SortedOffers:
        """What is left of group g's offers, cheapest throughput first."""
        whole = self._cache.offers(g, prices)
        counts = self.counts
        if not any(counts[c] for c in self._program.groups[g].candidates):
            return whole
        left: list[Offer] = []
        for offer in whole.offers:
            n = counts[offer.candidate]
            if n:
                kept = min(n, self._program.running[offer.candidate].high)
                most = offer.most - (n - kept if offer.fresh else kept)
                if most > 0:
                    left.append(offer._replace(most=most))
            else:
                left.append(offer)
        return sorted_offers(left, in_order=True)

    def _top_up(self, g: int, prices: Sequence[float], *, bounded: bool) -> bool:
        lacking = self._program.groups[g].least - self._able(g)
        while lacking > 0:
            fitting = [
                offer
                for offer in self._offers(g, prices).offers
                if not bounded or all(self.room[row] >= weight - _EPS for row, weight in offer.weights)
            ]
            if not fitting:
                return False
            self._change(min(fitting, key=lambda one: one.price).candidate, 1)
            self.cheapest = False
            lacking -= 1
        return True

    def _change(self, c: int, delta: int) -> None:
        if not delta:
            return
        n, running, fresh = self.counts[c], self._program.running[c], self._program.fresh[c]
        kept = min(n + delta, running.high) - min(n, running.high)
        self.counts[c] = n + delta
        self._cost += kept * running.price + (delta - kept) * fresh.price
        for row, weight in running.weights:
            self.room[row] -= kept * weight
        for row, weight in fresh.weights:
            self.room[row] -= (delta - kept) * weight
