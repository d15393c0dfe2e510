"""A recording in the database, read with the rights of `infaas_reader`: relations of docs/sql.md, queries a page at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import ceil
from typing import Any, NamedTuple

import msgspec
import psycopg
from psycopg.rows import dict_row

from bus.messages.catalog import AppRecord, Profile, ProfileRow, VariantRecord
from bus.subjects import WITHOUT_APP
from services.core.emulation import KINDS
from services.core.placement import Device
from services.simulation.replay.recorded import RecordedCost
from services.simulation.replay.recording import (
    NothingRecorded,
    RecordedJob,
    RecordedQuery,
    RecordedWorker,
    Recording,
    RecordingHead,
    ReplayError,
    query_fault,
    with_stages,
    written,
)
from services.simulation.scenario.catalogue import SIGNATURE

_PAGE = 5000  # queries at once
_PERIOD = "1 hour"  # longer than the period of any cost row
_TAIL = 30.0  # s after the last cost row in which the next one may not be written yet
_BINS = 300
_LEAST_BIN = 2.0  # s

Connection = psycopg.Connection[Any]


class TimeRange(NamedTuple):
    """A range of time, Unix seconds: begins is included, ends is not. apps: those to replay; empty: all."""

    begins: float
    ends: float
    apps: Sequence[str] = ()


@contextmanager
def database(dsn: str, span: TimeRange) -> Iterator[Recording]:
    """The recording of this range, in one snapshot of the database. Read it within the block.

    Raises ReplayError if the range has no queries, and psycopg.Error.
    """
    with psycopg.connect(dsn, connect_timeout=10, application_name="infaas replay") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute("SET LOCAL statement_timeout = '30min'")  # a day's rows are not read in the usual 30 s
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '30min'")
        connection.execute("SET LOCAL search_path = infaas")
        head = _head(connection, span)
        yield Recording(head, _queries(connection, head))


def _head(connection: Connection, span: TimeRange) -> RecordingHead:
    apps = apps_of(connection)
    missing = [app for app in span.apps if app not in {one.app for one in apps}]
    if missing:
        known = ", ".join(sorted(one.app for one in apps)) or "none"
        raise ReplayError(f"--app {missing[0]}: there is no such app in the catalogue; the apps are: {known}")
    if span.apps:
        wanted = with_stages(span.apps, apps)
        apps = [one for one in apps if one.app in wanted]
    begins, ends = _clipped(connection, span)
    only = sorted(set(span.apps)) or None
    count = _one(
        connection,
        "SELECT count(*) FROM query_outcomes WHERE time >= %(begins)s AND time < %(ends)s AND policy IS DISTINCT FROM 'offline'"
        " AND outcome <> 'cancelled' AND parent IS NULL AND (%(only)s::text[] IS NULL OR app = ANY (%(only)s))",
        _bounds(begins, ends, only),
    )[0]
    every = _every(ends - begins)
    bill = RecordedCost(begins, ends, every)
    for time, seconds, worker, app, variant, cost, simulated in _cursor(
        connection,
        "cost",
        "SELECT extract(epoch FROM time)::float8, seconds, worker || '/' || hardware, app, variant, cost, simulated FROM cost_events"
        " WHERE time > %(begins)s AND time < %(ends)s + %(period)s::interval ORDER BY time, 3, variant NULLS FIRST, app",
        {**_bounds(begins, ends, only), "period": _PERIOD},
    ):
        bill.add(time, seconds, worker, app, variant, cost, simulated=simulated)
    used = _used(connection, begins, ends, every)
    prices = prices_of(connection)
    notes: list[str] = []
    visits, items = _visits(connection, begins, ends, apps)
    return RecordingHead(
        begins=begins,
        ends=ends,
        every_s=every,
        only=only,
        queries=count,
        apps=apps,
        slo_target=usual_target_of(connection),
        variants=variants_of(connection, {one.app for one in apps}, notes),
        prices=prices,
        workers=_workers(connection, begins, ends, bill, prices, notes),
        bins=bill.bins(used),
        billed=bill.rows > 0,
        simulated_cost=bill.simulated(),
        actions=_actions(connection, begins, ends),
        jobs=_jobs(connection, begins, ends, {one.app for one in apps}),
        notes=notes,
        visits=visits,
        items=items,
    )


def _queries(connection: Connection, head: RecordingHead) -> Iterator[RecordedQuery]:
    last = head.begins
    linking = {model: app.app for app in reversed(head.apps) for model in app.links}
    for row in _cursor(
        connection,
        "queries",
        "SELECT extract(epoch FROM time)::float8, app, items, slo_ms, accuracy_required, cost_limit, outcome, latency_ms,"
        " accuracy, variant, code, model FROM query_outcomes WHERE time >= %(begins)s AND time < %(ends)s AND policy IS DISTINCT FROM 'offline'"
        " AND outcome <> 'cancelled' AND parent IS NULL AND (%(only)s::text[] IS NULL OR app = ANY (%(only)s)) ORDER BY time, uid",
        _bounds(head.begins, head.ends, head.only),
    ):
        at, app, *fields, model = row
        if app == WITHOUT_APP:  # it was asked of a model by itself
            app = linking.get(model, app)
        query = RecordedQuery(max(at, last), app, *fields)
        fault = query_fault(query, head, last)
        if fault:
            raise ReplayError(
                f"query_outcomes, {written(query.time)}, app {query.app}: {fault}: choose a range without it"
            )
        last = query.time
        yield query


def _clipped(connection: Connection, span: TimeRange) -> tuple[float, float]:
    """The range from its first to its last query or cost row. Nothing that costs money ran outside."""
    bounds = _bounds(span.begins, span.ends, sorted(set(span.apps)) or None)
    first, last, count = _one(
        connection,
        "SELECT extract(epoch FROM min(time))::float8, extract(epoch FROM max(time))::float8, count(*) FROM query_outcomes"
        " WHERE time >= %(begins)s AND time < %(ends)s AND policy IS DISTINCT FROM 'offline'"
        " AND outcome <> 'cancelled' AND parent IS NULL AND (%(only)s::text[] IS NULL OR app = ANY (%(only)s))",
        bounds,
    )
    if not count:
        _nothing(connection, span)
    paid_first, paid_last = _one(
        connection,
        "SELECT extract(epoch FROM min(time - make_interval(secs => seconds)))::float8, extract(epoch FROM max(time))::float8"
        " FROM cost_events WHERE time > %(begins)s AND time < %(ends)s + %(period)s::interval"
        " AND time - make_interval(secs => seconds) < %(ends)s",
        {**bounds, "period": _PERIOD},
    )
    ended = last + 1e-3  # includes the last query
    if paid_last is None:
        begins, ends = first, ended
    elif first < paid_last < last <= paid_last + _TAIL:
        begins, ends = min(first, paid_first), paid_last
    else:
        begins, ends = min(first, paid_first), max(ended, paid_last)
    begins, ends = max(span.begins, begins), min(span.ends, ends)
    return begins, max(ends, begins + 1e-3)


def _nothing(connection: Connection, span: TimeRange) -> None:
    first, last, count = _one(
        connection,
        "SELECT extract(epoch FROM min(time))::float8, extract(epoch FROM max(time))::float8, count(*) FROM query_outcomes"
        " WHERE policy IS DISTINCT FROM 'offline' AND parent IS NULL AND (%(only)s::text[] IS NULL OR app = ANY (%(only)s))",
        _bounds(0.0, 0.0, sorted(set(span.apps)) or None),
    )
    of = f" of {', '.join(span.apps)}" if span.apps else ""
    asked = f"no query{of} is recorded from {written(span.begins)} to {written(span.ends)}"
    if not count:
        raise NothingRecorded(f"{asked}, nor at any other time: send some (infaas bench), or read a file (--file)")
    raise NothingRecorded(
        f"{asked}: {count:,} are, from {written(first)} to {written(last)}: choose --from and --to there"
    )


def _every(duration: float) -> float:
    """Seconds of a bin: 1, 2 or 5 times a power of ten, at most _BINS of them."""
    if duration <= _LEAST_BIN:
        return duration
    least = max(_LEAST_BIN, duration / _BINS)
    size = 1.0
    while size < least:
        for factor in (2.0, 5.0, 10.0):
            if size * factor >= least:
                return size * factor
        size *= 10.0
    return size


def _used(connection: Connection, begins: float, ends: float, every: float) -> dict[int, float]:
    """Mean utilisation of all devices, by number of the bin."""
    rows = connection.execute(
        "SELECT floor(extract(epoch FROM time - %(begins)s) / %(every)s)::int, avg(utilisation) FROM worker_samples"
        " WHERE time >= %(begins)s AND time < %(ends)s GROUP BY 1",
        {**_bounds(begins, ends, None), "every": every},
    )
    return {number: min(1.0, max(0.0, used)) for number, used in rows}


def _workers(
    connection: Connection, begins: float, ends: float, bill: RecordedCost, prices: dict[str, float], notes: list[str]
) -> list[RecordedWorker]:
    """The workers with samples. Their cores follow from their cost."""
    found: dict[str, tuple[list[Device], float, float]] = {}
    rows = connection.execute(
        "SELECT worker, device, hardware, max(memory_mb), extract(epoch FROM min(time))::float8,"
        " extract(epoch FROM max(time))::float8 FROM worker_samples"
        " WHERE time >= %(begins)s - interval '10 s' AND time < %(ends)s + interval '10 s' GROUP BY 1, 2, 3 ORDER BY 1, 3, 2",
        _bounds(begins, ends, None),
    ).fetchall()
    guessed: set[str] = set()
    for worker, name, kind, memory_mb, first, last in rows:
        devices, since, until = found.get(worker, ([], first, last))
        cores = bill.cores(f"{worker}/{kind}", prices.get(kind, 0.0))
        if cores is None:
            cores = KINDS[kind].cores if kind in KINDS else 1
            if kind == "cpu":
                guessed.add(worker)
        simulated = bill.is_simulated(f"{worker}/{kind}")
        device = Device(name=name, kind=kind, cores=cores, memory_mb=max(1.0, memory_mb), simulated=simulated)
        found[worker] = ([*devices, device], min(since, first), max(until, last))
    if guessed:
        notes.append(
            f"nothing tells the cores of {', '.join(sorted(guessed)[:3])}: 1 is assumed; say more with --machines"
        )
    return [
        RecordedWorker(worker=worker, devices=devices, first=first, last=last)
        for worker, (devices, first, last) in sorted(found.items())
    ]


def _actions(connection: Connection, begins: float, ends: float) -> dict[str, int]:
    rows = connection.execute(
        "SELECT action, count(*) FROM scaling_events WHERE time >= %(begins)s AND time < %(ends)s AND count > 0"
        " GROUP BY 1 ORDER BY 1",
        _bounds(begins, ends, None),
    )
    return dict(rows.fetchall())


def _jobs(connection: Connection, begins: float, ends: float, apps: set[str]) -> list[RecordedJob]:
    rows = connection.execute(
        "SELECT app, extract(epoch FROM created)::float8, total, coalesce(accuracy, 0), model FROM jobs"
        " WHERE created >= %(begins)s AND created < %(ends)s AND total >= 1 ORDER BY created, job",
        _bounds(begins, ends, None),
    )
    fields = RecordedJob.__struct_fields__
    return [RecordedJob(**dict(zip(fields, row, strict=True))) for row in rows if row[0] in apps]


def _visits(
    connection: Connection, begins: float, ends: float, apps: list[AppRecord]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, tuple[int, int]]]]:
    """See RecordingHead: visits and items."""
    found: dict[str, dict[str, int]] = {}
    items: dict[str, dict[str, tuple[int, int]]] = {}
    names = sorted(one.app for one in apps if one.pipeline is not None)
    for app, stage, count, asked, squares in (
        _cursor(
            connection,
            "visits",
            "SELECT app, stage, count(*), sum(n)::bigint, sum(n * n)::bigint FROM (SELECT q.app, q.uid, part.stage, count(*) AS n"
            " FROM query_outcomes q JOIN query_outcomes part ON part.parent = q.uid"
            " WHERE q.time >= %(begins)s AND q.time < %(ends)s AND q.parent IS NULL AND q.outcome IN ('ok', 'late') AND q.app = ANY (%(only)s)"
            " AND part.time >= %(begins)s AND part.time < %(ends)s + %(period)s::interval AND part.stage IS NOT NULL GROUP BY 1, 2, 3) asked"
            " GROUP BY 1, 2",
            {**_bounds(begins, ends, names), "period": _PERIOD},
        )
        if names
        else ()
    ):
        found.setdefault(app, {})[stage] = count
        items.setdefault(app, {})[stage] = (asked, squares)
    return found, items


def _cursor(connection: Connection, name: str, query: str, values: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows, a page at a time."""
    with connection.cursor(name=name) as cursor:
        cursor.itersize = _PAGE
        cursor.execute(query.encode(), values)
        yield from cursor


