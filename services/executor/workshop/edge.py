"""Starts the trusted helper process for the orders of one registration and waits for it. Order, bus and limits go to its standard input.

On a bus within this process no other one can publish: the helper runs here then. Its sandboxes are processes all the same.
"""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bus.messages.work import ArtifactsKept
from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import Settings
from services.executor.workshop.actor import DropCopies, HelperInput, StopOrder, WorkshopOrder
from services.shell.child import framed, how_ended, kill_group, read_frame
from services.shell.host.process import with_our_source
from services.shell.settings import login_of

CLOCK_S = 5.0  # by which machines' clocks may differ
KEPT_S = 10.0  # s that a helper which has inspected a model waits for the order to build its variants
TORCH_KEPT_S = 60.0  # s that one which has imported torch waits for the next model of torch
TORCH = "torch"
LAST_WORDS = 400  # characters of the helper's last output that go into an error


if TYPE_CHECKING:
    from services.executor.workshop.sandbox.supervisor import NextSandbox


class WorkshopFailed(Exception):
    """The helper ended without finishing its order."""


class WorkshopEdge:
    """The workshop's edge."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self._settings, self._bus = settings, bus
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by registration
        self._working: set[asyncio.Task[None]] = set()  # also what was stopped and has not ended yet
        # Helpers that wait, by registration or TORCH, and what ends them.
        self._kept: dict[str, tuple[asyncio.subprocess.Process, asyncio.TimerHandle]] = {}
        self._next: NextSandbox | None = None
        if not settings.bus.url:
            from services.executor.workshop.sandbox import supervisor  # noqa: PLC0415

            self._next = supervisor.NextSandbox()
            self._next.prepare()
        self._workers = Path(settings.data_dir).absolute() / "workers"

    async def perform(self, command: WorkshopOrder | StopOrder | DropCopies) -> None:
        """Carry out one order, or stop it: then it returns early. Raises WorkshopFailed.

        Cancelling an order ends the helper and every process that it started.
        """
        if isinstance(command, StopOrder):
            await self._stop(command.registration)
            await self._end_kept(command.registration)
            return
        if isinstance(command, DropCopies):
            await asyncio.to_thread(_drop_copies, self._workers / command.worker / "artifacts", command.kept)
            return
        work = self._under_way[command.registration] = asyncio.create_task(self._carry_out(command))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        try:
            await asyncio.wait([work])
        finally:
            await self._stop(command.registration)
        if not work.cancelled():
            work.result()

    async def ended(self) -> None:
        """End what works or waits."""
        for work in self._working:
            if not work.cancelling():  # else it cleans up already
                work.cancel()
        if self._working:
            await asyncio.wait(self._working)
        await self._end_kept("")
        if self._next is not None:
            await self._next.close()

    async def _stop(self, registration: str) -> None:
        work = self._under_way.pop(registration, None)
        if work is not None and work.cancel():
            await asyncio.wait([work])

    async def _carry_out(self, command: WorkshopOrder) -> None:
        directory = self._workers / command.worker / "workshop"
        await asyncio.to_thread(_emptied, directory)  # a killed executor may have left files there
        try:
            if self._settings.bus.url:
                await self._run(command, str(directory))
            elif not command.announces:
                from services.executor.workshop.helper import Helper  # noqa: PLC0415  (an executor needs none of it)

                subjects, limits = Subjects(self._settings.prefix), self._settings.registrar
                await Helper(self._bus, subjects, limits, command, directory, waiting=self._next).run()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _run(self, command: WorkshopOrder, directory: str) -> None:
        helper = await self._helper(command)
        task = HelperInput(
            order=command,
            url=self._settings.bus.url,
            login=login_of(self._settings.bus),
            prefix=self._settings.prefix,
            limits=self._settings.registrar,
            directory=directory,
        )
        if helper.stdin is None or helper.stdout is None:
            raise WorkshopFailed("its process could not be started")
        done = False
        try:
            helper.stdin.write(framed(task))
            await read_frame(helper.stdout, 1)
            done = True
        except (asyncio.IncompleteReadError, OSError):
            words = await _ended(helper)
            last = " ".join(words.decode(errors="replace").split())[-LAST_WORDS:]
            raise WorkshopFailed(
                f"its process {how_ended(helper.returncode or 0)}: {last or 'it wrote nothing'}"
            ) from None
        finally:
            if done and (command.inspect is not None or command.of_torch):
                inspected = command.inspect is not None and not command.announces
                name, seconds = (command.registration, KEPT_S) if inspected else (TORCH, TORCH_KEPT_S)
                over = asyncio.get_running_loop().call_later(seconds, kill_group, helper.pid)
                self._kept[name] = helper, over
            else:
                await _ended(helper)

    async def _helper(self, command: WorkshopOrder) -> asyncio.subprocess.Process:
        """That of the registration's inspection, or one that has torch; what it has imported and connected to is there already."""
        for name in (command.registration, *([TORCH] * command.of_torch)):
            if name in self._kept:
                helper, over = self._kept.pop(name)
                over.cancel()
                if helper.returncode is None:
                    return helper
                await _ended(helper)
        await self._end_kept("")
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.executor.workshop",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )

    async def _end_kept(self, registration: str) -> None:
        for name in [name for name in self._kept if not registration or name == registration]:
            helper, over = self._kept.pop(name)
            over.cancel()
            await _ended(helper)


async def _ended(helper: asyncio.subprocess.Process) -> bytes:
    """End it; returns what it wrote last."""
    kill_group(helper.pid)
    return (await helper.communicate())[1]


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
