"""`infaas shadow` beside a real system under load: it records what it would have done, and changes nothing there."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.support.servers.processes import environ, eventually, infaas
from tests.support.servers.system import APP, Whole

# Another goal than the system's, so that it loads what the system does not.
OTHER = ("infaas", "--set", "goal=accuracy", "autoscaler.hold_s=1")
NAME = "infaas goal=accuracy autoscaler.hold_s=1"


def rows(system: Whole, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(system.sql) as connection:
        return connection.execute(query.encode(), values).fetchall()


@pytest.fixture
def loaded(system: Whole) -> Iterator[Whole]:
    """The session's system while queries come that its present instances can answer."""
    where = ("--data-dir", str(system.directory))
    load = ("bench", "--app", APP, "--rate", "60", "--latency-ms", "100", "--seconds", "600", "--warmup", "0", *where)
    asked = subprocess.Popen(
        [sys.executable, "-P", "-m", "infaas.cli", *load],
        env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    recent = "SELECT count(*) FROM infaas.query_outcomes WHERE app = %s AND outcome = 'ok' AND time > now() - interval '10 s'"
    try:
        assert eventually(lambda: rows(system, recent, APP)[0][0] > 300, 60)
        yield system
    finally:
        asked.terminate()
        asked.wait(30)


def present(system: Whole) -> tuple[Any, ...]:
    """Machines with the time of their start, and how many actions there were."""
    return (
        rows(system, "SELECT worker, count(*), max(time) FROM infaas.worker_events GROUP BY 1 ORDER BY 1"),
        rows(
            system,
            "SELECT variant, worker, device, since FROM infaas.variant_states WHERE worker IS NOT NULL ORDER BY 1, 2, 4",
        ),
        rows(system, "SELECT count(*) FROM infaas.scaling_events"),
    )


@pytest.mark.slow
def test_a_shadow_acts_on_simulated_machines_only(loaded: Whole) -> None:
    where = ("--data-dir", str(loaded.directory))
    # What other tests have left is unloaded once nobody needs it.
    lately = "SELECT count(*) FROM infaas.scaling_events WHERE time > now() - interval '10 s'"
    assert eventually(lambda: rows(loaded, lately) == [(0,)], 90)
    before = present(loaded)
    done = infaas("shadow", *OTHER, "--seconds", "12", "--json", *where)
    assert done.returncode == 0, done.stderr
    assert present(loaded) == before
    found = json.loads(done.stdout)
    shadow, real = found["shadow"], found["real"]
    assert found["policy"] == NAME
    assert found["seconds"] >= 12
    assert 300 < shadow["items"] < 1400
    assert shadow["items"] == pytest.approx(real["items"], rel=0.2)
    assert shadow["in_time"] > 0.9
    assert sum(shadow["actions"].values()) >= 1
    assert real["actions"] == {}
    assert shadow["cost_rate"] == pytest.approx(real["cost_rate"], rel=0.01)  # on the same machines
    assert shadow["machines"] == real["machines"]
    assert "items, in time" in done.stderr  # progress
    kept = "SELECT action, count, reason, cost_rate FROM infaas.shadow_events WHERE policy = %s ORDER BY time"
    assert eventually(lambda: sum(row[1] > 0 for row in rows(loaded, kept, NAME)) == sum(shadow["actions"].values()))
    recorded = rows(loaded, kept, NAME)
    assert recorded[0][0] == recorded[-1][0] == "sample"
    assert all(reason for _, _, reason, _ in recorded)
    assert recorded[0][3] == pytest.approx(real["cost_rate"], rel=0.01)


@pytest.mark.slow
def test_ctrl_c_ends_it_with_a_summary(loaded: Whole) -> None:
    command = [sys.executable, "-P", "-m", "infaas.cli", "shadow", "static", "--data-dir", str(loaded.directory)]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "listening" in process.stderr.readline()
        assert "items, in time" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "static (simulated)" in out
    assert "the system" in out


@pytest.mark.slow
def test_without_demand_it_says_what_to_do(system: Whole) -> None:
    lately = "SELECT count(*) FROM infaas.query_outcomes WHERE time > now() - interval '3 s'"
    assert eventually(lambda: rows(system, lately) == [(0,)], 60)
    done = infaas("shadow", "static", "--seconds", "2", "--data-dir", str(system.directory))
    assert done.returncode == 1
    assert "no query came in this time" in done.stderr
    assert "infaas bench" in done.stderr
