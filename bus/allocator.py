"""Large message bodies without a page fault for each 4 kB.

glibc maps fresh pages for every allocation above 128 kB and gives them back when it is freed, so that each message of 600 kB
costs 300 page faults: measured with `benches/bus_core.py --bytes 600000 --window 8`, 1.7 ms of CPU per echoed message against 0.4 ms.
"""

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD = -1  # mallopt's parameter numbers, malloc.h
_MMAP_THRESHOLD = -3
LARGEST_BODY = 4 * 2**20  # allocations up to here come from the heap
KEPT_FREE = 16 * 2**20  # so much freed memory stays with the process; a process that sees no large bodies keeps none


@cache
def keep_large_buffers() -> bool:
    """Tell malloc to reuse large blocks; returns whether it listens (only glibc does).

    Whoever runs the process decides otherwise with MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ in the environment.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BODY)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_FREE))
