"""Whatever is ordered by whom, and whatever becomes of it: no device ever carries more than its totals."""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from bus.messages.events import CostEvent, StateEvent
from bus.messages.fleet import (
    EnsureLoaded,
    ExecutorExited,
    InstanceFailed,
    InstanceLoaded,
    InstanceSample,
    InstanceUnloaded,
    LoadAccepted,
    LoadInstance,
    LoadRefused,
    Release,
    UnloadInstance,
)
from bus.messages.scaling import Drain
from services.core.actor import Changed
from services.core.lifecycle import COUNTED, legal
from services.core.placement import NOTHING, Amount, Device, cores_needed, quarantine_key, short_of, total
from services.core.settings import MonitorSettings
from services.monitor.loading import needs_of
from tests.support.data.examples import examples
from tests.support.simulated.monitored_worker import CPU, S, World, variant

SETTINGS = MonitorSettings(memory_share=0.8, cores_overcommit=2.0, quarantine_after=0)
DEVICES = {
    device.name: device
    for device in (
        Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0),
        Device(name="gpu-0", kind="gpu", cores=1, memory_mb=1000.0, simulated=True),
        Device(name="inferentia-0", kind="inferentia", cores=4, memory_mb=2000.0, simulated=True),
        Device(name="inferentia-1", kind="inferentia", cores=4, memory_mb=500.0, simulated=True),
    )
}
LIMITS = {name: total(device, SETTINGS.memory_share, SETTINGS.cores_overcommit) for name, device in DEVICES.items()}


def made(name: str, hardware: str, memory_mb: float, threads: int = 1) -> Any:
    return replace(variant(name, memory_mb=memory_mb, threads=threads), hardware=hardware, simulated=hardware != "cpu")


VARIANTS = [
    made("thin", "cpu", 20.0), made("wide", "cpu", 100.0, threads=2), made("fat", "cpu", 390.0),
    made("g", "gpu", 300.0), made("i", "inferentia", 80.0), made("j", "inferentia", 390.0),
]  # fmt: skip
BY_NAME = {record.variant: record for record in VARIANTS}
BUSY = st.dictionaries(st.sampled_from(sorted(BY_NAME)), st.integers(0, 3))
SHARES = st.dictionaries(st.sampled_from(sorted(BY_NAME)), st.floats(0.0, 1.0))


