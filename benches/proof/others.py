"""How busy the machine was with other things: a run on a machine that others use says less."""

import os
import time
from pathlib import Path
from typing import NamedTuple

import rig


class Look(NamedTuple):
    """Seconds: of the clock, of CPU that everything took (what a hypervisor took away included), and that we took."""

    clock: float
    everything: float
    ours: dict[int, tuple[str, float]]


def look(pid: int) -> Look:
    """pid: of the system; the generator, which is this process, counts as ours too."""
    fields = [int(word) / rig.TICKS for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    own = os.times()
    return Look(
        time.monotonic(), sum(fields) - idle, rig.cpu(pid) | {os.getpid(): ("generator", own.user + own.system)}
    )


def others(before: Look, after: Look) -> float:
    """CPUs that others kept busy between two looks."""
    ours = sum(rig.spent(before.ours, after.ours).values())
    return max(0.0, after.everything - before.everything - ours) / (after.clock - before.clock)
