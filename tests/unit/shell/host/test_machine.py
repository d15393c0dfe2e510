"""What a worker of a kind is, and with which workers a system starts."""

from services.core.settings import MachineKind, MachineSettings, WorkerSettings
from services.shell.host.machine import devices_of, environ_of, initial, worker_of
from services.shell.settings import load

KINDS = {
    "cpu": MachineKind(minimum=1, maximum=4),
    "small": MachineKind(minimum=2, maximum=3, cores=1, memory_mb=1000),
    "accelerated": MachineKind(maximum=1, simulate={"gpu": 1}),
}


def test_a_kind_says_what_it_has_and_the_rest_is_as_everywhere() -> None:
    base = WorkerSettings(cores=2, memory_mb=4000, simulate={"inferentia": 1})
    small, accelerated = worker_of("small", KINDS, base), worker_of("accelerated", KINDS, base)
    assert (small.kind, small.cores, small.memory_mb, small.simulate) == ("small", 1, 1000, {"inferentia": 1})
    assert (accelerated.cores, accelerated.memory_mb, accelerated.simulate) == (2, 4000, {"gpu": 1})
    assert worker_of("unheard-of", {}, base).cores == 2


def test_its_processes_read_the_same_from_their_environment() -> None:
    base = WorkerSettings(cores=2, memory_mb=4000, name="a-1-1")
    for kind in KINDS:
        worker = worker_of(kind, KINDS, base)
        read = load(environ=environ_of(worker)).worker
        assert read == worker
        assert [d.kind for d in devices_of(read)] == [d.kind for d in devices_of(worker)]


def test_initial_workers() -> None:
    assert initial(2, MachineSettings()) == {"w0": "cpu", "w1": "cpu"}
    assert initial(1, MachineSettings(kinds=KINDS)) == {"w0": "cpu", "small-0": "small", "small-1": "small"}
    assert initial(1, MachineSettings(kinds={"cpu": MachineKind(minimum=2, maximum=3)})) == {"w0": "cpu", "w1": "cpu"}


def test_kinds_are_settings_in_variables_too() -> None:
    environ = {
        "INFAAS_MACHINES__KINDS__CPU__MINIMUM": "1",
        "INFAAS_MACHINES__KINDS__CPU__MAXIMUM": "3",
        "INFAAS_MACHINES__KINDS__FAST__MAXIMUM": "2",
        "INFAAS_MACHINES__KINDS__FAST__SIMULATE": "gpu=2",
        "INFAAS_MACHINES__KINDS__FAST__BOOT_S": "20",
    }
    kinds = load(environ=environ).machines.kinds
    assert kinds == {
        "cpu": MachineKind(minimum=1, maximum=3),
        "fast": MachineKind(maximum=2, simulate={"gpu": 2}, boot_s=20),
    }


def test_remote_engines_are_one_device_whose_address_are_their_hosts() -> None:
    for engines in (("a.test", "10.1.2.3:8000"), "a.test, 10.1.2.3:8000"):
        _, device = devices_of(WorkerSettings(cores=2, gpus=0), (), engines)
        assert (device.name, device.kind, device.address) == ("remote", "remote", "a.test 10.1.2.3:8000")
    assert len(devices_of(WorkerSettings(cores=2, gpus=0), (), "")) == 1