class Totals(RuleBasedStateMachine):
    """A monitor and its executors, one a device. there: what really lies in their memory, instance -> variant."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(list(DEVICES.values()), settings=SETTINGS)
        self.incarnation = dict.fromkeys(DEVICES, 1)
        self.there: dict[str, dict[str, str]] = {name: {} for name in DEVICES}
        self.promised: dict[str, dict[str, str]] = {name: {} for name in DEVICES}  # ordered, not yet carried out
        self.handled = 0
        self.world.catalogue(*VARIANTS)
        self.report({})

    # -- orderers

    @rule(
        record=st.sampled_from(VARIANTS),
        at_least=st.integers(0, 6),
        orderer=st.sampled_from(["d1", "model-w1", "vm-1"]),
        epoch=st.integers(0, 3),
        app=st.sampled_from([None, "faces", "digits"]),
    )
    def order(self, record: Any, at_least: int, orderer: str, epoch: int, app: str | None) -> None:
        order = EnsureLoaded(variant=record, at_least=at_least, app=app, orderer=orderer, epoch=epoch)
        before = {status.instance for status in self.world.beat.instances}
        reply = self.world.ask(order)
        if isinstance(reply, LoadAccepted):
            assert len(reply.instances) >= at_least
        else:
            assert reply.reason
        if {status.instance for status in self.world.beat.instances} - before:
            [cpu] = [device for device in self.world.beat.devices if device.kind == "cpu"]
            if record.hardware == "cpu":
                assert cpu.cores_used <= LIMITS["cpu"].cores, "with the new one"

    @rule(record=st.sampled_from(VARIANTS), keep=st.integers(0, 2), epoch=st.integers(0, 3))
    def release(self, record: Any, keep: int, epoch: int) -> None:
        self.world.tell(Release(variant=record.variant, keep=keep, epoch=epoch))

    @rule(record=st.sampled_from(VARIANTS), keep=st.integers(0, 2))
    def mark(self, record: Any, keep: int) -> None:
        self.world.tell(Release(variant=record.variant, keep=keep, reclaim=True))

    @rule(record=st.sampled_from(VARIANTS))
    def room_that_counts_as_free_is_given(self, record: Any) -> None:
        """Unless the worker takes nothing: what is needed and the new instance must fit, then it is admitted."""
        devices = [d for d in self.world.beat.devices if d.kind == record.hardware]
        used = [Amount(d.memory_used_mb, d.cores_used) + needs_of(record) for d in devices]
        fits = any(short_of(one, LIMITS[d.device]).none for one, d in zip(used, devices, strict=True))
        needed = {s.instance for s in self.world.beat.instances if not s.reclaimable and s.state in COUNTED}
        have = sum(s.variant == record.variant for s in self.world.beat.instances if s.instance in needed)
        order = EnsureLoaded(variant=record, at_least=have + 1)
        reply = self.world.ask(order)
        if fits and not self.world.beat.draining:
            assert isinstance(reply, LoadAccepted) or "tried again" in reply.reason, reply
            assert needed <= {s.instance for s in self.world.beat.instances if s.state in COUNTED}

    @rule(resume=st.booleans())
    def drain(self, resume: bool) -> None:
        self.world.tell(Drain(epoch=0, resume=resume))

    # -- executors

    def heard(self) -> None:
        """Take new orders in."""
        for subject, order in self.world.published[self.handled :]:
            if isinstance(order, LoadInstance):
                self.promised[subject.split(".")[3]][order.instance] = order.variant.variant
        self.handled = len(self.world.published)

    @rule(fail=st.sampled_from([False, False, False, True]))
    def executors_load(self, fail: bool) -> None:
        """Everything that they were told to; one of them cannot."""
        self.heard()
        for device, waiting in self.promised.items():
            for instance, name in list(waiting.items()):
                del waiting[instance]
                facts = self.facts(device, instance, name)
                if fail:
                    self.world.tell(InstanceFailed(reason="no such operator", **facts))
                    fail = False
                elif instance not in self.there[device]:
                    self.there[device][instance] = name
                    self.world.tell(InstanceLoaded(load_ms=1.0, memory_mb=0.0, proof="here", **facts))

    @rule(device=st.sampled_from(sorted(DEVICES)), data=st.data())
    def an_executor_unloads(self, device: str, data: st.DataObject) -> None:
        wanted = {m.instance for _, m in self.world.published if isinstance(m, UnloadInstance)} & set(
            self.there[device]
        )
        if wanted:
            instance = data.draw(st.sampled_from(sorted(wanted)))
            name = self.there[device].pop(instance)
            self.world.tell(InstanceUnloaded(**self.facts(device, instance, name)))

    @rule(device=st.sampled_from(sorted(DEVICES)))
    def an_executor_dies_and_comes_back(self, device: str) -> None:
        self.world.tell(ExecutorExited(worker="w1", device=device, at=self.world.now, reason="killed"))
        self.there[device], self.promised[device] = {}, {}
        self.handled = len(self.world.published)
        self.incarnation[device] += 1
        self.report({})

    @rule(busy=BUSY, seconds=st.sampled_from([0.0, 0.5, 5.0]), computes=SHARES)
    def time_passes(self, busy: dict[str, int], seconds: float, computes: dict[str, float]) -> None:
        self.world.advance(seconds)
        self.report(busy, computes)

    def report(self, busy: dict[str, int], computes: Mapping[str, float] = MappingProxyType({})) -> None:
        """computes: the part of the time that a variant's instances compute, as long as there are cores for it."""
        for device, loaded in self.there.items():
            threads = sum(computes.get(name, 0.0) * cores_needed(BY_NAME[name]) for name in loaded.values())
            share = 0.5 * min(1.0, DEVICES[device].cores / threads if threads else 1.0)
            samples = [
                InstanceSample(
                    instance, name, busy.get(name, 0), 0.0, computes.get(name, 0.0) > 0, 0,
                    share * computes.get(name, 0.0), 0.0, [],
                )
                for instance, name in loaded.items()
            ]  # fmt: skip
            self.world.hear(samples, device, incarnation=self.incarnation[device])

    def facts(self, device: str, instance: str, name: str) -> dict[str, Any]:
        return {"instance": instance, "variant": name, "device": device, "incarnation": self.incarnation[device]}

    # -- promises

    @invariant()
    def what_is_promised_fits(self) -> None:
        for device in self.world.beat.devices:
            used = Amount(device.memory_used_mb, device.cores_used)
            used += Amount(device.memory_reclaimable_mb, device.cores_reclaimable)
            # What is there may begin to compute, on no more threads than there are cores, after others were admitted.
            later = device.cores if device.kind == "cpu" else 0.0
            assert short_of(used, LIMITS[device.device] + Amount(0.0, later + 1e-9)).none, device

    @invariant()
    def what_is_really_there_fits(self) -> None:
        for device, loaded in self.there.items():
            counted = device != "cpu"  # of a CPU's cores, what idle instances need is not promised to them
            taken = sum(
                (Amount(BY_NAME[n].profile.memory_mb, counted * cores_needed(BY_NAME[n])) for n in loaded.values()),
                NOTHING,
            )
            assert short_of(taken, LIMITS[device]).none, (device, loaded)

    @precondition(lambda self: any(len(loaded) > 1 for loaded in self.there.values()))
    @invariant()
    def inferentia_has_four_cores(self) -> None:
        assert all(len(self.there[f"inferentia-{n}"]) <= 4 for n in (0, 1))


