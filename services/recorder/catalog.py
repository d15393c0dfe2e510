"""The records of the catalogue bucket as rows, for people who ask in SQL. The bucket is the authority; the rows are overwritten.

Beside them the mirror: each record as it is, which stays when NATS has lost its disk, since only what was deleted goes from it.
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from bus.codec import BadMessage, decode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord, value_of
from bus.subjects import WITHOUT_APP
from services.core.catalog import target_of
from services.core.cost import PER_CORE, UnknownPrice, cost_per_1000, instance_price_per_s, latency_ms, pays_whole
from services.recorder.events import Rejected, set_aside
from services.recorder.tables import moment
from services.shell.store import Store

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]


class CatalogWriter:
    """Writes catalogue entries. Not for several threads at once.

    prices: US$ an hour by device kind. slo_target: of apps without a target of their own.
    """

    def __init__(self, store: Store, prices: Mapping[str, float], slo_target: float) -> None:
        self._store = store
        self._prices = prices
        self._slo_target = slo_target

    def write(
        self,
        changes: Mapping[str, bytes | None],
        present: frozenset[str] | None,
        others: Mapping[tuple[str, str], bytes | None] = {},
    ) -> None:
        """Write these entries in one transaction (None: deleted). With `present`, delete rows of all other keys, and write the prices.

        An entry that is no record is set aside and counts as deleted. others: entries of other buckets, by bucket and key, for the mirror
        alone. Raises psycopg.Error.
        """
        with self._store.transaction() as connection:
            if present is not None:
                self._delete_others(connection, present)
                self._write_prices(connection)
            for key, value in changes.items():
                self._entry(connection, key, value)
            _mirror(connection, {**{("catalog", key): value for key, value in changes.items()}, **others})

    def _entry(self, connection: Connection, key: str, value: bytes | None) -> None:
        kind, _, name = key.partition(".")
        try:
            with connection.transaction():  # a savepoint: an entry that cannot be written leaves nothing behind
                if kind == "app":
                    _app(connection, name, None if value is None else decode(AppRecord, value), self._slo_target)
                elif kind == "model":
                    model, _, version = name.partition(".")
                    _model(connection, (model, version), None if value is None else decode(ModelRecord, value))
                elif kind == "variant":
                    self._variant(connection, name, None if value is None else decode(VariantRecord, value))
        except (BadMessage, psycopg.DataError, psycopg.IntegrityError, ValueError, OverflowError) as error:
            set_aside(connection, [Rejected(key, str(error), value or b"")])
            log.error("a catalogue entry was set aside: %s", error, extra={"key": key})
            if value is not None:
                self._entry(connection, key, None)

    def _variant(self, connection: Connection, name: str, record: VariantRecord | None) -> None:
        connection.execute("DELETE FROM infaas.profiles WHERE variant = %s", (name,))
        if record is None:
            connection.execute("DELETE FROM infaas_internal.variants WHERE variant = %s", (name,))
            return
        profile = record.profile
        price, cost, latency = self._price(record)
        _put(
            connection,
            "infaas_internal.variants",
            ("variant",),
            {
                "variant": name, "model": record.model, "version": record.version, "hardware": record.hardware,
                "framework": record.framework, "precision": record.precision, "threads": record.threads,
                "max_batch": record.max_batch, "accuracy": record.accuracy, "accuracy_low": record.accuracy_low,
                "accuracy_high": record.accuracy_high, "agreement": record.agreement,
                "load_ms": profile.load_ms, "latency_ms": latency, "memory_mb": profile.memory_mb,
                "init_ms": profile.init_ms, "transfer_ms": profile.transfer_ms, "host_mb": profile.host_mb,
                "saturation_qps": profile.saturation_qps, "price_per_hour": price, "cost_per_1000": cost,
                "batching": record.batching, "provenance": profile.provenance, "dominated": record.dominated,
                "simulated": record.simulated, "attributes": _json(record.attributes | ({} if record.cascade is None else {"cascade": record.cascade.words})),
                "shared": _shared(record), "model_accuracy": record.model_accuracy, "alone": record.alone or None,
                "functions": None if record.functions is None else record.functions.words,
                "differing": _json(record.differing), "metric": record.metric,
                "measured": None if record.accuracy is None else value_of(record.accuracy, record.metric),
            },
        )  # fmt: skip
        connection.cursor().executemany(
            "INSERT INTO infaas.profiles (model, version, variant, hardware, batch, length, p50_ms, p99_ms, cpu_ms,"
            " wall_over_cpu, provenance, disturbed) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                (
                    record.model, record.version, name, record.hardware, row.batch, row.length, row.p50_ms, row.p99_ms,
                    row.cpu_ms, row.wall_over_cpu, profile.provenance, profile.disturbed,
                )
                for row in profile.rows
            ],
        )  # fmt: skip

    def _price(self, record: VariantRecord) -> tuple[float | None, float | None, float | None]:
        """US$ an hour of an instance, US$ per 1,000 items one at a time, ms of one item; None where unknown.

        The device is assumed to have the instance's own size, as dispatchers assume while there is no worker of that kind. The view
        `variants` uses the devices that are there.
        """
        latency = latency_ms(record, 1) if record.profile.rows else None
        try:
            per_s = instance_price_per_s(
                record, self._prices, max(record.threads, 1), max(record.profile.memory_mb, 1.0)
            )
        except UnknownPrice:
            return None, None, latency
        return per_s * 3600.0, None if latency is None else cost_per_1000(record, per_s), latency

    def _write_prices(self, connection: Connection) -> None:
        connection.execute("DELETE FROM infaas.prices WHERE hardware <> ALL (%s)", (list(self._prices),))
        for kind, price in self._prices.items():
            row = {"hardware": kind, "price_per_hour": price, "unit": "core" if kind in PER_CORE else "device"}
            _put(connection, "infaas.prices", ("hardware",), row)

    def _delete_others(self, connection: Connection, present: frozenset[str]) -> None:
        """Delete the rows of keys that are no longer in the bucket."""
        for statement in (
            "SELECT 'app.' || app FROM infaas_internal.apps",
            "SELECT 'model.' || model || '.' || version FROM infaas_internal.models",
            "SELECT 'variant.' || variant FROM infaas_internal.variants",
        ):
            for (key,) in connection.execute(statement).fetchall():
                if key not in present:
                    self._entry(connection, key, None)


def _mirror(connection: Connection, changes: Mapping[tuple[str, str], bytes | None]) -> None:
    """Also what is set aside, since another release may read it."""
    rows = connection.cursor()
    rows.executemany(
        "DELETE FROM infaas.catalog WHERE bucket = %s AND key = %s",
        [entry for entry, value in changes.items() if value is None],
    )
    rows.executemany(
        "INSERT INTO infaas.catalog AS known (bucket, key, body, digest) VALUES (%s, %s, %s, %s) ON CONFLICT (bucket, key) DO UPDATE"
        " SET body = excluded.body, digest = excluded.digest, updated = now() WHERE known.digest <> excluded.digest",
        [(*entry, value, hashlib.sha256(value).digest()) for entry, value in changes.items() if value is not None],
    )


def _app(connection: Connection, name: str, record: AppRecord | None, slo_target: float) -> None:
    connection.execute("DELETE FROM infaas_internal.app_models WHERE app = %s", (name,))
    if record is None:
        connection.execute("DELETE FROM infaas_internal.apps WHERE app = %s", (name,))
        return
    signature = record.signature
    _put(
        connection,
        "infaas_internal.apps",
        ("app",),
        {
            "app": name,
            "latency_ms": record.latency_ms,
            "min_instances": record.min_instances,
            "default_output": None if record.default_output is None else _json(record.default_output),
            "inputs": None if signature is None else _json(signature.inputs),
            "outputs": None if signature is None else _json(signature.outputs),
            "created": moment(record.created),
            "slo_target": target_of(record, slo_target),
            "own_target": record.slo_target is not None,
            "accuracy": record.accuracy,
            "accuracy_mean": record.accuracy_mean,
            "worth": record.worth,
            "pipeline": record.pipeline is not None,
            "graph": None if record.pipeline is None else _json(record.pipeline),
            "plan": None if record.plan is None else _json(record.plan),
            "selection": None if record.selection is None else _json(record.selection),
        },
    )
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.app_models (app, model, version) VALUES (%s, %s, %s)",
        [(name, model, version) for model, version in record.links.items()],
    )


def _model(connection: Connection, key: tuple[str, str], record: ModelRecord | None) -> None:
    if record is None:
        connection.execute("DELETE FROM infaas_internal.models WHERE model = %s AND version = %s", key)
        return
    _put(
        connection,
        "infaas_internal.models",
        ("model", "version"),
        {
            "model": key[0],
            "version": key[1],
            "task": record.task,
            "metric": record.metric,
            "format": record.format,
            "inputs": _json(record.signature.inputs),
            "outputs": _json(record.signature.outputs),
            "registration": record.registration,
            "created": moment(record.created),
            "app": None if record.app == WITHOUT_APP else record.app,
        },
    )


def _shared(record: VariantRecord) -> bool:
    """Whether an instance pays for its part of a device that may hold others."""
    return record.price_per_s is None and record.hardware not in PER_CORE and not pays_whole(record.hardware)


def _json(value: Any) -> Jsonb:
    return Jsonb(value, dumps=msgspec.json.encode)


def _put(connection: Connection, table: str, key: tuple[str, ...], row: Mapping[str, Any]) -> None:
    """Insert a row, or overwrite the one with this key."""
    names = sql.SQL(", ")
    schema, _, name = table.partition(".")
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {}").format(
        sql.Identifier(schema, name),
        names.join(map(sql.Identifier, row)),
        names.join(map(sql.Placeholder, row)),
        names.join(map(sql.Identifier, key)),
        names.join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(column)) for column in row if column not in key),
    )
    connection.execute(statement, row)
