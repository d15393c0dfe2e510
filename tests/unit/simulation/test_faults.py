"""Each fault does what services.simulation.scenario.model.FaultSpec says, when it says so."""

from typing import Any

import pytest

from bus.messages.catalog import VariantRecord
from bus.messages.events import StateEvent
from bus.messages.scaling import StartMachine
from services.simulation.edges import LoadFault
from services.simulation.kernel import NETWORK
from services.simulation.scenario.model import BEGINS, FaultSpec, MachineSpec
from services.simulation.system import SimulatedSystem
from tests.support.data.small_scenarios import CPU, Told, load, machine, scenario, settings

SPARE = machine("spare", devices=(CPU,), start=1, minimum=0, maximum=3, boot_s=2.0)
EXTRA = StartMachine(worker="spare-x", kind="spare", epoch=1)


class Watched(Told):
    """A run of a quiet system with these faults. notes: what `look` saw at each of the times."""

    def __init__(self, *faults: FaultSpec, rate: float = 2.0, machines: tuple[MachineSpec, ...] = ()) -> None:
        given = scenario(
            load((0.0, rate)),
            duration_s=10.0,
            faults=faults,
            machines=machines or (machine(), SPARE),
            policy=settings(machines={"idle_s": 1e6}),
        )
        super().__init__(given)
        self.notes: dict[float, Any] = {}

    def does(self, time: float, action: Any, argument: Any) -> None:
        """Call this at a time of the scenario."""
        self.kernel.at(BEGINS + time - self.kernel.now, action, argument)

    def at(self, *times: float, look: Any) -> dict[float, Any]:
        """Run it; what `look(system)` says at these times of the scenario."""
        for time in times:
            self.does(time, self._note, (time, look))
        self.result()
        return self.notes

    def _note(self, what: tuple[float, Any]) -> None:
        self.notes[what[0]] = what[1](self.system)


def workers(system: SimulatedSystem) -> str:
    return " ".join(sorted(system.machines))


def slowness(system: SimulatedSystem) -> dict[str, float]:
    """Of the devices that are slow."""
    return {
        f"{worker}/{name}": device.slow
        for worker, one in system.machines.items()
        for name, device in one.devices.items()
        if device.slow != 1.0
    }


ALL = "mixed-0 mixed-1 spare-0"


@pytest.mark.parametrize(
    ("which", "left"),
    [
        ({"worker": "mixed-1"}, "mixed-0 spare-0"),
        ({"hardware": "spare"}, "mixed-0 mixed-1"),
        ({"hardware": "mixed"}, "mixed-1 spare-0"),
        ({}, "mixed-1 spare-0"),
        ({"worker": "unknown"}, ALL),
    ],
)
def test_a_worker_dies_without_a_word(which: dict[str, str], left: str) -> None:
    run = Watched(FaultSpec(kind="worker-dies", at_s=3.0, **which))
    assert run.at(2.999, 3.001, 9.0, look=workers) == {2.999: ALL, 3.001: left, 9.0: left}
    gone = set(ALL.split()) - set(left.split())
    assert not [name for name in run.kernel.members if any(worker in name for worker in gone)]
    assert {name for name, event in run.log if getattr(event, "to_state", "") == "Stopped"} == set()
    assert not [1 for name, event in run.log if any(worker in name for worker in gone) and event.time > BEGINS + 3.0]


def test_the_dead_are_taken_one_each_and_not_paid_for() -> None:
    rates = Watched(FaultSpec(kind="worker-dies", at_s=3.0, worker="mixed-1")).at(
        2.9, 3.1, look=lambda system: system.bill.rate
    )
    assert rates[2.9] - rates[3.1] == pytest.approx(machine().price_per_hour / 3600.0)
    run = Watched(*(FaultSpec(kind="worker-dies", at_s=at) for at in (1.0, 2.0, 3.0, 4.0)))
    assert run.at(1.5, 2.5, 3.5, look=workers) == {1.5: "mixed-1 spare-0", 2.5: "spare-0", 3.5: ""}


