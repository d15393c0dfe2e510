"""Interference mitigation: where an instance goes that is slower than its profile though it is not at its peak. Pure.

INFaaS, section 4.1: to idle resources of the same worker (other cores), in the background; if there are none, the controller
places it on the least loaded worker. Here in this order: other cores, another device of the same kind on this worker, another worker.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

BUSIEST = 0.8  # a core that is busier than this, 0..1, is no place to go to
GAIN = 0.15  # the cores must be less busy by so much than those that the instance runs on now
PINNED = 0.3  # how busy an instance pinned to a core is expected to make it, beside what is measured
MEMORY = 0.5  # weight of the newest sample in a core's utilisation


class MoveToCores(Struct, frozen=True):
    """Run on these cores of the machine from now on."""

    cores: list[int]
    reason: str


class MoveToDevice(Struct, frozen=True):
    """Load it on this device of the worker, then unload it where it is."""

    device: str
    reason: str


class AskElsewhere(Struct, frozen=True):
    """This worker has no better place."""

    reason: str


Mitigation = MoveToCores | MoveToDevice | AskElsewhere


class CoreUse:
    """How busy each core of the machine is, 0..1, smoothed over the last samples."""

    def __init__(self) -> None:
        self.busy: dict[int, float] = {}

    def sample(self, cores: Mapping[int, float]) -> None:
        known = self.busy
        self.busy = {core: MEMORY * now + (1 - MEMORY) * known.get(core, now) for core, now in cores.items()}


def better_cores(
    threads: int, at: Sequence[int], busy: Mapping[int, float], pinned: Iterable[Sequence[int]]
) -> list[int]:
    """The least busy cores for so many threads; none when they are not clearly better than where it runs now.

    at: the cores that it runs on now, empty for any. busy: 0..1 by core, with everything that runs there. pinned: the cores
    of every other instance that is kept to some.
    """
    load = dict(busy)
    for cores in pinned:
        for core in cores:
            if core in load:
                load[core] += PINNED
    if not load or threads >= len(load):
        return []
    chosen = sorted(load, key=lambda core: (load[core], core))[: max(1, threads)]
    here = [core for core in at if core in load] or list(load)
    if set(chosen) == set(here) or max(busy[core] for core in chosen) > BUSIEST:
        return []
    before = sum(load[core] for core in here) / len(here)
    after = sum(load[core] for core in chosen) / len(chosen)
    return sorted(chosen) if before - after >= GAIN else []


def mitigate(cores: Sequence[int], busy: Mapping[int, float], devices: Sequence[str], slow: str) -> Mitigation:
    """What to do about one interfered instance.

    cores: the better ones, if any; devices: others of its kind on this worker with room, best first. slow: how it does now.
    """
    if cores:
        names = ", ".join(f"{core} ({busy.get(core, 0.0):.0%} busy)" for core in cores)
        return MoveToCores(list(cores), f"{slow}; core{'s' * (len(cores) > 1)} {names} would be better")
    if devices:
        return MoveToDevice(devices[0], f"{slow}; {devices[0]} has room")
    return AskElsewhere(f"{slow}; this worker has no idler cores and no other device with room")
