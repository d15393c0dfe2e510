"""What the views over rollups must show: the same, computed from raw rows. And events to compute it from."""

import random
from decimal import Decimal
from typing import Any

import psycopg

from bus.messages.events import CostEvent, Event
from services.recorder.events import EventMessage
from tests.support.data.events import event, message, outcome

TRUTH = {
    "cost_by_variant_hourly": """
        SELECT hour, app, model, variant, hardware, sum(cost), sum(queries)::bigint,
               1000 * sum(cost) / nullif(sum(asked), 0)::float8, sum(items)::bigint, sum(simulated), sum(seconds),
               sum(busy), sum(asked)::bigint, sum(asked_items)::bigint
        FROM (
          SELECT date_trunc('hour', time, 'UTC') AS hour, app, model, variant, hardware, cost, 0 AS queries, 0 AS items,
                 CASE WHEN simulated THEN cost ELSE 0 END AS simulated, seconds, busy_seconds AS busy, 0 AS asked, 0 AS asked_items
          FROM infaas.cost_events
          UNION ALL
          SELECT date_trunc('hour', time, 'UTC'), coalesce(payer, app), model, variant, hardware, 0, (parent IS NULL)::int,
                 CASE WHEN parent IS NULL THEN items ELSE 0 END, 0, 0, 0, (missing IS NULL)::int,
                 CASE WHEN missing IS NULL AND NOT cached THEN items ELSE 0 END
          FROM infaas.query_outcomes
        ) rows GROUP BY 1, 2, 3, 4, 5""",
    "cost_by_app_hourly": """
        SELECT hour, app, sum(cost), sum(queries)::bigint, 1000 * sum(cost) / nullif(sum(queries), 0)::float8, sum(simulated)
        FROM (
          SELECT date_trunc('hour', time, 'UTC') AS hour, app, cost, 0 AS queries,
                 CASE WHEN simulated THEN cost ELSE 0 END AS simulated
          FROM infaas.cost_events
          UNION ALL
          SELECT date_trunc('hour', time, 'UTC'), coalesce(payer, app), 0, (parent IS NULL)::int, 0 FROM infaas.query_outcomes
        ) rows GROUP BY 1, 2""",
    "outcomes_hourly": """
        SELECT date_trunc('hour', time, 'UTC'), app, payer, model, variant, hardware, outcome, code, stage, parent IS NOT NULL,
               missing IS NOT NULL, policy IS NOT DISTINCT FROM 'offline', count(*), sum(items)::bigint, sum(cost),
               coalesce(sum(accuracy), 0), count(accuracy), coalesce(sum(batch), 0)::bigint, count(batch), coalesce(sum(confidence), 0),
               count(confidence), count(*) FILTER (WHERE missing > 0), count(*) FILTER (WHERE simulated), min(time), max(time)
        FROM infaas.query_outcomes GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12""",
    "slo_by_app_minutely": """
        SELECT date_trunc('minute', time, 'UTC'), app, count(*), count(*) FILTER (WHERE outcome = 'late'),
               count(*) FILTER (WHERE outcome = 'refused'), count(*) FILTER (WHERE outcome = 'error'),
               avg((outcome IN ('ok', 'default'))::int)::float8,
               percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')),
               percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default'))
        FROM infaas.query_outcomes WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL AND outcome <> 'cancelled' GROUP BY 1, 2""",
}

# The hour in which a watermark is has two rows.
ADDED = """SELECT hour, app, payer, model, variant, hardware, outcome, code, stage, part, together, offline, sum(outcomes)::bigint, sum(items)::bigint,
    sum(cost), sum(accuracy_sum), sum(accuracy_rows)::bigint, sum(batch_sum)::bigint, sum(batch_rows)::bigint, sum(confidence_sum),
    sum(confidence_rows)::bigint, sum(incomplete)::bigint, sum(simulated)::bigint, min(first), max(last) FROM infaas.{}
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"""

