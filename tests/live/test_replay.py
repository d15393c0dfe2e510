"""`infaas replay --json` of what a real system has just done."""

import asyncio

from tests.support.clients.stock import answered, ask, tensor
from tests.support.servers.processes import eventually
from tests.support.servers.system import APP, MODELS, Whole

ASKED = "SELECT count(*) FROM infaas.query_outcomes WHERE context = 'replay' AND app = %s AND outcome IN ('ok', 'late')"
# A replay ends with the last cost row: what came after it has no cost yet.
PAID = (
    "SELECT count(*) FROM infaas.cost_events WHERE cost > 0 AND time >="
    " (SELECT max(time) FROM infaas.query_outcomes WHERE context = 'replay' AND app = %s)"
)


def _recorded(system: Whole, query: str, app: str = APP) -> int:
    return int(system.rows(query, app)[0][0])


async def set_pipeline(nc) -> None:
    listed = await ask(nc, "infaas.list.apps", {})
    [app] = [one for one in listed["items"] if one["app"] == APP]
    given, made = app["inputs"][0]["name"], app["outputs"][0]["name"]
    never = {"output": made, "reduce": "max", "op": ">", "value": 1e9}
    graph = {
        "pipeline": {"name": "replayed", "latency_ms": 20_000.0},
        "vertex": [{"name": name, "app": APP, "inputs": {given: "$.picture"}} for name in ("first", "second")],
        "edge": [{"from": "first", "to": "second", "when": never}],
        "output": {"made": f"second.{made} | first.{made}"},
    }
    assert (await ask(nc, "infaas.admin.set-pipeline", graph))["done"]


async def test_the_recent_past_of_an_app_and_a_pipeline_of_a_real_system(system: Whole, nc) -> None:
    """In one test: what both cost is told every ten seconds."""
    for i in range(20):
        await answered(nc, {"inputs": tensor(system.x[i : i + 1]), "accuracy": 0.5, "context": "replay"})
    await set_pipeline(nc)
    for i in range(20):
        query = {"inputs": tensor(system.x[i : i + 1]), "latency_ms": 20_000.0, "context": "replay"}
        await known(nc, query, "infaas.query.replayed")
    for app in (APP, "replayed"):
        assert eventually(lambda: _recorded(system, ASKED, app) >= 20)  # noqa: B023  (at most 5 s after it happened)
        assert eventually(lambda: _recorded(system, PAID, app) > 0)  # noqa: B023
    # The recorder has the app's record, and with it the graph, as soon as it has seen the catalogue's entry.
    assert eventually(
        lambda: (
            _recorded(system, "SELECT count(*) FROM infaas.apps WHERE app = %s AND graph IS NOT NULL", "replayed") == 1
        )
    )

    what = ("--from", "-15m", "--policy", "infaas", "--app")  # other tests' apps may be in the shared system
    found = system.told("replay", *what, APP)
    run, recorded = found["policies"][0], found["recorded"]
    assert run["queries"] == recorded["queries"] >= 20
    assert recorded["cost"] > 0
    assert set(recorded["variants"]) <= {name for name in recorded["hardware"] if name.startswith(MODELS)}
    assert min(machine["price_per_hour"] for machine in found["machines"]) > 0
    assert run["apps"][APP]["answered"] >= 20
    assert run["simulated"] is True

    found = system.told("replay", *what, "replayed")
    run, recorded = found["policies"][0], found["recorded"]
    assert run["queries"] == recorded["queries"] >= 20  # a busy machine may have refused some first
    assert run["answered"] >= recorded["answered"] == 20
    stages = run["apps"]["replayed"]["pipeline"]["vertices"]
    assert {name: one["visits"] for name, one in stages.items()} == {"first": run["answered"], "second": 0}


async def known(nc, query, subject):
    """Ask until it is answered. A dispatcher that has not yet seen the app's record does not know it."""
    while "error" in (reply := await ask(nc, subject, query)):
        assert reply["error"]["code"] in ("unknown_app", "deadline", "overloaded"), reply
        await asyncio.sleep(0.05)
    return reply
