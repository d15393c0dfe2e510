"""A monitor's life: heartbeats, executors that come and go, states per app, samples, costs."""

import asyncio
import os
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.codec import decode
from bus.memory import MemoryBus
from bus.messages.events import CostEvent, InstanceEventSample, StateEvent, WorkerEvent, WorkerSample
from bus.messages.fleet import ExecutorExited, LoadAccepted, LoadInstance, LoadRefused, UnloadInstance, WorkerHeartbeat
from bus.subjects import Subjects
from services.core.actor import Stopping
from services.core.placement import Device, quarantine_key
from services.core.settings import MonitorSettings, Settings, WorkerSettings
from services.monitor.__main__ import wire
from services.monitor.edge import MachineEdge
from services.monitor.effects import KeepQuarantine, MachineSample, SampleMachine
from services.shell.host.accelerators import why_no_gpu
from tests.support.clients.responders import until
from tests.support.data.pipelines import deployed
from tests.support.simulated.monitored_worker import CPU, S, World, variant

GPU = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, address="cuda:0")


def moves(world: World, instance: str) -> list[tuple[str | None, str, str]]:
    return [(e.app, e.from_state, e.to_state) for e in world.of(StateEvent) if e.instance == instance]


def beats(world: World) -> int:
    return sum(subject == S.worker_heartbeat("w1") for subject, _ in world.published)


def test_a_worker_boots_is_ready_and_stops() -> None:
    world = World()
    world.stop()
    assert [(e.from_state, e.to_state) for e in world.of(WorkerEvent)] == [
        ("None", "Booting"),
        ("Booting", "Ready"),
        ("Ready", "Stopped"),
    ]
    assert world.beat.leaving


def test_a_monitor_whose_successor_is_there_says_nothing_of_an_end() -> None:
    world = World()
    world.ensure(variant())
    world.obey()
    before, events = world.beat, len(world.of(WorkerEvent))
    world.tell(Stopping(5.0, succeeded=True))
    assert world.beat is not before, "the last word is as late as can be"
    assert not world.beat.leaving
    assert not world.beat.draining
    assert world.beat.instances
    assert world.beat.instances == before.instances
    assert len(world.of(WorkerEvent)) == events


def test_heartbeats_come_every_half_second_and_at_every_change() -> None:
    world = World()
    world.published.clear()
    world.advance(5.0, reporting=True)
    assert beats(world) == 10
    world.published.clear()
    world.ensure(variant())
    assert beats(world) == 1
    world.obey()
    assert beats(world) == 2


def test_a_heartbeat_describes_the_device() -> None:
    world = World()
    world.machine = MachineSample(utilisation=0.75, memory_used_mb=600.0)
    world.load(variant(threads=2))
    world.advance(1.0, reporting=True)
    [device] = world.beat.devices
    assert (device.device, device.kind, device.cores, device.memory_mb) == ("cpu", "cpu", 2, 1000.0)
    assert (device.cores_used, device.memory_used_mb, device.utilisation) == (0.0, 100.0, 0.75)
    assert device.price_per_hour == pytest.approx(0.096)
    assert device.alive and device.incarnation == 1
    assert (world.beat.worker, world.beat.incarnation, world.beat.at) == ("w1", 7, world.now)


def test_of_a_cpu_all_that_the_executors_processes_do_not_use_is_foreign() -> None:
    world = World((CPU, GPU))
    world.machine = MachineSample(utilisation=0.75, memory_used_mb=600.0, cores={0: 0.75, 1: 0.75})
    for half_second in range(6):
        world.report(device="cpu", cpu_s=10.0 + 0.4 * half_second)  # 0.8 cores
        world.report(device="gpu-0", cpu_s=3.0 + 0.05 * half_second)  # 0.1 cores
        world.advance(0.5)
    cpu, _ = world.beat.devices
    assert (cpu.utilisation, cpu.foreign_use) == (0.75, pytest.approx(0.75 - 0.45))
    # it counts anew, so what instances computed counts until it has reported twice
    world.report(device="cpu", cpu_s=0.1)
    world.advance(0.5)
    assert world.beat.devices[0].foreign_use == pytest.approx(0.75)


