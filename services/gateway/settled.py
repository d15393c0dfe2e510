"""After a change: until this gateway knows of it, so that whoever made it finds it here with the next request."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 2.0  # s; the change is made, whatever is known here by then
STEP = 0.005


async def settled(known: Callable[[], bool]) -> None:
    """Return once `known()`, or when it takes too long."""
    ends = time.monotonic() + PATIENCE
    while not known() and time.monotonic() < ends:  # noqa: ASYNC110  (the catalogue is not asyncio's)
        await asyncio.sleep(STEP)
