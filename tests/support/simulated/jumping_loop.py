"""An asyncio event loop whose clock jumps: when nothing is ready, it is the time of the next timer."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any


class JumpingLoop(asyncio.BaseEventLoop):
    """Timers of one moment ring in the order in which they were set (asyncio's own heap leaves that open). No files, no sockets."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._time = start
        self._number = 0
        self._later: list[tuple[float, int, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self._time

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heappush(self._later, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled ones are passed over when they are due."""

    def run_until(self, until: float) -> None:
        """Everything that is due up to this moment."""
        with self.running():
            while True:
                while self._ready:
                    self._run(self._ready.popleft())
                if not self._later or self._later[0][0] > until:
                    break
                when, _, handle = heappop(self._later)
                if not handle.cancelled():
                    self._time = max(self._time, when)
                    self._run(handle)
        self._time = until

    def running(self) -> "Running":
        """Within, this is the running loop; what is called soon waits until `run_until`."""
        return Running(self)

    @staticmethod
    def _run(handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            handle._run()


class Running:
    """Makes a loop the running one, as often as it is entered."""

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop
        self._before: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        self._before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)

    def __exit__(self, *error: object) -> None:
        asyncio._set_running_loop(self._before)
