"""Starts the trusted helper process for one order and waits for it. Order, bus and limits go to its standard input."""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from bus.codec import encode
from bus.messages.work import ArtifactsKept
from services.core.settings import Settings
from services.executor.workshop.actor import DropCopies, HelperInput, StopOrder, WorkshopOrder
from services.shell.child import how_ended, kill_group
from services.shell.host.process import with_our_source
from services.shell.settings import login_of

CLOCK_S = 5.0  # by which machines' clocks may differ
LAST_WORDS = 400  # characters of the helper's last output that go into an error


class WorkshopFailed(Exception):
    """The helper ended without finishing its order."""


class WorkshopEdge:
    """The workshop's edge."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by registration
        self._workers = Path(settings.data_dir).absolute() / "workers"

    async def perform(self, command: WorkshopOrder | StopOrder | DropCopies) -> None:
        """Carry out one order, or stop it: then it returns early. Raises WorkshopFailed.

        Cancelling an order ends the helper and every process that it started.
        """
        if isinstance(command, StopOrder):
            await self._stop(command.registration)
            return
        if isinstance(command, DropCopies):
            await asyncio.to_thread(_drop_copies, self._workers / command.worker / "artifacts", command.kept)
            return
        work = self._under_way[command.registration] = asyncio.create_task(self._carry_out(command))
        try:
            await asyncio.wait([work])
        finally:
            await self._stop(command.registration)
        if not work.cancelled():
            work.result()

    async def _stop(self, registration: str) -> None:
        work = self._under_way.pop(registration, None)
        if work is not None and work.cancel():
            await asyncio.wait([work])

    async def _carry_out(self, command: WorkshopOrder) -> None:
        directory = self._workers / command.worker / "workshop"
        await asyncio.to_thread(_emptied, directory)  # a killed executor may have left files there
        try:
            await self._run(command, str(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _run(self, command: WorkshopOrder, directory: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.executor.workshop",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        try:
            task = HelperInput(
                order=command,
                url=self._settings.bus.url,
                login=login_of(self._settings.bus),
                prefix=self._settings.prefix,
                limits=self._settings.registrar,
                directory=directory,
            )
            _, words = await process.communicate(encode(task))
        finally:
            kill_group(process.pid)
            code = await process.wait()
        if code != 0:
            last = " ".join(words.decode(errors="replace").split())[-LAST_WORDS:]
            raise WorkshopFailed(f"its process {how_ended(code)}: {last or 'it wrote nothing'}")


def _drop_copies(place: Path, kept: ArtifactsKept) -> None:
    """Files are named by digests, engines by their first characters. What came later may be of a version that was registered since."""
    whole, beginnings = set(kept.artifacts), {one[:12] for one in kept.artifacts}
    for path in [*place.glob("*"), *place.glob("engines/*")]:
        needed = path.name[:12] in beginnings if path.parent != place else path.name.partition(".")[0] in whole
        with suppress(OSError):
            if needed or path.name == "engines" or path.stat().st_mtime > kept.time - CLOCK_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _emptied(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)


def _environment() -> dict[str, str]:
    """This process's environment without settings and credentials, and with these packages on the path."""
    return with_our_source({name: value for name, value in os.environ.items() if not name.startswith("INFAAS_")})
