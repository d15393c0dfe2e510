"""The one program of all demos: start a system, register models, send queries, check the records, and say what became of them."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

import infaas
from bus.messages.public import RegistrationStatus
from infaas.client import Client
from infaas.demo.load import DemoLoad, Progress
from infaas.errors import InfaasError
from services.shell.host.process import dies_with_parent, end, tail, with_our_source

# -- its own system: `infaas up` as a child process in a directory of its own

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


class DemoSystem(Struct, eq=False):
    """One `infaas up`. keep: it outlives this process; else it ends together with this process. settings: TOML. fused: as its option."""

    data_dir: Path
    keep: bool = False
    settings: str = ""
    fused: bool = False
    urls: dict[str, Any] = {}
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of `infaas up`."""
        assert self._process is not None, "start first"
        return self._process.pid

    async def start(self) -> float:
        """Start the system. Returns the seconds until it was ready; raises InfaasError with its error output."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        output, errors = self.data_dir / "up.out", self.data_dir / "up.err"
        options = ["--fused"] * self.fused
        if self.settings:
            (self.data_dir / "settings.toml").write_text(self.settings)
            options += ["--config", str(self.data_dir / "settings.toml")]
        up = command("up", "--data-dir", str(self.data_dir), "--json", *options)
        began = time.monotonic()
        with output.open("wb") as out, errors.open("wb") as err:
            self._process = subprocess.Popen(  # noqa: ASYNC220  (it returns at once)
                up if self.keep else dies_with_parent(up, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(os.environ),
                # Ctrl-C must reach only this process, which then stops the system. A kept system outlives the terminal.
                start_new_session=self.keep,
                process_group=None if self.keep else 0,
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
        if not self.keep and self._process is not None:
            end(self._process, ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)))

    def abandon(self) -> None:
        """Stop the system even with `keep`: the demo failed before it could print where the system is."""
        self.keep = False
        self.stop()

    async def infaas(self, *arguments: str | Path) -> Any:
        """What `infaas ... --json` prints of this system. Raises InfaasError with its error output."""
        process = await asyncio.create_subprocess_exec(
            *command(*map(str, arguments), "--data-dir", str(self.data_dir), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(os.environ),
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise InfaasError(f"infaas {arguments[0]} failed: {err.decode(errors='replace').strip()}")
        return json.loads(out)

    async def sql(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query as maps of column names. Raises InfaasError."""
        found = await self.infaas("sql", query)
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


# -- the program

RECORDED_S = 10.0  # until every outcome must be in SQL. The contract says 5 s; a loaded machine may take longer.
COUNT = """
SELECT count(*) + (SELECT coalesce(sum(count), 0)::int8 FROM infaas.client_errors WHERE app = '{app}' AND code = 'unsatisfiable') AS outcomes,
  count(DISTINCT uid) + (SELECT coalesce(sum(count), 0)::int8 FROM infaas.client_errors WHERE app = '{app}' AND code = 'unsatisfiable') AS "different ones"
FROM infaas.query_outcomes WHERE app = '{app}' AND parent IS NULL
"""


class DemoTable(NamedTuple):
    """A table to print. rows: cells by the titles of their columns. left: the columns of words, beside the first; others are flush right."""

    title: str
    rows: Sequence[Mapping[str, str]]
    left: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """What a demo works with. seconds: of queries."""

    app: str
    system: DemoSystem
    client: Client
    seconds: float
    progress: Progress
    problems: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """For files of its own."""
        return self.system.data_dir.parent

    async def register(self, files: Sequence[tuple[str, str, Path, Path]]) -> dict[str, dict[str, str]]:
        """Register models, one after the other. files: app, model, file and validation set. Returns failed variants with reasons, by model."""
        failures = {}
        for number, (app, model, path, validation) in enumerate(files, 1):

            def tell(
                status: RegistrationStatus, title: str = f"registering {model} for {app} ({number} of {len(files)})"
            ) -> None:
                self.progress(title, status.progress)

            status = await self.client.register(path, app=app, model=model, validation=validation, on_progress=tell)
            failures[model] = {failure.variant: failure.reason for failure in status.failures}
        return failures

    async def recorded(self, load: DemoLoad) -> None:
        """Wait until SQL holds one outcome of each query. What is wrong with them is a problem of the run."""
        self.progress("reading the records", 0.0)
        self.problems.extend(load.problems())
        await self.in_sql(COUNT.format(app=self.app), load.queries, "queries were sent")

    async def in_sql(self, query: str, expected: int, what: str) -> None:
        """Wait until each figure of the query's row is `expected`. It is a problem of the run if it does not become so."""
        give_up = time.monotonic() + RECORDED_S
        while set((row := (await self.system.sql(query))[0]).values()) != {expected}:
            if time.monotonic() > give_up or max(row.values()) > expected:
                held = ", ".join(f"{count} {name}" for name, count in row.items())
                self.problems.append(f"{expected} {what}, but SQL holds {held}")
                break
            await asyncio.sleep(0.5)


class Demo(NamedTuple):
    """What one demo is about.

    play: register models, send queries for `seconds`, and tell what became of them: a part of the printed JSON. Raises InfaasError.
    shown: the result, to print. draw: a picture of it into a file whose suffix decides the format. settings: TOML for its system.
    """

    app: str
    play: Callable[[DemoRun], Awaitable[dict[str, Any]]]
    shown: Callable[[Mapping[str, Any]], Iterator[str | DemoTable]]
    draw: Callable[[Mapping[str, Any], Path], None] | None = None
    settings: str = ""


async def run(
    demo: Demo, *, keep: bool, seconds: float, picture: Path | None, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run a demo. Returns its result (`problems` is empty if all went well) and the system, which is stopped unless kept.

    picture: file to draw into; None: none is drawn. Raises InfaasError if the demo could not be carried out; then the system is stopped
    even with `keep`.
    """
    began = time.monotonic()
    async with (
        temporary(demo.settings, keep=keep, progress=progress) as (system, ready_s),
        infaas.connect(data_dir=system.data_dir) as client,
    ):
        one = DemoRun(app=demo.app, system=system, client=client, seconds=seconds, progress=progress)
        figures = await demo.play(one)
    found = {"app": demo.app, **figures, "picture": None if picture is None else str(picture), "problems": one.problems}
    found |= {"ready_s": ready_s, "seconds": time.monotonic() - began}
    if picture is not None and demo.draw is not None:
        demo.draw(found, picture)
    return found, system


def save_picture(figure: Any, panels: Sequence[Any], title: str, seconds: float, path: Path) -> None:
    """Finish a figure of matplotlib and write it. panels: one above the other, over so many seconds."""
    panels[-1].set_xlabel("time, s")
    panels[-1].set_xlim(0.0, seconds)
    for panel in panels:
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.25)
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
