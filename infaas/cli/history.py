"""What the database adds to the list of apps: what they reached, what the autoscalers expect of them, and what has drifted."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

from infaas.connecting import find_sql

Item = dict[str, Any]
_HISTORY_S = 3  # for the database's answers
_REACHED = """
SELECT app, sum(attainment * queries) / sum(queries),
       sum(attainment * queries) FILTER (WHERE recent) / sum(queries) FILTER (WHERE recent)
FROM (SELECT *, minute > now() - interval '5 minutes' AS recent FROM infaas.slo_by_app_minutely) minutes
WHERE minute > now() - interval '1 hour' GROUP BY app"""
_EXPECTED = """
SELECT DISTINCT ON (app) app, forecast, headroom FROM infaas.objective_events
WHERE time > now() - interval '1 minute' ORDER BY app, time DESC"""
DRIFT = """
SELECT app, json_agg(json_build_object('column', column_name, 'distance', distance, 'since', extract(epoch FROM since))
                     ORDER BY distance DESC)
FROM infaas.drift_events WHERE ended IS NULL GROUP BY app"""


async def with_history(asked: Awaitable[list[Item]], data_dir: Path | None, lacks: dict[str, str]) -> list[Item]:
    """The apps with what the history says of them (None: unknown). lacks: gets what of it the database cannot tell, and why."""
    history = asyncio.create_task(asyncio.to_thread(_history, data_dir, lacks))
    apps = await asked
    reached, expected, drift = await history
    for app in apps:
        app["attainment_1h"], app["attainment_5m"] = reached.get(app["app"], [None, None])
        app["forecast"], app["headroom"] = expected.get(app["app"], [None, None])
        (app["drift"],) = drift.get(app["app"], [[]])
    return apps


def _history(data_dir: Path | None, lacks: dict[str, str]) -> list[dict[str, list[Any]]]:
    """By app what each query says. One that the database cannot answer is empty; the lists do not depend on it."""
    import psycopg  # noqa: PLC0415  (the command line starts without it)

    limits = f"-c statement_timeout={1000 * _HISTORY_S}"
    told: dict[str, dict[str, list[Any]]] = {"attainment": {}, "forecast": {}, "drift": {}}
    with (
        suppress(psycopg.Error),  # `infaas doctor` tells what is wrong with the database
        psycopg.connect(find_sql(data_dir), connect_timeout=_HISTORY_S, options=limits) as connection,
    ):
        connection.read_only = connection.autocommit = True  # a query that fails leaves the others alone
        for name, query in zip(told, (_REACHED, _EXPECTED, DRIFT), strict=True):
            try:
                told[name] = {app: rest for app, *rest in connection.execute(query)}
            except psycopg.ProgrammingError as error:
                lacks[name] = f"{error.diag.message_primary}: python -m services.shell.store prepare makes it"
    return list(told.values())