def test_of_a_gpu_all_that_its_instances_do_not_compute_is_foreign() -> None:
    world = World((CPU, GPU))
    world.report(device="gpu-0")
    instance = world.load(replace(variant(), hardware="gpu"))
    world.machine = MachineSample(utilisation=0.1, memory_used_mb=600.0, gpus={"cuda:0": 0.6, "cuda:1": 1.0})
    for _ in range(4):
        world.report({instance: {"faces": 10}}, device="gpu-0")  # 0.1 s of each half second
        world.advance(0.5)
    _, device = world.beat.devices
    assert (device.utilisation, device.foreign_use) == (0.6, pytest.approx(0.4))
    world.machine = MachineSample(utilisation=0.1, memory_used_mb=600.0)  # the driver says nothing any more
    world.advance(1.0)
    _, device = world.beat.devices
    assert (device.utilisation, device.foreign_use) == (pytest.approx(0.2), 0.0)


def test_loads_wait_for_an_executor_that_is_still_starting() -> None:
    world = World(executor=None)
    assert isinstance(world.ensure(variant()), LoadAccepted)
    assert not world.beat.devices[0].alive
    assert not world.said(LoadInstance)
    world.executor = 1
    world.report()
    world.obey()
    assert world.states() == {"v.w1-1": "Active"}


def test_without_an_executor_loads_are_refused_and_its_killer_not_loaded_again() -> None:
    world = World(executor=None)
    world.advance(11.0)
    assert world.ensure(variant()).reason == "the executor of cpu does not run"
    world = World()
    world.ensure(variant())
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed by signal 11"))
    assert "killed by signal 11" in world.ensure(variant()).reason


def test_what_served_is_loaded_again_after_the_executor_died() -> None:
    world = World()
    served, loading = world.load(variant("a")), world.ensure(variant("b")).instances[0]
    world.report({served: {"faces": 1, "digits": 1}})
    world.published.clear()
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed by signal 9"))
    assert not world.beat.devices[0].alive
    assert world.states() == {"a.w1-2": "Loading"}
    assert moves(world, served)[-2:] == [("faces", "Active", "Inactive"), ("digits", "Active", "Inactive")]
    assert "executor died" in world.of(StateEvent)[-1].reason
    assert moves(world, loading)[-1] == ("faces", "Loading", "Inactive")
    assert not world.said(LoadInstance), "nobody is there to hear it"
    world.report()
    assert not world.beat.devices[0].alive, "a late word of the dead process"
    world.loaded, world.executor = {}, 2
    world.report()
    assert world.beat.devices[0].incarnation == 2
    world.obey()
    assert world.states() == {"a.w1-2": "Active"}
    assert [e.to_state for e in world.of(WorkerEvent)] == ["Booting", "Ready", "Failed", "Ready"]
    assert world.of(WorkerEvent)[-1].reason == "the executor of cpu runs; the last one died: killed by signal 9"


def test_an_executor_whose_successor_serves_is_told_and_changes_nothing() -> None:
    world = World()
    served = world.load(variant())
    why = "it did not turn for 2 s (stopped by a signal) and was ended"
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason=why, succeeded=True))
    event = world.of(WorkerEvent)[-1]
    assert (event.from_state, event.to_state) == ("Ready", "Ready")
    assert event.reason == f"the executor of cpu was replaced: {why}"
    world.report()
    assert world.beat.devices[0].alive
    assert world.states() == {served: "Active"}


def test_a_new_incarnation_alone_says_that_the_old_one_died() -> None:
    world = World()
    world.load(variant())
    world.loaded, world.executor = {}, 2
    world.report()
    assert moves(world, "v.w1-1")[-1] == ("faces", "Active", "Inactive")
    world.obey()
    assert world.states() == {"v.w1-2": "Active"}
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now - 1.0, reason="late word of the first one's end"))
    assert world.states() == {"v.w1-2": "Active"}


def test_a_silent_executor_is_not_alive() -> None:
    world = World()
    world.load(variant())
    world.advance(2.0)
    assert world.beat.devices[0].alive
    world.advance(1.0)
    assert not world.beat.devices[0].alive
    assert world.states() == {"v.w1-1": "Active"}
    world.report()
    assert world.beat.devices[0].alive
    assert [e.to_state for e in world.of(WorkerEvent)] == ["Booting", "Ready", "Failed", "Ready"]


def test_a_monitor_that_stood_still_itself_does_not_take_its_executors_for_dead() -> None:
    world = World()
    world.load(variant())
    world.advance(1.0)
    world.now += 5.0
    world.advance(0.5)
    assert world.beat.devices[0].alive
    world.advance(3.0)
    assert not world.beat.devices[0].alive, "by now it would have been heard"


