"""The demo's own system: `infaas up` as a child process on a directory of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import infaas
from infaas.errors import InfaasError
from services.shell.host.process import dies_with_parent, tail

START = 120.0  # s until `ready` must have been printed
STOP = 30.0  # s until the system must have stopped everything it started
LOOK = 0.05  # s between looks at what it printed
# What would lead the demo, or its system, to somebody else's servers.
ELSEWHERE = ("INFAAS_DATA_DIR", "INFAAS_NATS_URL", "INFAAS_SQL_DSN", "INFAAS_BUS__URL", "INFAAS_STORE__")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of our commands: settings stay, other systems' addresses go; this very source is what runs."""
    mine = {name: value for name, value in given.items() if not name.startswith(ELSEWHERE)}
    source = str(Path(infaas.__file__).parents[1])
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, [source, given.get("PYTHONPATH", "")]))
    return mine


def command(*arguments: str) -> list[str]:
    """The command line `infaas ...` with this Python."""
    return [sys.executable, "-P", "-m", "infaas.cli", *arguments]


class DemoSystem:
    """One `infaas up`. keep: it goes on when we end; otherwise it ends with us, whatever ends us. settings: TOML."""

    def __init__(self, data_dir: Path, *, keep: bool = False, settings: str = "") -> None:
        self.data_dir = data_dir
        self.urls: dict[str, Any] = {}
        self._keep = keep
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the `infaas up` process."""
        assert self._process is not None, "start first"
        return self._process.pid

    async def start(self) -> float:
        """Start it and return after how many seconds it was ready; raises InfaasError with what it said."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        said, complained = self.data_dir / "up.out", self.data_dir / "up.err"
        options: list[str] = []
        if self._settings:
            (self.data_dir / "settings.toml").write_text(self._settings)
            options = ["--config", str(self.data_dir / "settings.toml")]
        began = time.monotonic()
        with said.open("wb") as out, complained.open("wb") as err:
            self._process = subprocess.Popen(  # noqa: ASYNC220  (it returns at once)
                command("up", "--data-dir", str(self.data_dir), "--json", *options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(os.environ),
                # Ctrl-C reaches only us, and we stop it in order; what is kept outlives the terminal, too
                start_new_session=self._keep,
                process_group=None if self._keep else 0,
                preexec_fn=None if self._keep else dies_with_parent(signal.SIGTERM),  # noqa: PLW1509  (main thread)
            )
        while not (lines := said.read_text().splitlines()) or not lines[-1].startswith("ready"):
            if self._process.poll() is not None or time.monotonic() - began > START:
                reason = tail(complained) or f"nothing said within {START:.0f} s"
                raise InfaasError(f"the system did not start: {' '.join(reason.split())}")
            await asyncio.sleep(LOOK)
        self.urls = json.loads(lines[0])
        return time.monotonic() - began

    def stop(self) -> None:
        """Stop it and everything it started; does nothing when it is to be kept or has ended."""
        if self._keep or self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP)
            return
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """Stop it even though it was to be kept: the demo did not get as far as telling where it is."""
        self._keep = False
        self.stop()

    async def sql(self, query: str) -> list[dict[str, Any]]:
        """Rows of `infaas sql --json`, by column name; raises InfaasError."""
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
