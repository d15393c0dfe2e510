"""Unix time that never goes back: the wall time at the start plus the monotonic clock since then."""

import time

_anchor = time.time() - time.monotonic()
_monotonic = time.monotonic


def now() -> float:
    """Unix seconds, monotonic within this process."""
    return _anchor + _monotonic()