def test_devices_become_slow_for_a_while() -> None:
    run = Watched(
        FaultSpec(kind="device-slow", at_s=1.0, until_s=5.0, hardware="gpu", factor=7.0),
        FaultSpec(kind="device-slow", at_s=3.0, until_s=7.0, worker="mixed-1", factor=1.1),
        FaultSpec(kind="device-slow", at_s=8.0, worker="mixed-0", hardware="cpu", factor=3.0),
    )
    assert run.at(0.5, 2.0, 4.0, 6.0, 7.5, 9.0, look=slowness) == {
        0.5: {},
        2.0: {"mixed-0/gpu": 7.0, "mixed-1/gpu": 7.0},
        4.0: {"mixed-0/gpu": 7.0, "mixed-1/gpu": 7.0, "mixed-1/cpu": 1.1},
        6.0: {"mixed-1/gpu": 1.1, "mixed-1/cpu": 1.1},
        7.5: {},
        9.0: {"mixed-0/cpu": 3.0},
    }


def test_machines_that_come_are_slow_too_and_failing_loads_told() -> None:
    run = Watched(FaultSpec(kind="device-slow", at_s=1.0, until_s=6.0, hardware="cpu", factor=3.0))
    run.does(2.0, run.system._ordered, EXTRA)
    notes = run.at(5.0, 7.0, look=slowness)
    assert notes == {5.0: dict.fromkeys((f"{one}/cpu" for one in (*ALL.split(), "spare-x")), 3.0), 7.0: {}}
    run = Watched(FaultSpec(kind="load-fails", at_s=0.0), rate=150.0)
    run.result()
    reasons = {event.reason for _, event in run.log if isinstance(event, StateEvent) and event.from_state == "Loading"}
    assert "small-cpu does not load: a fault of the scenario" in reasons


@pytest.mark.parametrize(
    ("which", "fails"),
    [
        ({}, {"small-cpu", "large-cpu", "large-gpu"}),
        ({"variant": "small-cpu"}, {"small-cpu"}),
        ({"hardware": "gpu"}, {"large-gpu"}),
        ({"hardware": "gpu", "variant": "small-cpu"}, set()),
    ],
)
def test_loads_fail(which: dict[str, str], fails: set[str]) -> None:
    run = Watched(FaultSpec(kind="load-fails", at_s=2.0, until_s=4.0, **which))

    def refused(system: SimulatedSystem, record: VariantRecord) -> bool:
        try:
            return system.load_takes(record, 1.0) != 1.0
        except LoadFault:
            return True

    def look(system: SimulatedSystem) -> set[str]:
        return {record.variant for record in run.scenario.variants if refused(system, record)}

    assert run.at(1.0, 3.0, 5.0, look=look) == {1.0: set(), 3.0: fails, 5.0: set()}


def test_messages_are_delayed() -> None:
    run = Watched(
        FaultSpec(kind="messages-delayed", at_s=1.0, until_s=5.0, delay_s=0.3),
        FaultSpec(kind="messages-delayed", at_s=4.0, until_s=6.0, delay_s=0.1),
    )
    notes = run.at(0.5, 2.0, 4.5, 5.5, 7.0, look=lambda _: run.kernel.delay)
    assert notes == {
        0.5: NETWORK,
        2.0: NETWORK + 0.3,
        4.5: pytest.approx(NETWORK + 0.4),
        5.5: pytest.approx(NETWORK + 0.1),
        7.0: NETWORK,
    }
    took = [
        (at - BEGINS, message.latency_ms) for at, _, message in run.ends if at > BEGINS and hasattr(message, "outputs")
    ]
    quiet = [ms for at, ms in took if at < 0.9 or at > 6.5]
    assert quiet
    assert max(quiet) < 100.0
    assert run.report.finished(0.0, 0, 1.0, 0)["refusals"]["deadline"] > 0, (
        "dispatchers know how long they were on the way"
    )


# -- machines that come and go, which faults meet


def test_a_machine_stopped_while_it_boots_never_works_and_is_paid_for_until_then() -> None:
    run = Watched()
    run.does(1.0, run.system._ordered, EXTRA)
    run.does(1.5, run.system._ordered, EXTRA)
    run.does(2.0, run.system.stop, EXTRA.worker)
    notes = run.at(0.9, 1.1, 1.6, 2.1, 5.0, look=lambda system: (workers(system), system.bill.rate))
    before = notes[0.9][1]
    assert notes[1.1] == (ALL, pytest.approx(before + SPARE.price_per_hour / 3600.0))
    assert notes[1.6] == notes[1.1]  # asked for twice, started once
    assert notes[2.1] == notes[5.0] == (ALL, pytest.approx(before))
