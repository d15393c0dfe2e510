"""Starts the trusted helper process for one order and waits for it. Settings travel by environment, the order by standard input."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import services
from bus.codec import encode
from services.executor.workshop.errand import Errand

TELLING = 400  # characters of the helper's last words that go into an error


class WorkshopFailed(Exception):
    """The helper ended without finishing its order."""


class WorkshopEdge:
    """See the module. environment: what the helper needs beside this process's own (bus URL, prefix, limits)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    async def perform(self, command: Errand) -> None:
        """Carry out one order; cancelling it ends the helper and all that it started. Raises WorkshopFailed."""
        with tempfile.TemporaryDirectory(prefix="infaas-workshop-", ignore_cleanup_errors=True) as directory:
            await self._run(command, directory)

    async def _run(self, command: Errand, directory: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.executor.workshop",
            directory,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": _python_path()} | self._environment,
            start_new_session=True,
        )
        try:
            _, words = await process.communicate(encode(command))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            last = " ".join(words.decode(errors="replace").split())[-TELLING:]
            raise WorkshopFailed(f"its process ended with code {process.returncode}: {last or 'it said nothing'}")


def _python_path() -> str:
    root = str(Path(next(iter(services.__path__))).parent)
    there = os.environ.get("PYTHONPATH")
    return f"{root}{os.pathsep}{there}" if there else root
