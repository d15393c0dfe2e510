"""What the system wrote about a run, read from SQL with its read-only role. Times: seconds from the start of the load."""

from msgspec import Struct


class Move(Struct, frozen=True):
    """An instance changed its state."""

    at: float
    instance: str
    variant: str
    state: str
    reason: str


class Charge(Struct, frozen=True):
    """What a period that ended at `at` cost, US$; variant: "" for the part that nobody used. seconds: of the period."""

    at: float
    seconds: float
    variant: str
    cost: float


class Action(Struct, frozen=True):
    """What was scaled, and why."""

    at: float
    scaler: str
    action: str
    variant: str
    count: int
    reason: str
    solver: str | None
    solve_ms: float | None


class Records(Struct, frozen=True):
    """hardware: of each variant, with "simulated" before it where it is. outcomes: count by what SQL calls a query's end."""

    moves: list[Move]
    charges: list[Charge]
    actions: list[Action]
    hardware: dict[str, str]
    outcomes: dict[str, int]


# The period of a charge is told by its device's row without a variant: all rows of one period carry the same time.
_CHARGES = """
SELECT extract(epoch FROM c.time)::float8 - %(start)s, p.seconds, coalesce(c.variant, ''), c.cost
FROM infaas.cost_events c
JOIN (
  SELECT time, worker, hardware, max(seconds) AS seconds FROM infaas.cost_events WHERE variant IS NULL GROUP BY 1, 2, 3
) p ON p.time = c.time AND p.worker = c.worker AND p.hardware = c.hardware
WHERE c.time > to_timestamp(%(start)s) AND c.time <= to_timestamp(%(until)s)
ORDER BY c.time
"""
_MOVES = """
SELECT extract(epoch FROM time)::float8 - %(start)s, instance, variant, to_state, reason
FROM infaas.state_events WHERE time > to_timestamp(%(since)s) AND time <= to_timestamp(%(until)s) ORDER BY time
"""
_ACTIONS = """
SELECT extract(epoch FROM time)::float8 - %(start)s, scaler, action, coalesce(variant, ''), count, reason, solver, solve_ms
FROM infaas.scaling_events WHERE time > to_timestamp(%(since)s) AND time <= to_timestamp(%(until)s) ORDER BY time
"""
_OUTCOMES = """
SELECT CASE WHEN outcome = 'refused' THEN outcome || ': ' || coalesce(code, '') ELSE outcome END, count(*)
FROM infaas.query_outcomes WHERE time >= to_timestamp(%(start)s) AND time <= to_timestamp(%(until)s) AND parent IS NULL GROUP BY 1 ORDER BY 1
"""
_HARDWARE = "SELECT variant, CASE WHEN simulated THEN 'simulated ' ELSE '' END || hardware FROM infaas.variants"


def read(dsn: str, *, since: float, start: float, until: float) -> Records:
    """since: when the system started; start, until: of the load. All Unix seconds."""
    import psycopg  # the rest of this file is for those that only count

    times = {"since": since, "start": start, "until": until}
    with psycopg.connect(dsn) as connection:
        return Records(
            moves=[Move(*row) for row in connection.execute(_MOVES, times)],
            charges=[Charge(*row) for row in connection.execute(_CHARGES, times)],
            actions=[Action(*row) for row in connection.execute(_ACTIONS, times)],
            hardware={str(name): str(kind) for name, kind in connection.execute(_HARDWARE)},
            outcomes={str(name): int(count) for name, count in connection.execute(_OUTCOMES, times)},
        )
