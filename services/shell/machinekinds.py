"""What a worker of a kind is: the settings of its processes, as whoever starts it and whoever decides about it must agree."""

from collections.abc import Mapping

from msgspec.structs import replace

from services.core.settings import MachineKind, MachineSettings, WorkerSettings

PLAIN = "cpu"  # the kind of workers that `infaas up` starts when nothing else is said


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
    """The same as variables of its processes."""
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

    The same names at every start.
    """
    plain = max(workers, machines.kinds.get(PLAIN, MachineKind()).minimum)
    named = {f"w{number}": PLAIN for number in range(plain)}
    for kind, spec in machines.kinds.items():
        if kind != PLAIN:
            named.update({f"{kind}-{number}": kind for number in range(spec.minimum)})
    return named
