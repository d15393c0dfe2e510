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
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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


class Demo(Protocol):
    """What one demo is about. settings: TOML for its system."""

    app: str
    settings: str = ""

    async def play(self, client: Client, directory: Path, seconds: float, progress: Progress) -> DemoLoad:
        """Register the models and send queries for so many seconds. Raises InfaasError."""

    async def figures(self, system: DemoSystem, load: DemoLoad) -> dict[str, Any]:
        """What became of the queries; a part of the printed JSON. `problems`: what is wrong with them, where something is."""

    def shown(self, result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
        """The result, to print."""

    def draw(self, result: Mapping[str, Any], path: Path) -> None:
        """A picture of the result, where the demo has one. The path's suffix decides its format. Needs matplotlib."""
        del result, path


async def run(
    demo: Demo, *, keep: bool, seconds: float, picture: Path | None, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run a demo. Returns its result (`problems` is empty if all went well) and the system, which is stopped unless kept.

    picture: file to draw into; None: none is drawn. Raises InfaasError if the demo could not be carried out; then the system is stopped
    even with `keep`.
    """
    began = time.monotonic()
    async with temporary(demo.settings, keep=keep, progress=progress) as (system, ready_s):
        async with infaas.connect(data_dir=system.data_dir) as client:
            load = await demo.play(client, system.data_dir.parent, seconds, progress)
        progress("reading the records", 0.0)
        unrecorded = await in_sql(system, COUNT.format(app=demo.app), load.queries, "queries were sent")
        figures = await demo.figures(system, load)
        found = {
            "app": demo.app,
            "queries": load.queries,
            **figures,
            "picture": None if picture is None else str(picture),
            "problems": [*load.problems(), *figures.get("problems", ()), *unrecorded],
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
    if picture is not None:
        demo.draw(found, picture)
    return found, system


async def register(
    client: Client, files: Iterable[tuple[str, str, Path, Path]], progress: Progress
) -> dict[str, dict[str, str]]:
    """Register models, one after the other. files: app, model, file and validation set. Returns failed variants with reasons, by model."""
    failures = {}
    listed = list(files)
    for number, (app, model, path, validation) in enumerate(listed, 1):
        title = f"registering {model} for {app} ({number} of {len(listed)})"
        progress(title, 0.0)

        def on_progress(status: RegistrationStatus, title: str = title) -> None:
            progress(title, status.progress)

        status = await client.register(path, app=app, model=model, validation=validation, on_progress=on_progress)
        failures[model] = {failure.variant: failure.reason for failure in status.failures}
    return failures


async def in_sql(system: DemoSystem, query: str, expected: int, what: str) -> list[str]:
    """Wait until each figure of the query's row is `expected`. Returns what is wrong if it does not become so."""
    give_up = time.monotonic() + RECORDED_S
    while True:
        (row,) = await system.sql(query)
        if set(row.values()) == {expected}:
            return []
        if time.monotonic() > give_up or max(row.values()) > expected:
            held = ", ".join(f"{count} {name}" for name, count in row.items())
            return [f"{expected} {what}, but SQL holds {held}"]
        await asyncio.sleep(0.5)


def text(value: float | None, form: str) -> str:
    """The number in this form; empty without one."""
    return "" if value is None else form.format(value)


def counted(counts: Mapping[str, int], between: str = ", ") -> str:
    """Counts in words: "3 × deadline, 1 × overloaded"."""
    return between.join(f"{count} × {what}" for what, count in counts.items())


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