def test_a_new_monitor_adopts_what_the_executor_has() -> None:
    world = World(executor=None)
    world.executor, world.loaded = 5, {"v.w1-3": "v", "x.w1-1": "x"}
    world.report()
    assert world.states() == {}, "it does not know these variants yet"
    assert not world.said(UnloadInstance)
    world.catalogue(variant())
    world.report({"v.w1-3": {"faces": 4}})
    assert world.states() == {"v.w1-3": "Active"}
    assert world.said(UnloadInstance) == [UnloadInstance(instance="x.w1-1")]
    assert moves(world, "v.w1-3") == [(None, "Inactive", "Active"), ("faces", "Inactive", "Active")]
    assert world.ensure(variant(), at_least=2).instances == ["v.w1-3", "v.w1-4"]
    assert world.beat.devices[0].memory_used_mb == 200.0


def test_a_new_monitor_says_nothing_before_it_knows_what_is_loaded() -> None:
    """Its first heartbeat must not tell dispatchers that a living executor is gone, with their queries aboard."""
    world = World(executor=None, startup_s=1.0)
    world.executor, world.loaded = 5, {"v.w1-3": "v"}
    world.report()
    world.advance(0.4)
    assert beats(world) == 0
    world.catalogue(variant())
    assert beats(world) == 0
    world.report()
    assert beats(world) == 1
    assert world.beat.devices[0].alive
    assert world.states() == {"v.w1-3": "Active"}


def test_a_new_monitor_speaks_soon_though_no_executor_runs() -> None:
    world = World(executor=None, startup_s=1.0)
    world.advance(0.9)
    assert beats(world) == 0
    world.advance(0.7)
    assert beats(world) > 0
    assert not world.beat.devices[0].alive


def test_lost_orders_are_repeated_and_lost_instances_loaded_again() -> None:
    world = World()
    world.load(variant())
    world.loaded.clear()
    world.report()
    world.report()
    assert moves(world, "v.w1-1")[-1] == ("faces", "Active", "Inactive")
    assert "the executor no longer has it" in {event.reason for event in world.of(StateEvent)}
    world.obey()
    assert world.states() == {"v.w1-2": "Active"}
    world = World()
    world.ensure(variant())
    world.published.clear()  # nobody heard it
    world.advance(2.5, reporting=True)
    world.obey()
    assert world.states() == {"v.w1-1": "Active"}


def test_overload_is_told_at_once_and_ends_when_load_drops() -> None:
    world = World()
    instance = world.load(variant(saturation=100.0))
    world.serve({instance: {"faces": 50}})
    assert world.states() == {instance: "Overloaded"}
    assert world.told()[instance].load == pytest.approx(100.0)
    assert world.of(StateEvent)[-1].reason == "serves 100 items/s of 100 at saturation"
    world.serve({instance: {"faces": 10}})
    assert world.states() == {instance: "Active"}


def test_an_app_with_a_tight_slo_is_troubled_alone() -> None:
    world = World()
    instance = world.load(variant(saturation=100.0), app="patient")
    world.report({instance: {"patient": 5}}, slo_s=30.0)
    world.serve({instance: {"hasty": 5}}, queued={instance: 20}, slo_s=0.1)
    status = world.told()[instance]
    assert (status.state, status.app_states) == ("Active", {"hasty": "Overloaded"})
    assert moves(world, instance)[-2:] == [("hasty", "Inactive", "Active"), ("hasty", "Active", "Overloaded")]
    world.serve({instance: {"hasty": 5}}, slo_s=0.1)
    assert world.told()[instance].app_states == {}


def test_slowness_below_the_peak_is_interference() -> None:
    world = World()
    instance = world.load(variant())
    world.serve({instance: {"faces": 5}}, slower=4.5)
    status = world.told()[instance]
    assert (status.state, status.latency_ms) == ("Interfered", pytest.approx(45.0))
    assert 1.0 < status.factor < 1.5
    world.advance(10.0, reporting=True)
    assert world.states() == {instance: "Active"}
    assert world.of(StateEvent)[-1].reason == "no batches any more to judge by"


def test_the_live_correction_moves_slowly_and_within_bounds() -> None:
    world = World()
    instance = world.load(variant())
    factors = []
    for _ in range(200):
        world.advance(0.5)
        world.report({instance: {"faces": 10}}, slower=100.0)
        factors.append(world.told()[instance].factor)
    assert factors[0] < 1.3
    assert factors == sorted(factors)
    assert 4.9 < factors[-1] <= 5.0