Totals.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)
TestTotals = Totals.TestCase


def test_an_accelerator_takes_four_and_the_next_goes_to_the_other_one() -> None:
    """The walk can reach the limits at all: four a chip by cores, one less by memory."""
    machine = Totals()
    small, large = BY_NAME["i"], BY_NAME["j"]
    assert isinstance(machine.world.ensure(small, 8, app=None), LoadAccepted)
    assert machine.world.ensure(small, 9, app=None).reason == (
        "i needs 1 core; instances in use take 4 of the 4 that inferentia-1 may promise"
    )
    assert isinstance(machine.world.ensure(large, 1, app=None), LoadRefused)


def test_an_idle_instance_makes_room_for_another_on_a_full_accelerator() -> None:
    machine = Totals()
    names = machine.world.ensure(BY_NAME["i"], 8, app=None).instances
    machine.heard()
    for device in ("inferentia-0", "inferentia-1"):
        for instance in list(machine.promised[device]):
            name = machine.promised[device].pop(instance)
            machine.there[device][instance] = name
            machine.world.tell(
                InstanceLoaded(load_ms=1.0, memory_mb=0.0, proof="here", **machine.facts(device, instance, name))
            )
    machine.world.advance(5.0)
    machine.report({})
    assert isinstance(machine.world.ensure(BY_NAME["j"], 1, app=None), LoadAccepted)
    gone = [m.instance for _, m in machine.world.published if isinstance(m, UnloadInstance)]
    assert len(gone) == 1
    assert gone[0] in names


