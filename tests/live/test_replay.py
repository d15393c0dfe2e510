"""`infaas replay` of what a real system has just done."""

import json

import psycopg

from tests.support.clients.stock import answered, talk, tensor
from tests.support.servers.processes import eventually, infaas
from tests.support.servers.system import APP, MODELS, Whole

ASKED = "SELECT count(*) FROM infaas.query_outcomes WHERE context = 'replay' AND app = %s AND outcome = 'ok'"
PAID = "SELECT count(*) FROM infaas.cost_events WHERE app = %s AND cost > 0"


def _recorded(system: Whole, query: str) -> int:
    with psycopg.connect(system.sql) as connection:
        row = connection.execute(query, (APP,)).fetchone()
    assert row is not None
    return int(row[0])


def test_the_recent_past_of_a_real_system(system: Whole) -> None:
    async def ask(nc):
        for i in range(20):
            await answered(nc, {"inputs": tensor(system.x[i : i + 1]), "accuracy": 0.5, "context": "replay"})

    talk(system, ask)
    assert eventually(lambda: _recorded(system, ASKED) >= 20)  # at most 5 s after it happened
    assert eventually(lambda: _recorded(system, PAID) > 0)  # a system that has just begun has not been billed yet
    what = ("--from", "-1h", "--app", APP, "--policy", "infaas")  # other tests' apps may be in the shared system
    done = infaas("replay", *what, "--json", "--data-dir", str(system.directory))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    run, recorded = found["policies"][0], found["recorded"]
    assert run["queries"] == recorded["queries"] >= 20
    assert recorded["cost"] > 0
    assert set(recorded["variants"]) <= {name for name in recorded["hardware"] if name.startswith(MODELS)}
    assert found["machines"][0]["price_per_hour"] > 0
    assert run["apps"][APP]["answered"] >= 20
    assert run["simulated"] is True