def test_the_live_correction_is_forgotten_where_nothing_is_computed() -> None:
    """Queries may be refused because of it, and then nothing else can show that what slowed them down is over."""
    world = World()
    instance = world.load(variant())
    world.serve({instance: {"faces": 10}}, slower=100.0, times=60)
    world.advance(4.0, reporting=True)
    assert world.told()[instance].factor > 4.0
    world.advance(8.0, reporting=True)
    assert 1.0 <= world.told()[instance].factor < 1.1


@pytest.mark.parametrize(("queued", "waits", "slow"), [(1, True, False), (2, True, True), (2, False, False)])
def test_what_only_computes_had_no_work_waiting(queued: int, waits: bool, slow: bool) -> None:
    """Batches of one, one being computed at each glance: between them it may well have been idle. It may be a query of two items."""
    world = World()
    instance = world.load(replace(variant(), max_batch=1))
    world.serve({instance: {"faces": 20}}, queued={instance: queued}, waits=waits, times=10)
    assert (world.told()[instance].factor > 1.5) is slow


def test_samples_every_two_seconds_by_app() -> None:
    world = World()
    instance = world.load(variant())
    world.load(variant("idle"), app="digits")
    world.advance(1.9)
    world.report({instance: {"faces": 30, "cars": 10}})
    world.advance(0.2)
    [device] = world.of(WorkerSample)
    assert (device.device, device.hardware, device.utilisation, device.memory_used_mb) == ("cpu", "cpu", 0.3, 500.0)
    assert device.load == pytest.approx(80.0)
    rows = {(row.app, row.variant): (row.load, row.utilisation) for row in world.of(InstanceEventSample)}
    assert rows == {
        ("faces", "v"): (pytest.approx(60.0), pytest.approx(0.6)),
        ("cars", "v"): (pytest.approx(20.0), pytest.approx(0.2)),
        ("digits", "idle"): (0.0, 0.0),
    }


def test_costs_every_ten_seconds_and_at_the_end_add_up_to_the_bill() -> None:
    world = World()
    started = world.now
    world.report({world.load(variant(threads=2)): {"faces": 10}})
    world.advance(10.0)
    world.advance(3.0, reporting=True)
    world.stop()
    rows = world.of(CostEvent)
    assert sum(row.cost for row in rows) == pytest.approx(0.096 / 3600 * (world.now - started))
    assert {row.time for row in rows} == {started + 10.0, world.now}
    first = rows[0]
    assert (first.app, first.model, first.variant, first.hardware) == ("faces", "m-v", "v", "cpu")
    assert (first.seconds, first.busy_seconds) == (pytest.approx(10.0), pytest.approx(0.1))
    assert [row.app for row in rows] == ["faces", None, "faces", None]


def test_who_asks_planned_replicas_pays_and_pipelines_while_they_are_idle() -> None:
    world = World()
    instance = world.load(variant(), app="faces")
    plan = deployed({"find": 1}, {"find": "v"}, app="faces")
    world.catalogue(apps=[plan, replace(plan, app="q")])
    world.report({instance: {"faces": 10}})
    world.advance(10.0, reporting=True)
    world.advance(10.0, reporting=True)
    rows = [row for row in world.of(CostEvent) if row.variant == "v"]
    assert [row.app for row in rows] == ["faces", "q"], "then it is idle, and a pipeline keeps it"
    assert (rows[0].cost, rows[0].busy_seconds) == (pytest.approx(rows[1].cost), pytest.approx(0.1))


def test_simulated_devices_are_measured_and_paid_by_themselves() -> None:
    gpu = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, simulated=True)
    world = World([CPU, gpu])
    assert [d.simulated for d in world.beat.devices] == [False, True]
    assert [d.utilisation for d in world.beat.devices] == [0.3, 0.0]
    assert sum(d.price_per_hour for d in world.beat.devices) == pytest.approx(0.096 + 3.06)
    gpu = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, simulated=True)
    world = World([CPU, gpu])
    world.advance(10.0)
    assert {(row.hardware, row.simulated) for row in world.of(CostEvent)} == {("cpu", False), ("gpu", True)}


# -- settings


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_the_settings_say_how_often_it_beats_samples_and_charges(times: float) -> None:
    periods = MonitorSettings(heartbeat_s=0.5 * times, sample_s=2.0 * times, cost_s=10.0 * times)
    world = World(settings=periods)
    started = world.now
    world.published.clear()
    world.advance(40.5, reporting=True)
    samples, costs = [sorted({event.time for event in world.of(kind)}) for kind in (WorkerSample, CostEvent)]
    assert beats(world) == 40.5 // periods.heartbeat_s
    assert {b - a for a, b in pairwise([started, *samples])} == {periods.sample_s}
    assert {b - a for a, b in pairwise([started, *costs])} == {periods.cost_s}


