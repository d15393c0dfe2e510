"""Recorded workers as kinds of machine. Workers with the same devices are of one kind."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from services.core.cost import price_per_hour
from services.core.placement import Device
from services.simulation.replay.recording import RecordedWorker, RecordingHead, ReplayError
from services.simulation.scenario.machines import ALIKE_MB, MOST, labelled
from services.simulation.scenario.model import MachineSpec

_AT_START = 15.0  # s after the beginning within which machines that already ran have sent a sample

Counts = Mapping[str, tuple[int, int]]  # kind: how many at time 0, and at most


def kinds_of(head: RecordingHead) -> dict[str, list[RecordedWorker]]:
    """Workers by kind of machine. Simulated devices beside real ones of their kind are left out, like their variants."""
    real = real_kinds(head)
    groups: defaultdict[tuple[tuple[str, int, int], ...], list[RecordedWorker]] = defaultdict(list)
    for worker in head.workers:
        devices = [one for one in worker.devices if not one.simulated or one.kind not in real]
        if devices:
            shape = tuple(sorted((one.kind, one.cores, round(one.memory_mb / ALIKE_MB)) for one in devices))
            groups[shape].append(replace(worker, devices=devices))
    ordered = sorted(groups.items(), key=lambda one: (-len(one[1]), one[0]))
    return labelled((min(shape, key=lambda one: (one[0] == "cpu", one[0]))[0], workers) for shape, workers in ordered)


def real_kinds(head: RecordingHead) -> set[str]:
    """The kinds of device that are real on some worker."""
    return {device.kind for worker in head.workers for device in worker.devices if not device.simulated}


def machines_of(head: RecordingHead, boot_s: float, counts: Counts) -> list[MachineSpec]:
    """Kinds of machine: as many as ran at the beginning, at most as many as ever ran at one time, unless `counts` says otherwise."""
    found = []
    groups = kinds_of(head)
    for kind in counts:
        if kind not in groups:
            raise ReplayError(
                f"--worker {kind}: no such machine was recorded; there were: {', '.join(groups) or 'none'}"
                " (--machines FILE.toml describes others)"
            )
    early = {kind: sum(one.first <= head.begins + _AT_START for one in workers) for kind, workers in groups.items()}
    if groups and not any(early.values()):  # without any machine, nothing would be served
        first = min(groups, key=lambda kind: min(one.first for one in groups[kind]))
        early[first] = 1
    for kind, workers in groups.items():
        names = {one.worker for one in workers}
        most = max((len(names.intersection(one.workers)) for one in head.bins), default=0)
        start, upper = counts.get(kind, (early[kind], max(most, early[kind], 1)))
        devices = _named(workers[0].devices)
        found.append(
            MachineSpec(
                kind=kind,
                devices=devices,
                price_per_hour=sum(
                    price_per_hour(one.kind, head.prices, one.cores) for one in devices if one.kind in head.prices
                ),
                boot_s=boot_s,
                start=min(start, MOST),
                minimum=min(1, start),
                maximum=min(max(start, upper), MOST),
            )
        )
    if not any(one.start for one in found):
        raise ReplayError(
            "no machine runs at the begin: say --worker KIND=N with at least 1, or describe them with --machines FILE.toml"
            if groups
            else "no worker was recorded in this time: describe the machines with --machines FILE.toml"
        )
    return found


def _named(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with the simulator's names, all simulated."""
    seen: defaultdict[str, int] = defaultdict(int)
    found = []
    for device in devices:
        number = seen[device.kind]
        seen[device.kind] += 1
        name = device.kind if number == 0 else f"{device.kind}{number}"
        found.append(replace(device, name=name, simulated=True, address="cpu"))
    return tuple(found)
