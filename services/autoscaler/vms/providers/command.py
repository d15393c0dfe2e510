"""The provider `command`: the operator's commands start and stop workers, under the names that they are given."""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import Inventory, ProviderTraits
from services.autoscaler.vms.providers.base import ProviderError
from services.core.settings import CommandSettings, words

log = logging.getLogger(__name__)


class Command:
    """Runs `add KIND NAME` and `remove KIND NAME`. It knows nothing else about machines; a worker gets its name as INFAAS_WORKER__NAME."""

    def __init__(self, settings: CommandSettings) -> None:
        self.traits = ProviderTraits(confirm_stops=True, dry_run=settings.dry_run)
        self._hook = Hook(words(settings.add), words(settings.remove), settings.command_s)

    async def start(self, order: StartMachine) -> None:
        if self.traits.dry_run:
            log.info("dry run: `add` would be run", extra={"kind": order.kind, "worker": order.worker})
        else:
            await self._hook.add(order.kind, order.worker)

    async def stop(self, order: StopMachine) -> None:
        if self.traits.dry_run:
            log.info("dry run: `remove` would be run", extra={"kind": order.kind, "worker": order.worker})
        else:
            await self._hook.remove(order.kind, order.worker)

    async def inventory(self) -> Inventory:
        return Inventory()

    async def close(self) -> None:
        """End the commands that run."""
        await self._hook.close()


WAIT_S = (
    6.0  # s for which an order waits for its command. The command goes on, and the next order of the same waits again
)
MOST = 4096  # bytes at the end of its stderr in which the last line is looked for
GRACE_S = 5.0  # s between asking a command to end and killing it


class Hook:
    """Runs the operator's commands that make and remove machines, one at a time for each name.

    add, remove: the words of the commands; kind and name follow. No shell is used. Both must be idempotent by name. INFaaS's own
    settings, which may be secrets, are not in their environment.
    """

    def __init__(self, add: Sequence[str], remove: Sequence[str], command_s: float, wait_s: float = WAIT_S) -> None:
        self._add, self._remove = tuple(add), tuple(remove)
        self._command_s = command_s
        self._wait_s = wait_s
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by name: what is done to it
        self._added: set[str] = set()

    async def add(self, kind: str, name: str) -> None:
        """Return once the command has succeeded, now or earlier. Raises ProviderError with the last line of its stderr, TimeoutError."""
        if name not in self._added:
            await self._one("add", self._add, kind, name)
            self._added.add(name)

    async def remove(self, kind: str, name: str) -> None:
        """The same for `remove`, after an `add` of this name that still runs has ended."""
        self._added.discard(name)
        await self._one("remove", self._remove, kind, name)

    async def close(self) -> None:
        """End the commands that run."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    async def _one(self, what: str, words: tuple[str, ...], kind: str, name: str) -> None:
        present, task = self._running.get(name, ("", None))
        if task is None:
            present, task = what, asyncio.create_task(self._run(what, [*words, kind, name]))
            self._running[name] = (what, task)
        await asyncio.wait([task], timeout=self._wait_s)
        if not task.done():
            raise TimeoutError
        if self._running.get(name) == (present, task):
            del self._running[name]
        if present != what:
            with contextlib.suppress(ProviderError):
                task.result()
            await self._one(what, words, kind, name)
        else:
            task.result()

    async def _run(self, what: str, words: list[str]) -> None:
        log.info("a command of the operator's runs", extra={"what": what, "words": words})
        environ = {key: value for key, value in os.environ.items() if not key.startswith("INFAAS_")}
        with tempfile.TemporaryFile() as said:  # not a pipe: a process that it leaves behind may hold a pipe open
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=said,
                    env=environ,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise ProviderError(f"cannot run {words[0]}: {getattr(error, 'strerror', None) or error}") from error
            try:
                async with asyncio.timeout(self._command_s):
                    code = await process.wait()
            except TimeoutError:
                raise ProviderError(f"{words[0]} did not end within {self._command_s:g} s") from None
            finally:
                await _end(process)
            if code != 0:
                raise ProviderError(f"{words[0]}: {_last_line(said) or f'it ended with code {code}'}")


def _last_line(said: IO[bytes]) -> str:
    """The last line of its stderr."""
    said.seek(max(0, said.seek(0, os.SEEK_END) - MOST))
    lines = [line.strip() for line in said.read(MOST).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
