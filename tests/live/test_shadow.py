"""`infaas shadow` beside a real system under load: it records what it would have done, and changes nothing there."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bus.subjects import Subjects
from tests.support.servers.processes import environ, eventually, infaas, program
from tests.support.servers.system import APP, Whole

# Another goal than the system's, so that it loads what the system does not.
OTHER = ("infaas", "--set", "goal=accuracy", "autoscaler.hold_s=1")
NAME = "infaas goal=accuracy autoscaler.hold_s=1"


@pytest.fixture
def loaded(system: Whole) -> Iterator[Whole]:
    """The session's system while queries come that its present instances can answer."""
    load = ("--rate", "60", "--latency-ms", "1000", "--seconds", "600", "--warmup", "0")
    recent = "SELECT count(*) FROM infaas.query_outcomes WHERE app = %s AND outcome IN ('ok', 'late') AND time > now() - interval '10 s'"
    with program("infaas.cli", "bench", "--app", APP, *load, *system.where):
        assert eventually(lambda: system.rows(recent, APP)[0][0] > 100)
        yield system


class Wire:
    """A way to a NATS server that notes what is published on it. url: of this way. published: the subjects, oldest first."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self._there = urlsplit(url)
        self._said = b""

    @property
    def published(self) -> list[str]:
        return [found.decode() for found in re.findall(rb"\r\nH?PUB (\S+) ", b"\r\n" + self._said)]

    async def open(self, opened: threading.Event, closing: asyncio.Event) -> None:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            user, _, _ = self._there.netloc.rpartition("@")
            self.url = f"nats://{user}@127.0.0.1:{server.sockets[0].getsockname()[1]}"
            opened.set()
            await closing.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection(self._there.hostname, self._there.port)
        await asyncio.gather(self._pump(reader, back, note=True), self._pump(onward, writer, note=False))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, note: bool) -> None:
        try:
            while data := await source.read(2**16):
                self._said += data if note else b""
                sink.write(data)
        finally:
            sink.close()


@contextmanager
def wire(url: str) -> Iterator[Wire]:
    found, opened, closing = Wire(url), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(found.open(opened, closing),))
    thread.start()
    try:
        assert opened.wait(60)
        yield found
    finally:
        loop.call_soon_threadsafe(closing.set)
        thread.join()
        loop.close()


def test_a_shadow_acts_on_simulated_machines_only(loaded: Whole, tmp_path: Path) -> None:
    """The system scales as it sees fit meanwhile, so what the shadow publishes is looked at on its own connection."""
    [(began,)] = loaded.rows("SELECT now()")
    with wire(loaded.nats) as own:
        endpoints = json.loads((loaded.directory / "endpoints.json").read_text()) | {"nats": own.url}
        (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
        done = infaas("shadow", *OTHER, "--seconds", "12", "--json", "--data-dir", str(tmp_path))
        assert done.returncode == 0, done.stderr
        published = {subject for subject in own.published if not subject.startswith("$JS.API.")}
    assert published == {Subjects().event("shadow")}
    found = json.loads(done.stdout)
    shadow, real = found["shadow"], found["real"]
    assert found["policy"] == NAME
    assert found["seconds"] >= 12
    assert shadow["queries"] == real["queries"] > 0  # the same ones
    assert shadow["in_time"] > 0.5
    events = "SELECT action, count(*) FROM infaas.scaling_events WHERE time > %s GROUP BY 1"
    assert eventually(lambda: Counter(real["actions"]) <= Counter(dict(loaded.rows(events, began)))), real
    incomparable = [
        note for note in found["notes"] if note.startswith("cost: ")
    ]  # where other tests' apps are not replayed as they were
    assert (real["cost_rate"] is None) == bool(incomparable), found
    if not incomparable:
        assert shadow["cost_rate"] == pytest.approx(real["cost_rate"], rel=0.1)  # on the same machines
    assert shadow["machines"] == real["machines"]
    assert "queries, in time" in done.stderr  # progress
    kept = "SELECT action, count, reason, cost_rate FROM infaas.shadow_events WHERE policy = %s ORDER BY time"
    recorded: list[tuple[Any, ...]] = []

    shares = [f"{one['in_time']:.2%} of {one['queries']} queries" for one in (shadow, real)]
    last = f"{shares[0]} in time (the system: {shares[1]})"  # one truth with the page

    def complete() -> bool:
        recorded[:] = loaded.rows(kept, NAME)
        samples = [reason for action, _, reason, _ in recorded if action == "sample"]
        return sum(n > 0 for _, n, *_ in recorded) == actions and "".join(samples[-1:]).startswith(last)

    actions = sum(shadow["actions"].values())
    assert eventually(complete), recorded
    assert recorded[0][0] == "sample"
    assert all(reason for _, _, reason, _ in recorded)
    assert recorded[0][3] == pytest.approx(shadow["cost_rate"], rel=0.1)
    if not shadow["actions"]:
        pytest.skip("other tests' load has made the system hold what this policy wants: it had no order to give")


def test_ctrl_c_ends_it_with_a_summary(loaded: Whole) -> None:
    command = [sys.executable, "-P", "-m", "infaas.cli", "shadow", "static", "--data-dir", str(loaded.directory)]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "until Ctrl-C" in process.stderr.readline()
        assert "queries, in time" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "static (simulated)" in out
    assert "the system" in out


def test_without_demand_it_says_what_to_do(system: Whole) -> None:
    lately = "SELECT count(*) FROM infaas.query_outcomes WHERE time > now() - interval '3 s'"
    assert eventually(lambda: system.rows(lately) == [(0,)])
    done = infaas("shadow", "static", "--seconds", "2", "--data-dir", str(system.directory))
    assert done.returncode == 1
    assert "no query came in this time" in done.stderr
    assert "infaas bench" in done.stderr