def test_cores_are_taken_by_what_computes() -> None:
    """2 cores, so 4 threads: those that compute, and those of an instance that comes."""
    machine = Totals()
    thin, wide = BY_NAME["thin"], BY_NAME["wide"]

    def cores_used() -> float:
        return float(machine.world.beat.devices[0].cores_used)

    def compute(seconds: float, **shares: float) -> None:
        machine.executors_load(fail=False)  # type: ignore[call-arg]
        for _ in range(round(2 * seconds)):
            machine.world.advance(0.5)
            machine.report({}, shares)
        machine.world.advance(0.5)

    assert isinstance(machine.world.ensure(thin, 20, app=None), LoadAccepted), "memory says how many: 20 of 20 MB"
    assert cores_used() == 0.0, "nothing computes"
    compute(1.0, thin=0.02)
    assert cores_used() == pytest.approx(20 * 0.02)
    compute(5.0, thin=0.1)
    assert 1.99 <= cores_used() <= 2.0, "no more than the cores that there are, though the last ones' sum is rounded up"
    assert isinstance(machine.world.ensure(wide, 1, app=None), LoadAccepted)
    compute(2.5)
    assert cores_used() == pytest.approx(1.0, abs=0.2), "half of the last five seconds"
    compute(5.0)
    assert cores_used() == 0.0, "and then none"


def test_where_cores_are_promised_once_what_computes_leaves_no_room_for_all_threads() -> None:
    world = World(settings=MonitorSettings(cores_overcommit=1.0))
    busy, wide = variant("busy"), variant("wide", threads=2)
    world.serve({world.load(busy): {"faces": 10}}, times=10)  # 10 ms each: a fifth of a core
    assert world.beat.devices[0].cores_used == pytest.approx(0.2)
    assert world.ensure(wide).reason == "wide needs 2 cores; instances in use take 0.2 of the 2 that cpu may promise"
    world.serve(times=11)
    assert isinstance(world.ensure(wide), LoadAccepted), "it is idle"


def test_a_batch_counts_while_it_computes() -> None:
    """One that takes four seconds: reports say that it computes, long before they say that it is done."""
    world = World()
    name = world.load(variant("long"))
    for second in range(2):
        for _ in range(2):
            world.advance(0.5)
            sample = InstanceSample(name, "long", 1, 0.0, 0, 0, 0.0, 0.0, [], computed=0.5)
            world.hear([sample], "cpu")
        assert world.beat.devices[0].cores_used == pytest.approx(1.0, abs=0.51 if second == 0 else 0.01)


# -- Whatever is ordered, and whatever executors do, a monitor keeps its promises.
SIZES = {name: variant(name, memory_mb=memory) for name, memory in (("a", 100.0), ("b", 250.0), ("c", 400.0))}
LIMIT = 800.0


