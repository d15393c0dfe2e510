"""What the operating system says of this process."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from services.core.metric import MetricFamily

STARTED = time.time()


def families() -> Iterable[MetricFamily]:
    """CPU, memory, open files; where there is no /proc, CPU alone."""
    spent = os.times()
    cpu = MetricFamily("infaas_process_cpu_seconds_total", "counter", "CPU time of this process, user and system.")
    cpu.add(spent.user + spent.system)
    started = MetricFamily("infaas_process_start_time_seconds", "gauge", "When it was started, Unix time.")
    started.add(STARTED)
    yield cpu
    yield started
    with suppress(OSError, ValueError, IndexError):
        resident = MetricFamily(
            "infaas_process_resident_memory_bytes", "gauge", "Resident memory, shared parts included."
        )
        resident.add(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        yield resident
    with suppress(OSError):
        opened = MetricFamily("infaas_process_open_fds", "gauge", "Open file descriptors.")
        opened.add(len(os.listdir("/proc/self/fd")))
        yield opened
