"""Real processes are stopped and killed under load: `python benches/faults.py [--processes NAME ...] [--faults FAULT ...] [--rate R]`.

`infaas up` with two workers and two dispatchers. A stock NATS client asks at a steady rate, sends nothing again, and counts every reply. After `--before`
seconds one process is stopped for so many seconds (`0.6`), killed (`kill`), stopped for good (`good`), or stopped again and again until it has gone
(`again`). Of workers it is the one that serves. Printed for
each fault: what the client got first, further replies of the same and of another meaning, queries that nobody took, as the NATS server said at once,
and queries without any word; replies without a row, rows that do not say what the client got first, rows whose cost is not the reply's, and rows `ok` of
answers that came too late; when the last query was sent that was not answered in time, and,
after a kill and a stop for good, when each door told it and when all was well again, all in seconds from the fault.
"""

import argparse
import asyncio
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import rig

from tests.support.clients.as_told import Told, astray, compared, rows_of
from tests.support.clients.constant_load import APP, LibraryLoad, StockLoad
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.processes import alive
from tests.support.servers.system import Whole, running

SETTINGS = "[registrar]\nthreads = [1]\nmax_batches = [8]\n"
PROCESSES = ("executor", "dispatcher", "monitor", "registrar", "gateway")
FAULTS = ("0.3", "0.6", "1.5", "3", "kill", "good", "again")
COLUMNS = (
    "process", "fault", "queries", "in time", "late", "refused", "again: same", "other", "nobody", "silent", "no row", "row differs", "cost differs",
    "late as ok", "last failure",
)  # fmt: skip
NUMBERS = itertools.count()
LAST_S = 40.0  # s without a new row after which those that lack are missing: what a killed recorder had fetched comes again after 30 s
AGAIN_S = 0.02  # s between two stops
WELL_S = 30.0  # s for all to be well again