@pytest.mark.parametrize(("least_ms", "state"), [(30.0, "Interfered"), (40.0, "Active")])
def test_an_instance_that_is_slower_by_few_ms_is_not_interfered(least_ms: float, state: str) -> None:
    """It takes 45 ms for what its profile says 10."""
    world = World(settings=MonitorSettings(interfered_least_ms=least_ms))
    instance = world.load(variant())
    world.serve({instance: {"faces": 5}}, slower=4.5)
    assert world.states() == {instance: state}


@pytest.mark.parametrize(("share", "troubled"), [(0.1, {"hasty": "Overloaded"}), (0.5, {})])
def test_work_that_waits_is_judged_as_a_share_of_the_objective(share: float, troubled: dict[str, str]) -> None:
    """Some 0.2 s of work wait, and the objective is 1 s."""
    world = World(settings=MonitorSettings(overloaded_slo_share=share))
    instance = world.load(variant(), app="patient")
    world.report({instance: {"patient": 5}}, slo_s=30.0)
    world.serve({instance: {"hasty": 5}}, queued={instance: 20}, slo_s=1.0)
    assert world.told()[instance].app_states == troubled


@pytest.mark.parametrize(("idle_s", "reply"), [(1.0, LoadAccepted), (5.0, LoadRefused)])
def test_an_instance_makes_room_once_it_is_unused_for_so_long(idle_s: float, reply: type) -> None:
    world = World(settings=MonitorSettings(idle_s=idle_s))
    world.load(variant("a", memory_mb=500.0), app=None)
    world.advance(2.0, reporting=True)
    assert isinstance(world.ensure(variant("b", memory_mb=500.0)), reply)


# -- The monitor's senses.


def test_a_sample_is_taken_without_waiting() -> None:
    edge = MachineEdge()
    sum(range(200_000))
    sample = edge.inline(SampleMachine())
    assert 0.0 <= sample.utilisation <= 1.0
    assert sample.memory_used_mb > 10.0
    assert sample.cores
    assert all(0.0 <= busy <= 1.0 for busy in sample.cores.values())
    assert sample.utilisation == pytest.approx(sum(sample.cores.values()) / len(sample.cores))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell which cores are ours")
def test_only_the_cores_that_this_process_may_use_are_told() -> None:
    assert set(MachineEdge().inline(SampleMachine()).cores) == os.sched_getaffinity(0)


async def test_quarantines_are_kept_where_the_next_monitor_and_the_registrar_look() -> None:
    bus = MemoryBus()
    await MachineEdge(bus=bus, bucket="t-control").perform(KeepQuarantine("w1", "v", "no such operator"))
    entry = await (await bus.key_value("t-control")).get(quarantine_key("w1", "v"))
    assert entry.value == b"no such operator"
    await bus.close()


def test_memory_is_the_cgroups_where_it_is_limited(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("104857600\n")
    sample: MachineSample = MachineEdge(tmp_path).inline(SampleMachine())
    assert sample.memory_used_mb == 100.0
    (tmp_path / "memory.max").write_text("max\n")
    assert MachineEdge(tmp_path).inline(SampleMachine()).memory_used_mb != 100.0


@pytest.mark.skipif(not why_no_gpu(), reason="this machine has a GPU")
def test_a_gpu_whose_driver_says_nothing_is_left_out() -> None:
    sample: MachineSample = MachineEdge(gpus=("cuda:0",)).inline(SampleMachine())
    assert sample.gpus == {}


def test_other_commands_are_not_taken() -> None:
    edge = MachineEdge()
    assert edge.inline("dance") is NotImplemented
    with pytest.raises(ValueError, match="knows no str"):
        asyncio.run(edge.perform("dance"))


async def test_a_worker_is_of_the_kind_and_the_hardware_that_the_settings_say() -> None:
    bus = MemoryBus()
    worker = WorkerSettings(name="w", cores=1, gpus=0, hardware="epyc", kind="large")
    [runtime] = await wire(Settings(worker=worker), bus)
    beats: list[WorkerHeartbeat] = []
    await bus.subscribe(Subjects().worker_heartbeat("w"), lambda said: beats.append(decode(WorkerHeartbeat, said.data)))
    await runtime.start()
    await until(lambda: beats)
    assert (beats[0].hardware, beats[0].kind) == ("epyc", "large")
    await runtime.stop(1.0)
    await bus.close()
