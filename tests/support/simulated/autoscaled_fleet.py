"""A fleet on stage with model-autoscalers: load at a rate, what ran when, and what the events say."""

from collections.abc import Iterable
from typing import Any

from bus.messages.catalog import VariantRecord
from services.autoscaler.models.actor import ModelAutoscaler
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.commands import ClaimLease, LeaseClaimed, SolveFleet
from services.autoscaler.vms.rules import FleetLimits
from services.core.actor import Synced
from services.core.cost import Goal
from services.core.placement import Device
from services.core.planning.fleet import Unsolved
from services.core.policy import GuardedPolicy
from services.core.selection.policy import InfaasPolicy
from services.core.settings import AutoscalerSettings, Settings, StaticVariant
from services.executor.actor import make_executor
from services.monitor.actor import MonitorActor
from services.monitor.effects import MachineSample
from services.simulation.edges import plans_for
from tests.support.data.events import change_of
from tests.support.simulated.fleet import PRICES, Fleet
from tests.support.simulated.fleet import Device as Scripted

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=4000.0)
GPU = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0)


def _controller_edge(command: Any, *, unsolved: bool) -> tuple[float, Any]:
    match command:
        case SolveFleet():
            return (0.01, Unsolved("nothing was found")) if unsolved else plans_for(command)
        case ClaimLease():
            return 0.01, LeaseClaimed(ok=True)
        case _:
            return 0.01, None


class ScalingFleet(Fleet):
    """controlled: a controller leads.

    unsolved: it finds no plan, so that workers react to what they see. own: a user's own policy. tuned: more settings.
    """

    def __init__(
        self,
        *variants: VariantRecord,
        workers: int = 1,
        policy: str = "infaas",
        hold_s: float = 5.0,
        slack: float = 1.05,
        goal: Goal = "cost",
        choice: dict[str, StaticVariant] | None = None,
        devices: dict[str, tuple[Device, ...]] | None = None,
        controlled: bool = False,
        unsolved: bool = False,
        own: GuardedPolicy | None = None,
        tuned: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._spec = devices or {}
        selection = InfaasPolicy(on_demand=policy not in ("replicate", "static"), goal=goal)
        super().__init__(*variants, workers=workers, policy=selection, **more)
        self.counts: list[tuple[float, dict[str, dict[str, int]]]] = []
        settings = AutoscalerSettings(policy=policy, hold_s=hold_s, slack=slack, choice=choice or {}, **(tuned or {}))
        for n in range(workers):
            name = f"w{n}"
            self.stage.enter(f"model-{name}", ModelAutoscaler(name, self.subjects, PRICES, settings))
            self.follow(f"model-{name}")
        if controlled:
            self._start_controller(settings, goal, own, unsolved=unsolved)
        self.stage.run(1.0)

    def _start_controller(
        self, settings: AutoscalerSettings, goal: Goal, own: GuardedPolicy | None, *, unsolved: bool
    ) -> None:
        """One that leads, and has no machines to add."""
        controller = Controller(
            "vm-c0", self.subjects, FleetLimits(kinds={}), autoscaler=settings, goal=goal, policy=own
        )
        self.stage.enter("c0", controller, lambda command: _controller_edge(command, unsolved=unsolved))
        for record in self.records:
            self.stage.send("c0", change_of(record))
        for bucket in ("infaas-catalog", "infaas-control"):
            self.stage.send("c0", Synced(bucket))

    def start_worker(self, worker: str) -> None:
        """Its devices: those given for it, else a CPU with two cores."""
        devices = self._spec.get(worker, (CPU,))
        actor = MonitorActor(worker, "cpu", devices, PRICES, self.subjects, next(self._incarnations))
        self.stage.enter(worker, actor, lambda _: (0.0, MachineSample(utilisation=0.2, memory_used_mb=500.0)))
        self.follow(worker)
        for device in devices:
            executor = make_executor(Settings(), self.subjects, worker, device, next(self._incarnations))
            self.stage.enter(f"{worker}/{device.name}", executor, Scripted(self.stage, worker))

    def load(self, rate: float, seconds: float, step: float = 0.02, **needs: Any) -> list[str]:
        """Evenly spaced queries; notes what is loaded after every step."""
        labels: list[str] = []
        due, end = 0.0, self.stage.now + seconds
        while self.stage.now < end - 1e-9:
            due += rate * step
            while due >= 1.0:
                due -= 1.0
                labels.append(self.ask(**needs))
            self.stage.run(step)
            self.counts.append((self.stage.now, self.instances()))
        return labels

    def instances(self) -> dict[str, dict[str, int]]:
        """Variant to state to number of instances, over all workers."""
        found: dict[str, dict[str, int]] = {}
        for name, member in self.stage.members.items():
            if name.startswith("w") and "/" not in name:
                for instance in member.actor._table.instances.values():  # type: ignore[attr-defined]
                    states = found.setdefault(instance.record.variant, {})
                    states[instance.state] = states.get(instance.state, 0) + 1
        return found

    def running(self, variant: str) -> int:
        """Instances that can answer."""
        return sum(n for state, n in self.instances().get(variant, {}).items() if state not in ("Loading", "Unloading"))

    def needed(self, variant: str) -> int:
        """Instances that are not reclaimable."""
        workers = [m.actor for name, m in self.stage.members.items() if name.startswith("w") and "/" not in name]
        loads = [one for worker in workers for one in worker._table.instances.values()]  # type: ignore[attr-defined]
        return sum(one.record.variant == variant and not one.reclaimable for one in loads)

    def answered(self, labels: Iterable[str]) -> float:
        """Share of these queries that were answered."""
        ends = [self.replies(label) for label in labels]
        assert all(len(end) == 1 for end in ends), "not exactly one reply each"
        return sum("outputs" in end[0] for end in ends) / max(1, len(ends))

    def scalings(self, scaler: str = "model") -> list[tuple[str, str | None, str]]:
        """(action, variant, reason) of the scaling events so far."""
        events = [event for kind, event in self.stage.records if kind == "scaling"]
        return [(e.action, e.variant, e.reason) for e in events if e.scaler == scaler]