class Doors:
    """Asks each door again and again in a thread of its own; told: when each first named the process as missing, in s from the fault."""

    def __init__(self, system: Whole, process: str, commands: bool) -> None:
        self.told: dict[str, float] = {}
        self.well: float | None = None
        self._struck: float | None = None
        self._ended = False
        page, ready = system.metrics, system.metrics.replace("/metrics", "/readyz")
        looks: dict[str, Callable[[], str]] = {
            "/readyz": lambda: _get(ready),
            "gateway": lambda: _get(f"{system.gateway}/v2/health/ready"),
            "infaas_ready": lambda: f"{process}: silent" if 'infaas_ready{process="up"} 0' in _get(page) else "",
        }
        if commands:
            looks |= {
                "status": lambda: system.command("status", "--json").stdout,
                "doctor": lambda: system.command("doctor", "--json").stdout,
            }
        self._named = re.compile(rf"{process}(-[\w-]+)?: (silent|does not)")
        self._threads = [threading.Thread(target=self._ask, args=each, daemon=True) for each in looks.items()]
        for thread in self._threads:
            thread.start()

    def struck(self) -> None:
        self._struck = time.time()

    def _ask(self, name: str, look: Callable[[], str]) -> None:
        while not self._ended:
            began = time.time()
            missing = bool(self._named.search(look()))
            if self._struck is not None:
                passed = time.time() - self._struck
                if missing:
                    self.told.setdefault(name, passed)
                elif name == "/readyz" and name in self.told and self.well is None and began > self._struck:
                    self.well = passed
            time.sleep(0.05)

    def close(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()

    def __str__(self) -> str:
        told = ", ".join(f"{name} {at:.1f}" for name, at in sorted(self.told.items(), key=lambda one: one[1]))
        well = "not seen" if self.well is None else f"{self.well:.1f}"
        return f"  told: {told or 'nowhere'}; /readyz well again: {well}"


async def whole(system: Whole) -> None:
    """Until nothing is missing."""
    ready = system.metrics.replace("/metrics", "/readyz")
    give_up = time.time() + WELL_S
    while not (await asyncio.to_thread(_get, ready)).startswith("200") and time.time() < give_up:  # noqa: ASYNC110  nothing would set an event
        await asyncio.sleep(0.1)


def _get(url: str) -> str:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return f"{reply.status} {reply.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return f"0 {error}"


def victim(system: Whole, process: str, load: StockLoad) -> int:
    """The process of this service; of the worker that answered last."""
    worker = list(load.answers.values())[-1]["worker"] if process in ("executor", "monitor") else ""
    return system.pids(process, worker)[0]


def _signal(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # the supervisor has ended it


async def suffer(system: Whole, process: str, fault: str, given: argparse.Namespace) -> None:
    tag = f"{process}-{fault}-{next(NUMBERS)}".replace(".", "_")  # it is part of a subject
    good = fault in ("kill", "good", "again")
    doors = Doors(system, process, given.doors) if good else None
    load = StockLoad(system.nats, tag, given.rate, latency_ms=given.latency_ms)
    library = LibraryLoad(system.nats, f"library-{tag}", given.library, latency_ms=given.latency_ms)
    async with load, library:
        await asyncio.sleep(given.before)
        pid = victim(system, process, load)
        struck = time.time()
        if doors is not None:
            doors.struck()
        _signal(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if not good:
            await asyncio.sleep(float(fault))
            _signal(pid, signal.SIGCONT)
        while fault == "again" and alive(pid):  # the supervisor makes it go on
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(AGAIN_S)
        await asyncio.sleep(max(0.0, struck + (2 * given.after if good else given.after) - time.time()))
    told = await asyncio.to_thread(recorded, system, load)
    bad = load.queries.keys() - told.in_time
    last = max((load.queries[name].sent - struck for name in bad), default=0.0)
    refused = ", ".join(f"{len(names)} {code}" for code, names in sorted(told.refused.items()))
    without = (told.unserved, told.silent)
    sets = (told.same, told.other, *without, told.unrecorded, told.differs, told.charged, told.late_as_ok)
    counts = (len(load.queries), len(told.in_time), len(told.late), refused or 0, *map(len, sets))
    print(f"| {process} | {fault} | {' | '.join(map(str, counts))} | {last:.2f} |", flush=True)
    for name, names in (
        ("same", told.same),
        ("other", told.other),
        ("differs", told.differs),
        ("no row", told.unrecorded),
        ("cost", told.charged),
    ):
        for one in sorted(names)[:3]:
            print(
                f"  {name}: {one}: {[(round(at - load.queries[one].sent, 3), _brief(reply)) for at, reply in load.replies[one]]}"
            )
    if library.queries:
        kept = await asyncio.to_thread(lambda: astray(library, rows_of(system.sql, library.tag)))
        print(
            f"  library: {len(library.queries)} queries, {len(library.answers)} answered, {library.resent} sent again, {len(kept)} "
            f"lost, without a row or with another: {list(kept.items())[:3]}",
            flush=True,
        )
    if doors is not None:
        await whole(system)
        await asyncio.to_thread(doors.close)
        print(doors, flush=True)


def _brief(reply: dict) -> str:
    return (
        reply["error"]["code"] + ": " + reply["error"]["message"]
        if "error" in reply
        else f"answer of {reply['worker']}"
    )


def recorded(system: Whole, load: StockLoad) -> Told:
    """Compare once all that was said is recorded, or nothing more comes."""
    most, since = -1, time.monotonic()
    while True:
        rows = rows_of(system.sql, load.tag)
        told = compared(load, rows)
        if len(rows) > most:
            most, since = len(rows), time.monotonic()
        if not told.unrecorded or time.monotonic() > since + LAST_S:
            return told
        time.sleep(0.5)


def serving(system: Whole) -> int:
    """How many workers have a serving instance."""
    query = "SELECT count(DISTINCT worker) FROM infaas.variant_states WHERE state IN ('Active', 'Overloaded')"
    return int(system.rows(query)[0][0])


async def measure(system: Whole, given: argparse.Namespace) -> None:
    load = StockLoad(system.nats, "first", given.rate)
    async with load:
        await until(lambda: load.answers)
        give_up = time.time() + WELL_S
        while await asyncio.to_thread(serving, system) < given.workers and time.time() < give_up:  # noqa: ASYNC110  nothing would set an event
            await asyncio.sleep(0.5)
        await asyncio.sleep(given.settle)
    print(
        f"{serving(system)} workers serve; load average {os.getloadavg()[0]:.1f}\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
        flush=True,
    )
    for process in given.processes:
        for fault in given.faults:
            await whole(system)
            await asyncio.sleep(given.pause)
            await suffer(system, process, fault, given)
    print(f"load average {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--processes", nargs="+", default=PROCESSES, choices=PROCESSES)
    parser.add_argument("--faults", nargs="+", default=FAULTS, help="seconds of a stop, `kill`, `good` or `again`")
    parser.add_argument("--rate", type=float, default=300.0, help="queries a second")
    parser.add_argument(
        "--library", type=float, default=0.0, help="queries a second of the client library beside it, which sends again"
    )
    parser.add_argument("--latency-ms", type=float, default=300.0)
    parser.add_argument("--settle", type=float, default=8.0, help="seconds of load before the first fault")
    parser.add_argument("--before", type=float, default=2.0, help="seconds of load before each fault")
    parser.add_argument(
        "--after",
        type=float,
        default=5.0,
        help="seconds of load from each fault on; twice as many where a process is replaced",
    )
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dispatchers", type=int, default=2)
    parser.add_argument("--doors", action="store_true", help="ask `infaas status` and `infaas doctor`, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infaas-bench-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "infaas.toml").write_text(SETTINGS)
        options = ("--config", str(place / "infaas.toml"), "--no-dashboard")
        counts = ("--workers", str(given.workers), "--dispatchers", str(given.dispatchers))
        with running(place / "data", *options, *counts) as system:
            system.register(APP, tiny_models.exact(tiny_models.mlp()))
            system.done("admin", "set-app", APP, "--min-instances", str(given.workers))  # each worker has an instance
            asyncio.run(measure(system, given))


if __name__ == "__main__":
    sys.exit(main())