# What pages must show of a range, by their statements.
IN_RANGE = "FROM infaas.query_outcomes WHERE time >= %(start)s AND time < %(end)s"
OF_PAGES = {
    "violations": f"""SELECT app, CASE outcome WHEN 'late' THEN 'late' ELSE coalesce(code, outcome) END, outcome, count(*),
        count(*) FILTER (WHERE simulated), min(time), max(time) {IN_RANGE} AND outcome NOT IN ('ok', 'default', 'cancelled')
        AND parent IS NULL AND policy IS DISTINCT FROM 'offline' GROUP BY 1, 2, 3""",
    "answered": f"""SELECT coalesce(payer, app), variant, coalesce(sum(items) FILTER (WHERE parent IS NULL), 0)::bigint,
        coalesce(sum(items) FILTER (WHERE missing IS NULL), 0)::bigint {IN_RANGE} AND outcome IN ('ok', 'late') GROUP BY 1, 2""",
    "served_long": f"""SELECT app, model, variant, hardware, bool_or(simulated), count(*), count(*) FILTER (WHERE outcome = 'ok'), avg(accuracy),
        NULL, NULL, 1000 * sum(cost) / sum(items), avg(batch) {IN_RANGE} AND outcome IN ('ok', 'late') AND missing IS NULL
        AND policy IS DISTINCT FROM 'offline' GROUP BY 1, 2, 3, 4""",
    "offline": f"""SELECT date_bin('1 hour', time, %(start)s), app, sum(items)::bigint {IN_RANGE}
        AND policy = 'offline' AND payer IS NULL AND outcome IN ('ok', 'late') GROUP BY 1, 2""",
    "agreement": f"""SELECT date_bin('1 hour', time, %(start)s), count(*), avg(confidence), count(*) FILTER (WHERE missing > 0),
        count(*) FILTER (WHERE outcome = 'default') {IN_RANGE}
        AND app = 'digits' AND missing IS NOT NULL AND outcome <> 'cancelled' GROUP BY 1""",
    "parts": f"""SELECT stage, count(*), NULL, NULL, 1000 * sum(cost) / nullif(sum(items), 0) {IN_RANGE}
        AND app = 'digits' AND parent IS NOT NULL AND stage <> '' GROUP BY 1""",
}

Shown = dict[str, list[tuple[Any, ...]]]


def rounded(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """In one order, and without the last digits of sums, which depend on their order."""
    cells = [
        tuple(float(f"{cell:.9g}") if isinstance(cell, (float, Decimal)) else cell for cell in row) for row in rows
    ]
    return sorted(cells, key=repr)


def truth(connection: psycopg.Connection[Any]) -> Shown:
    """What the views must show while all raw rows are there."""
    return {view: rounded(connection.execute(query.encode()).fetchall()) for view, query in TRUTH.items()}


def shown(connection: psycopg.Connection[Any]) -> Shown:
    """What the views show, without the apps' targets, which are no sums of rows."""
    found = {view: connection.execute(f"SELECT * FROM infaas.{view}".encode()).fetchall() for view in TRUTH}
    found["outcomes_hourly"] = connection.execute(ADDED.format("outcomes_hourly").encode()).fetchall()
    found["slo_by_app_minutely"] = [row[:9] for row in found["slo_by_app_minutely"]]
    return {view: rounded(rows) for view, rows in found.items()}


def some(rng: random.Random, count: int, begin: float, end: float) -> list[EventMessage]:
    """Messages with so many outcomes and as many costs, at times between these, of every sort there is."""
    outcomes: list[Event] = []
    costs: list[Event] = []
    for _ in range(count):
        kind = rng.choice(["ok"] * 6 + ["late", "default", "refused", "error", "cancelled"])
        nobodys: dict[str, Any] = {"variant": None, "model": None, "hardware": None}
        unserved = (
            nobodys | {"latency_ms": None, "code": rng.choice(["overloaded", "no_variant"])}
            if kind == "refused"
            else {}
        )
        part = {"parent": rng.randbytes(16), "stage": "mlp"}
        joined = rng.choice([nobodys, {}]) | {"confidence": rng.random(), "missing": rng.randint(0, 2)}
        visit = part | {"payer": "social"}
        role = rng.choice([{}, {}, {}, part, visit, part | {"cached": True}, joined])
        outcomes.append(
            outcome(
                **{
                    "time": rng.uniform(begin, end), "app": rng.choice(["digits", "scans"]), "outcome": kind,
                    "variant": rng.choice(["a", "b"]), "latency_ms": rng.expovariate(0.2), "items": rng.randint(1, 8),
                    "policy": rng.choice(["infaas", "offline", None]), "cost": rng.random() * 1e-6,
                    "simulated": rng.random() < 0.3, "accuracy": rng.choice([None, rng.random()]), "batch": rng.choice([None, 1, 8]),
                } | unserved | role
            )
        )  # fmt: skip
        nobody = {"app": None, "model": None, "variant": None} if rng.random() < 0.2 else {}
        costs.append(
            event(
                CostEvent,
                **{
                    "time": rng.uniform(begin, end), "variant": rng.choice(["a", "b"]), "cost": rng.random(),
                    "simulated": rng.random() < 0.3, "busy_seconds": rng.random(),
                } | nobody,
            )
        )  # fmt: skip
    return [message(*outcomes), message(*costs)]