def _named(connection: Connection, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Rows by the names of their columns."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query.encode(), values or None).fetchall()


def _one(connection: Connection, query: str, values: dict[str, Any]) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None  # an aggregate
    return tuple(row)


def _bounds(begins: float, ends: float, only: list[str] | None) -> dict[str, Any]:
    # PostgreSQL has microseconds, so bounds must not lie between two of them.
    first, last = (datetime.fromtimestamp(ceil(at * 1e6 - 0.25) / 1e6, UTC) for at in (begins, ends))
    return {"begins": first, "ends": last, "only": only}


# -- the catalogue, without artifacts and default answers, which a replay does not need

RECORDED = "recorded"  # in place of what is not needed


def apps_of(connection: Connection) -> list[AppRecord]:
    """All apps, each with the target of its own, if it has one."""
    rows = _named(
        connection,
        "SELECT app, versions AS links, latency_ms, min_instances, CASE WHEN own_target THEN slo_target END AS slo_target, accuracy,"
        " accuracy_mean, worth, graph AS pipeline, plan, selection FROM apps ORDER BY app",
    )
    return [msgspec.convert({**row, "signature": SIGNATURE}, AppRecord) for row in rows]


def usual_target_of(connection: Connection) -> float | None:
    """The target of apps without one of their own; None if each has one."""
    row = connection.execute("SELECT slo_target FROM apps WHERE NOT own_target LIMIT 1").fetchone()
    return None if row is None else row[0]


def variants_of(connection: Connection, apps: set[str], notes: list[str]) -> list[VariantRecord]:
    """The variants that serve these apps, with their profiles. Inputs are not recorded, so an item counts as one byte."""
    profiles: dict[str, list[ProfileRow]] = {}
    disturbed: set[str] = set()
    for row in _named(
        connection,
        "SELECT variant, batch, length, p50_ms, p99_ms, cpu_ms, wall_over_cpu, disturbed FROM profiles ORDER BY variant, length, batch",
    ):
        variant, flag = row.pop("variant"), row.pop("disturbed")
        profiles.setdefault(variant, []).append(ProfileRow(**row))
        if flag:
            disturbed.add(variant)
    found, without = [], []
    for row in _named(
        connection,
        "SELECT DISTINCT ON (variant) variant, model, version, hardware, framework, precision, greatest(1, threads) AS threads, max_batch,"
        " accuracy, agreement, load_ms, memory_mb, saturation_qps, batching, provenance, dominated, simulated, attributes, init_ms,"
        " transfer_ms, host_mb, model_accuracy, coalesce(alone, '') AS alone, differing, coalesce(m.metric, 'top1') AS metric"
        " FROM variants LEFT JOIN (SELECT model, version, metric FROM models) m USING (model, version) WHERE app = ANY (%s) ORDER BY variant",
        (sorted(apps),),
    ):
        name = row["variant"]
        if name not in profiles:
            without.append(name)
            continue
        measured = {key: row.pop(key) for key in Profile.__struct_fields__ if key in row}
        profile = Profile(rows=profiles[name], disturbed=name in disturbed, **measured)
        more = {"profile": profile, "signature": SIGNATURE, "artifact": RECORDED, "format": RECORDED}
        found.append(msgspec.convert({**row, **more}, VariantRecord))
    if without:
        notes.append(f"nothing was measured of {', '.join(without[:3])}: left out")
    return found


def prices_of(connection: Connection) -> dict[str, float]:
    """US$ per hour by kind of device, as they are now."""
    return dict(connection.execute("SELECT hardware, price_per_hour FROM prices").fetchall())