class Walk(RuleBasedStateMachine):
    """Orders, releases, work, failures, deaths and silence in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.started = self.world.now
        self.deaths = 0
        self.world.catalogue(*SIZES.values())

    @rule(name=st.sampled_from("abc"), at_least=st.integers(0, 4), app=st.sampled_from([None, "faces", "digits"]))
    def order(self, name: str, at_least: int, app: str | None) -> None:
        reply = self.world.ensure(SIZES[name], at_least, app)
        if isinstance(reply, LoadAccepted):
            assert len(reply.instances) >= at_least
            assert not any(self.world.told()[instance].reclaimable for instance in reply.instances)
            assert len(set(reply.instances)) == len(reply.instances)
        else:
            assert reply.reason

    @rule(name=st.sampled_from("abc"), keep=st.integers(0, 2))
    def release(self, name: str, keep: int) -> None:
        self.world.tell(Release(variant=name, keep=keep))
        serving = [s for s in self.world.told().values() if s.variant == name and s.state != "Unloading"]
        assert len(serving) <= max(keep, 0)

    @rule(name=st.sampled_from("abc"), keep=st.integers(0, 2))
    def mark(self, name: str, keep: int) -> None:
        world, order = self.world, Release(variant=name, keep=keep, reclaim=True)
        going = {instance for instance, state in world.states().items() if state == "Unloading"}
        world.tell(order)
        present = [s for s in world.told().values() if s.variant == name and s.state != "Unloading"]
        assert sum(not status.reclaimable for status in present) <= keep
        assert {instance for instance, state in world.states().items() if state == "Unloading"} == going
        told, events = world.told(), len(world.events)
        world.tell(order)
        assert (world.told(), len(world.events)) == (told, events), "the same order again changes nothing"

    @precondition(lambda self: self.world.executor is not None)
    @rule(fail=st.sampled_from(["", "", "no such operator"]))
    def executor_obeys(self, fail: str) -> None:
        self.world.obey(fail=fail)

    @precondition(lambda self: self.world.executor is not None)
    @rule(data=st.data(), slower=st.sampled_from([1.0, 4.0]))
    def executor_reports(self, data: st.DataObject, slower: float) -> None:
        names = st.sampled_from(sorted(self.world.loaded) or [""])
        served = data.draw(
            st.dictionaries(names, st.dictionaries(st.sampled_from(["faces", "cars"]), st.integers(1, 60)))
        )
        self.world.report(served, queued=data.draw(st.dictionaries(names, st.integers(0, 200))), slower=slower)

    @precondition(lambda self: self.world.executor is not None)
    @rule(told=st.booleans())
    def executor_dies(self, told: bool) -> None:
        world = self.world
        if told:
            world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed"))
        world.obey()
        world.executor, world.loaded = None, {}

    @precondition(lambda self: self.world.executor is None)
    @rule()
    def executor_starts(self) -> None:
        self.deaths += 1
        self.world.obey()  # orders to nobody are lost
        self.world.executor = 1 + self.deaths
        self.world.report()

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds, reporting=self.world.executor is not None)

    @rule(name=st.sampled_from("abc"))
    def operator_releases(self, name: str) -> None:
        self.world.tell(Changed(S.control_bucket, quarantine_key("w1", name), None))
        assert name not in self.world.beat.quarantined

    @rule(resume=st.booleans())
    def drained_or_back(self, resume: bool) -> None:
        self.world.tell(Drain(epoch=0, resume=resume))
        assert self.world.beat.draining != resume
        before = len(self.world.told())
        self.world.ensure(SIZES["a"], 1 + before)
        assert resume or len(self.world.told()) == before

    @invariant()
    def memory_is_never_promised_twice(self) -> None:
        [device] = self.world.beat.devices
        assert device.memory_used_mb + device.memory_reclaimable_mb <= LIMIT
        taken = sum(SIZES[name].profile.memory_mb for name in self.world.loaded.values())
        assert taken <= LIMIT, "what is loaded and what is still unloading share the memory"

    @invariant()
    def every_move_is_legal_and_continues_the_last(self) -> None:
        at: dict[tuple[str | None, str], str] = defaultdict(lambda: "Inactive")
        for event in self.world.of(StateEvent):
            key = (event.app, event.instance)
            assert event.from_state == at[key], event
            fresh = event.from_state == "Inactive"  # an app may join an instance in any state
            released = (event.from_state, event.to_state) == ("Quarantined", "Inactive")
            assert fresh or released or legal(event.from_state, event.to_state), event  # type: ignore[arg-type]
            at[key] = event.to_state
            assert event.reason

    @invariant()
    def history_and_heartbeat_agree(self) -> None:
        at: dict[tuple[str, str | None], str] = {}
        for event in self.world.of(StateEvent):
            at[event.instance, event.app] = event.to_state
        told = self.world.told()
        for (instance, app), state in at.items():
            if instance not in told:
                assert state == "Inactive" or instance.removesuffix(".w1") in self.world.beat.quarantined
            elif app is not None:
                assert told[instance].app_states.get(app, told[instance].state) == state

    def teardown(self) -> None:
        self.world.stop()
        bill = CPU.cores * 0.048 / 3600 * (self.world.now - self.started)
        assert abs(sum(row.cost for row in self.world.of(CostEvent)) - bill) <= 1e-9 * max(1.0, bill)


Walk.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestWalk = Walk.TestCase
