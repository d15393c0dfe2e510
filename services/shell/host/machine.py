"""What a worker has: its name, cores, memory and devices, as the settings, its kind and the operating system allow."""

import os
import re
import socket
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from services.core.emulation import simulated_devices
from services.core.placement import Device, remote_devices
from services.core.settings import MachineKind, MachineSettings, WorkerSettings, listed
from services.core.settings.fields import Texts
from services.shell.host.accelerators import Accelerator, accelerators, processor, why_no_gpu
from services.shell.settings import SettingsError

CPU = "cpu"  # the device that every worker has
NO_GRPC = "it needs the extra `up`: pip install 'infaas[up]', or set gateway.grpc_port = 0"


def has_grpc() -> bool:
    """Whether a gateway can serve gRPC here."""
    return find_spec("grpc") is not None


def worker_name(settings: WorkerSettings) -> str:
    """The worker's name: a setting, else made from the host's so that it is a valid subject token."""
    if settings.name:
        return settings.name
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname()).strip("-_") or "worker"
    return host[:64]


def cores_of(settings: WorkerSettings) -> int:
    """Cores a worker may use: a setting, else those of this process."""
    return settings.cores if settings.cores > 0 else cores()


def cores() -> int:
    """Cores this process may use, by affinity and the cgroup's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return usable
    return usable if quota == "max" else max(1, min(usable, int(quota) // int(period)))


def memory_mb_of(settings: WorkerSettings) -> float:
    """Memory a worker may use, in MB: a setting, else the machine's or the cgroup's limit, whichever is less."""
    if settings.memory_mb > 0:
        return float(settings.memory_mb)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) / 2**20 if limit.isdigit() else total / 2**20


def devices_of(
    settings: WorkerSettings, found: Iterable[Accelerator] | None = None, engines: Texts = ()
) -> list[Device]:
    """A worker's devices: its CPU, its accelerators as far as settings allow, the simulated ones that they ask for, and remote engines.

    found: the machine's accelerators; by default its drivers are asked. engines: the hosts of remote engines (executor.remote_hosts). Names are `gpu-0`, `gpu-1`, ...: the numbers of simulated
    devices follow those of the real ones of their kind, so that a name is never used twice.
    """
    cpu = Device(
        name=CPU,
        kind=CPU,
        cores=cores_of(settings),
        memory_mb=memory_mb_of(settings),
        arithmetic=processor().arithmetic,
    )
    real = _real_devices(settings, found)
    first = {kind: sum(device.kind == kind for device in real) for kind in {device.kind for device in real}}
    return [cpu, *real, *simulated_devices(settings.simulate, first), *remote_devices(listed(engines))]


def _real_devices(settings: WorkerSettings, found: Iterable[Accelerator] | None) -> list[Device]:
    """The GPUs, at most worker.gpus of them. Raises SettingsError when some are missing."""
    if settings.gpus == 0:
        return []
    gpus = list(accelerators() if found is None else found)
    most = settings.gpus if isinstance(settings.gpus, int) else len(gpus)
    if len(gpus) < most:
        raise SettingsError(
            f"worker.gpus is {most}, but {len(gpus)} GPUs are seen: {why_no_gpu() or 'the machine has no more'}; "
            'set it to "auto" to take what is there'
        )
    return [
        Device(name=f"{one.kind}-{number}", kind=one.kind, cores=1, memory_mb=one.memory_mb, address=one.address)
        for number, one in enumerate(gpus[:most])
    ]


# ---- kinds of machine: who starts a worker and who decides about it must agree on what it has

PLAIN = "cpu"  # the kind of workers that `infaas up` starts by default


def worker_of(kind: str, kinds: Mapping[str, MachineKind], base: WorkerSettings) -> WorkerSettings:
    """The settings of one worker of this kind: what the kind says, else what all workers have (`base`)."""
    own = kinds.get(kind, MachineKind())
    return replace(
        base,
        kind=kind,
        cores=own.cores or base.cores,
        memory_mb=own.memory_mb or base.memory_mb,
        simulate=own.simulate or base.simulate,
    )


def environ_of(worker: WorkerSettings) -> dict[str, str]:
    """The settings of one worker as environment variables of its processes."""
    simulate = ",".join(f"{kind}={count}" for kind, count in sorted(worker.simulate.items()))
    return {
        "INFAAS_WORKER__NAME": worker.name,
        "INFAAS_WORKER__KIND": worker.kind,
        "INFAAS_WORKER__CORES": str(worker.cores),
        "INFAAS_WORKER__MEMORY_MB": str(worker.memory_mb),
        "INFAAS_WORKER__GPUS": str(worker.gpus),
        **({"INFAAS_WORKER__SIMULATE": simulate} if simulate else {}),
    }


def initial(workers: int, machines: MachineSettings) -> dict[str, str]:
    """The workers that a system starts with, name to kind: `workers` plain ones, and the minimum of every kind.

    The names are the same at every start.
    """
    plain = max(workers, machines.kinds.get(PLAIN, MachineKind()).minimum)
    named = {f"w{number}": PLAIN for number in range(plain)}
    for kind, spec in machines.kinds.items():
        if kind != PLAIN:
            named.update({f"{kind}-{number}": kind for number in range(spec.minimum)})
    return named
