"""One app's variants as arrays, and which of their instances can serve it now: the index that selection reads.

Static facts (accuracy, latency, load, memory) are numpy columns built when the catalogue changes; what changes with every
heartbeat is kept in small lists. The plan for one set of needs is made once and kept until a state changes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bus.messages.catalog import AppRecord, VariantRecord
from services.core.ask import Ask
from services.core.cost import cost_per_1000, open_axis
from services.core.crowd import MANY, usual
from services.core.goal import Goal, merit
from services.core.plans import Group, Kind, Plan, Ranked

if TYPE_CHECKING:
    from services.core.cluster import Instance

CALM = 0.5  # s without a query that found its instances full, after which they are not full any more
PLANS = 4096  # distinct sets of needs kept; clients mostly repeat a few


class AppView:
    """The index of one app. goal: what its variants are ordered by, cheapest first or most accurate first."""

    def __init__(
        self,
        app: AppRecord,
        records: tuple[VariantRecord, ...],
        price: Callable[[VariantRecord], float],
        goal: Goal = "cost",
    ) -> None:
        self.app = app
        self.goal = goal
        self.records = records
        # Versions that are not linked now serve only queries that name them.
        self.current: NDArray[np.bool_] = np.array([app.links.get(r.model) == r.version for r in records], dtype=bool)
        self.groups = [Group(record) for record in records]
        self.index = {record.variant: i for i, record in enumerate(records)}
        self.open_axis = open_axis(app.signature)
        self.lengths = sorted({row.length for r in records for row in r.profile.rows if row.length is not None})
        count = len(records)
        self.accuracy: NDArray[np.float64] = np.array(
            [1.0 if r.accuracy is None else r.accuracy for r in records], dtype=np.float64
        )
        self._merit: NDArray[np.float64] = np.array([merit(r.accuracy) for r in records], dtype=np.float64)
        self.load_s: NDArray[np.float64] = np.array([g.seconds_to_load for g in self.groups], dtype=np.float64)
        self.saturation: NDArray[np.float64] = np.array([r.profile.saturation_qps for r in records], dtype=np.float64)
        self.cost: NDArray[np.float64] = np.zeros(count)
        self.batch: list[int] = [1] * count
        self._placed = [0] * count
        self._latency: dict[tuple[int, int | None], NDArray[np.float64]] = {}
        self.has_active: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self.has_loading: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self.has_troubled: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._ranked: dict[Kind, Ranked] = {}
        self.full_since = self._full_at = float("-inf")
        self.asked = 0
        self._price = [0.0] * count
        self.reprice(price)

    def full_for(self, now: float) -> float:
        """Seconds for which its Active instances have been too full again and again; call it whenever they are."""
        if now - self._full_at > CALM:
            self.full_since = now
        self._full_at = now
        return now - self.full_since

    def reprice(self, price: Callable[[VariantRecord], float]) -> None:
        """Devices became known: variants without an instance are priced on them."""
        for i, record in enumerate(self.records):
            self._price[i] = price(record)
            self.cost[i] = cost_per_1000(record, self._price[i], self.batch[i])
        self._changed()

    def in_order(self, found: NDArray[np.intp]) -> NDArray[np.intp]:
        """These variants (indices), those to be looked at first in front: by the goal, then by cost."""
        if found.size < 2:
            return found
        if self.goal == "cost":
            return found[np.argsort(self.cost[found], kind="stable")]
        return found[np.lexsort((self.cost[found], -self._merit[found]))]

    def latency(self, items: int, length: int | None = None) -> NDArray[np.float64]:
        """Inference latency in s of a batch of so many items, by variant."""
        column = self._latency.get((items, length))
        if column is None:
            column = np.array([g.table.at(length).seconds(items) for g in self.groups], dtype=np.float64)
            if len(self._latency) < 256:
                self._latency[items, length] = column
        return column

    # -- instances

    def place(self, instance: "Instance") -> None:
        """Put an instance into the list that its state for this app belongs to."""
        i = self.index[instance.record.variant]
        group = self.groups[i]
        state = instance.state_for(self.app.app) if instance.state not in ("Inactive", "Unloading") else instance.state
        if state == "Active":
            group.put(instance, group.active)
        elif state == "Loading":
            group.put(instance, group.loading)
        elif state in ("Overloaded", "Interfered"):
            group.put(instance, group.troubled)
        else:
            group.put(instance, None)
        batch = instance.batch if len(group.active) <= MANY else self._usual_batch(i)
        if batch != self.batch[i] or instance.price_per_s != self._price[i]:
            self.batch[i], self._price[i] = batch, instance.price_per_s
            self.cost[i] = cost_per_1000(group.record, instance.price_per_s, batch)
            self._changed()
        self._refresh(i)

    def _usual_batch(self, i: int) -> int:
        """Of many instances: looked at now and then, since some of them always change theirs."""
        active = self.groups[i].active
        self._placed[i] = (self._placed[i] + 1) % len(active)
        return self.batch[i] if self._placed[i] else usual(instance.batch for instance in active)

    def unplace(self, instance: "Instance") -> None:
        i = self.index.get(instance.record.variant)
        if i is not None:
            self.groups[i].put(instance, None)
            self._refresh(i)

    def _refresh(self, i: int) -> None:
        """Whether there is any instance in each state; who may serve what changes only with that."""
        group = self.groups[i]
        for has, instances in (
            (self.has_active, group.active),
            (self.has_loading, group.loading),
            (self.has_troubled, group.troubled),
        ):
            if has[i] != bool(instances):
                has[i] = bool(instances)
                self._changed()

    def _changed(self) -> None:
        self._plans.clear()
        self._ranked.clear()

    def ranked(self, state: Kind) -> Ranked:
        """The variants with an instance in this state."""
        ranked = self._ranked.get(state)
        if ranked is None:
            mask = {"active": self.has_active, "loading": self.has_loading, "troubled": self.has_troubled}[state]
            ranked = self._ranked[state] = Ranked(self, mask)
        return ranked

    # -- plans

    def plan(self, ask: Ask) -> Plan:
        """Who may serve these needs, by the static facts; kept until something changes."""
        key = (ask.latency_s, ask.accuracy, ask.cost, ask.items, ask.model, ask.version, ask.variant, ask.length)
        plan = self._plans.get(key)
        if plan is None:
            plan = Plan(self, ask)
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def eligible(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants meet accuracy, latency (inference alone), cost and what was pinned."""
        latency = self.latency(ask.items, ask.length)
        mask: NDArray[np.bool_] = (self.accuracy >= ask.accuracy) & (latency <= ask.latency_s)
        mask &= self.cost <= ask.cost
        if ask.variant is not None or ask.model is not None or ask.version is not None:
            mask &= self.pinned(ask)
        else:
            mask &= self.current
        return mask

    def pinned(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants the query's model, version and variant allow."""
        if ask.variant is not None:
            mask = np.zeros(len(self.records), dtype=bool)
            i = self.index.get(ask.variant)
            if i is not None and ask.model in (None, self.records[i].model):
                mask[i] = ask.version in (None, self.records[i].version)
            return mask
        mask = np.array([ask.model in (None, r.model) for r in self.records], dtype=np.bool_)
        if ask.version is None:
            mask &= self.current
        else:
            mask &= np.array([ask.version == r.version for r in self.records], dtype=np.bool_)
        return mask
