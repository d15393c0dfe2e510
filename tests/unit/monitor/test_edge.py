"""The monitor's senses."""

import asyncio
import os
from pathlib import Path

import pytest

from bus.codec import decode
from bus.memory import MemoryBus
from bus.messages.fleet import WorkerHeartbeat
from bus.subjects import Subjects
from services.core.placement import quarantine_key
from services.core.settings import Settings, WorkerSettings
from services.monitor.__main__ import wire
from services.monitor.edge import MachineEdge
from services.monitor.effects import KeepQuarantine, MachineSample, SampleMachine
from services.shell.host.accelerators import why_no_gpu
from tests.support.clients.responders import until


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
