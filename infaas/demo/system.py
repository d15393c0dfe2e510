"""The demo's own system: `infaas up` as a child process in a directory of its own."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from infaas.demo.family import Progress
from infaas.errors import InfaasError
from services.shell.host.process import dies_with_parent, end, tail, with_our_source

START_S = 120.0  # until `ready` must be printed
STOP_S = 30.0  # until the system must have stopped all its processes
POLL_S = 0.05  # between reads of what it printed
# Variables that would connect the demo or its system to other servers.
OTHER_SYSTEMS = ("INFAAS_DATA_DIR", "INFAAS_NATS_URL", "INFAAS_SQL_DSN", "INFAAS_BUS__URL", "INFAAS_STORE__")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of our commands: with the settings of `given`, without addresses of other systems, with this source tree first."""
    return with_our_source({name: value for name, value in given.items() if not name.startswith(OTHER_SYSTEMS)})


def command(*arguments: str) -> list[str]:
    """The arguments that run `infaas ...` with this Python."""
    return [sys.executable, "-P", "-m", "infaas.cli", *arguments]


class DemoSystem:
    """One `infaas up`. keep: it outlives this process; else it ends together with this process. settings: TOML."""

    def __init__(self, data_dir: Path, *, keep: bool = False, settings: str = "") -> None:
        self.data_dir = data_dir
        self.urls: dict[str, Any] = {}
        self._keep = keep
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of `infaas up`."""
        assert self._process is not None, "start first"
        return self._process.pid

    async def start(self) -> float:
        """Start the system. Returns the seconds until it was ready; raises InfaasError with its error output."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        output, errors = self.data_dir / "up.out", self.data_dir / "up.err"
        options: list[str] = []
        if self._settings:
            (self.data_dir / "settings.toml").write_text(self._settings)
            options = ["--config", str(self.data_dir / "settings.toml")]
        up = command("up", "--data-dir", str(self.data_dir), "--json", *options)
        began = time.monotonic()
        with output.open("wb") as out, errors.open("wb") as err:
            self._process = subprocess.Popen(  # noqa: ASYNC220  (it returns at once)
                up if self._keep else dies_with_parent(up, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(os.environ),
                # Ctrl-C must reach only this process, which then stops the system. A kept system outlives the terminal.
                start_new_session=self._keep,
                process_group=None if self._keep else 0,
            )
        while not (lines := output.read_text().splitlines()) or not lines[-1].startswith("ready"):
            if self._process.poll() is not None or time.monotonic() - began > START_S:
                reason = tail(errors) or f"no output within {START_S:.0f} s"
                raise InfaasError(f"the system did not start: {' '.join(reason.split())}")
            await asyncio.sleep(POLL_S)
        self.urls = json.loads(lines[0])
        return time.monotonic() - began

    def stop(self) -> None:
        """Stop the system. Does nothing if it is kept or has ended."""
        if not self._keep and self._process is not None:
            end(self._process, ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)))

    def abandon(self) -> None:
        """Stop the system even with `keep`: the demo failed before it could print where the system is."""
        self._keep = False
        self.stop()

    async def sql(self, query: str) -> list[dict[str, Any]]:
        """The rows of `infaas sql --json` as maps of column names. Raises InfaasError."""
        process = await asyncio.create_subprocess_exec(
            *command("sql", "--data-dir", str(self.data_dir), "--json", query),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(os.environ),
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise InfaasError(f"infaas sql failed: {err.decode(errors='replace').strip()}")
        found = json.loads(out)
        return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


@asynccontextmanager
async def temporary(settings: str, *, keep: bool, progress: Progress) -> AsyncIterator[tuple[DemoSystem, float]]:
    """A system in a directory of its own, and the seconds until it was ready. It is stopped and removed at the end, unless kept.

    Where the block raises, it is stopped even with `keep`; where that is an InfaasError, the files stay, and the error names the logs.
    """
    directory = Path(tempfile.mkdtemp(prefix="infaas-demo-"))
    system = DemoSystem(directory / "data", keep=keep, settings=settings)
    try:
        progress("starting NATS, PostgreSQL and the services", 0.0)
        yield system, await system.start()
    except InfaasError as error:
        system.abandon()
        raise InfaasError(f"{error} (logs: {system.data_dir / 'logs'})") from error
    except BaseException:
        system.abandon()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if not keep:
        system.stop()
        shutil.rmtree(directory, ignore_errors=True)
