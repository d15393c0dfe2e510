"""The demo from end to end: a system of its own, a family of real models, real queries under a changing load, the accounts."""

import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import infaas
from bus.messages.public import RegistrationStatus
from infaas.client import Client
from infaas.demo.family import Family
from infaas.demo.load import Load
from infaas.demo.system import System
from infaas.errors import InfaasError

RECORDED = 10.0  # s until what happened must be in SQL (the contract says 5; a loaded machine may take longer)

# Told about progress: what is being done, and how much of it (0..1).
Tell = Callable[[str, float], None]

OUTCOMES = """
SELECT coalesce(variant, '-') AS variant, outcome, count(*) AS queries, sum(items) AS items,
       round((percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms))::numeric, 2)::float8 AS p50_ms
FROM infaas.query_outcomes WHERE app = '{app}' GROUP BY 1, 2 ORDER BY queries DESC LIMIT 12
"""
STATES = """
SELECT variant, from_state || ' -> ' || to_state AS change, count(*) AS times, min(reason) AS reason
FROM infaas.state_events WHERE app = '{app}' GROUP BY 1, 2 ORDER BY min(time) LIMIT 12
"""
COST = """
SELECT coalesce(app, 'nobody (idle)') AS app, round(sum(busy_seconds)::numeric, 2)::float8 AS busy_s, sum(cost) AS usd
FROM infaas.cost_events GROUP BY 1 ORDER BY usd DESC
"""
COUNT = "SELECT count(*) AS n, count(DISTINCT uid) AS uids FROM infaas.query_outcomes WHERE app = '{app}'"


async def run(family: Family, *, keep: bool, seconds: float, tell: Tell) -> tuple[dict[str, Any], System]:
    """Run the demo and return what it found (`problems` empty: all went well), and the system, stopped unless kept.

    Raises InfaasError when it could not be carried out at all; then the system is stopped in any case.
    """
    directory = Path(tempfile.mkdtemp(prefix="infaas-demo-"))
    system = System(directory / "data", keep=keep, settings=family.settings)
    began = time.monotonic()
    try:
        tell("starting NATS, PostgreSQL and the services", 0.0)
        ready_s = await system.start()
        async with infaas.connect(data_dir=system.data_dir) as client:
            registered = await register(client, family, family.save_validation(directory / "validation.npz"), tell)
            load = await send(client, family, seconds, tell)
        tell("reading the accounts", 0.0)
        problems = [problem for tally in load.tallies for problem in tally.conclude()]
        problems += await recorded(system, family.app, load.sent)
        found = {
            "app": family.app,
            "things": family.things,
            "registered": registered,
            "asks": [tally.summary() for tally in load.tallies],
            "first_answer_ms": load.first_ms,
            "queries": load.sent,
            "sql": {
                "infaas sql: outcomes by variant": await system.sql(OUTCOMES.format(app=family.app)),
                "infaas sql: states of instances": await system.sql(STATES.format(app=family.app)),
                "infaas sql: cost by app": await system.sql(COST),
            },
            "problems": problems,
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
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
    return found, system


async def register(client: Client, family: Family, validation: Path, tell: Tell) -> list[dict[str, Any]]:
    """Register every model of the family, one after the other; returns what each one's variants measured."""
    files = family.models
    failures: dict[str, dict[str, str]] = {}
    for number, (model, path) in enumerate(files.items()):
        title = f"registering {model} ({number + 1} of {len(files)})"
        tell(title, 0.0)

        def progress(status: RegistrationStatus, title: str = title) -> None:
            tell(title, status.progress)

        status = await client.register(path, app=family.app, model=model, validation=validation, on_progress=progress)
        failures[model] = {failure.variant: failure.reason for failure in status.failures}
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in await client.variants(app=family.app):
        by_model[row["model"]].append(row)
    missing = files.keys() - by_model.keys()
    if missing:
        raise InfaasError(f"registered, but not listed: {', '.join(sorted(missing))}")
    return [{**summary(model, by_model[model]), "failures": failures[model]} for model in files]


def summary(model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's variants in a line: smallest and largest of each figure."""
    spans: dict[str, list[float]] = {}
    for name in ("accuracy", "latency_ms", "cost_per_1000", "memory_mb"):
        values = [float(row[name]) for row in rows if row[name] is not None]
        spans[name] = [min(values), max(values)] if values else [0.0, 0.0]
    return {"model": model, "variants": len(rows), **spans}


async def send(client: Client, family: Family, seconds: float, tell: Tell) -> Load:
    """Ask everything once until it is answered, then send the load."""
    variants = {row["variant"]: row for row in await client.variants(app=family.app)}
    wanted = family.asks(variants.values())
    load = Load(client, family, wanted, variants)
    possible = sum(ask.possible for ask in wanted)
    await load.wake(lambda: tell("first queries: loading what they need", len(load.first_ms) / possible))
    await load.run(seconds, lambda due: tell("sending queries", due / seconds))
    return load


async def recorded(system: System, app: str, sent: int) -> list[str]:
    """Wait until the database holds one outcome for each query; what is wrong otherwise."""
    give_up = time.monotonic() + RECORDED
    while True:
        (row,) = await system.sql(COUNT.format(app=app))
        if row["n"] == row["uids"] == sent:
            return []
        if row["n"] > sent or time.monotonic() > give_up:
            return [f"{sent} queries were sent, but SQL holds {row['n']} outcomes ({row['uids']} different)"]
        await asyncio.sleep(0.5)
