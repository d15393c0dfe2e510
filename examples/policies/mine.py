"""A policy of a user (docs/scaling.md): the fastest idle instance, and twice the instances that the load needs."""

from typing import Any

from services.core.selection import Decision


class Mine:
    """Each process has an object of its own. None from a method leaves a decision to the built-in policy."""

    name = "mine"  # recorded with each query, and in the reason of each order

    def __init__(self) -> None:
        self.late: dict[str, int] = {}  # by worker

    def select(self, ask: Any, _now: float, view: Any) -> Decision | None:
        """The fastest idle instance, on the worker that was late least often."""
        groups = view.apps[ask.app].eligibility(ask).active
        idle = [one for group in groups for one in group.active if one.idle]
        if not idle:
            return None
        best = min(idle, key=lambda one: (self.late.get(one.worker.name, 0), one.table.seconds(ask.items), one.id))
        return Decision(best.id)

    def scale(self, problem: Any, _now: float) -> dict[str, int]:
        """Of each variant that runs, twice what its load needs, and never fewer than run."""
        wanted = {}
        for one in problem.candidates:
            load = sum(demand.load for demand in problem.demands if demand.accepts(one))
            if one.running:
                wanted[one.name] = max(one.running, 1 + int(2 * load / one.saturation_qps))
        return wanted

    def observe(self, outcome: Any) -> None:
        """A query has ended."""
        if outcome.outcome == "late":
            self.late[outcome.worker] = self.late.get(outcome.worker, 0) + 1
